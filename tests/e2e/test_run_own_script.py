"""A user's own script, as the README has it, under `shoal run` with real kills."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from support.processes.commands import ANY_PORTS, Shoal, finish, read_until

ROOT = Path(__file__).parents[2]
README_SCRIPT = re.compile(r"```python\n(import shoal\n.*?)```", re.DOTALL)


def await_progress(audit: Path, num_lines: int) -> list[str]:
    """Wait until the file has so many lines, and return them."""
    deadline_s = time.monotonic() + 180.0
    while True:
        lines = audit.read_text().splitlines() if audit.exists() else []
        if len(lines) >= num_lines:
            return lines
        assert time.monotonic() < deadline_s, f"only {len(lines)} lines"
        time.sleep(0.02)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The README's script, changed to log its steps and its result."""
    found = README_SCRIPT.search((ROOT / "README.md").read_text())
    assert found is not None
    text = found.group(1)
    assert len([line for line in text.splitlines() if line.strip()]) <= 20
    backward = "            session.backward(loss)\n"
    assert backward in text
    tell = f"""
            with open({str(tmp_path / "steps")!r}, "a") as steps:
                print(session.member_id, __import__("os").getpid(), batch.step, file=steps)
"""
    done = """
print("right", (model(images).argmax(dim=1) == labels).float().mean().item())
"""
    path = tmp_path / "train.py"
    path.write_text(text.replace(backward, backward.rstrip() + tell) + done)
    return path


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy", ["ddp", "async-sgd", pytest.param("ssp", marks=pytest.mark.nightly)]
)
def test_the_readmes_script_survives_a_kill(
    shoal_command: Shoal, script: Path, tmp_path: Path, strategy: str
) -> None:
    """A killed worker is started again, the others continue, and the run succeeds."""
    script.write_text(script.read_text().replace('strategy="ddp"', f'strategy="{strategy}"'))
    # A cluster of its own has two parameter servers by default; ddp uses none.
    servers = "0" if strategy == "ddp" else "2"
    process = shoal_command.start("run", "-n", "3", "--ps", servers, str(script))
    lines = await_progress(tmp_path / "steps", 60)
    member, pid, _ = lines[-1].split()
    os.kill(int(pid), signal.SIGKILL)
    code, output = finish(process)
    assert code == 0, output
    assert f"{member} was killed by SIGKILL; started again" in output
    accuracies = [float(each) for each in re.findall(r"right ([0-9.]+)", output)]
    assert len(accuracies) >= 2
    assert min(accuracies) > 0.95
    assert "loss_not_falling" not in output
    after = {each.split()[1] for each in (tmp_path / "steps").read_text().splitlines()[60:]}
    survivors = {each.split()[1] for each in lines} - {pid}
    assert survivors <= after
    assert shoal_command.await_none(5.0) == {}


@pytest.mark.long
def test_a_killed_launcher_leaves_no_process(
    shoal_command: Shoal, script: Path, tmp_path: Path
) -> None:
    """SIGKILL of `shoal run` ends its workers and its own cluster."""
    process = shoal_command.start("run", "-n", "2", str(script))
    await_progress(tmp_path / "steps", 10)
    assert len(shoal_command.processes()) >= 7
    process.kill()
    process.wait()
    assert shoal_command.await_none(10.0) == {}


@pytest.mark.long
def test_ctrl_c_stops_a_run(shoal_command: Shoal, script: Path, tmp_path: Path) -> None:
    """SIGINT ends the workers and the cluster; the exit code is 130."""
    process = shoal_command.start("run", "-n", "2", "--ps", "0", str(script))
    await_progress(tmp_path / "steps", 10)
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert shoal_command.await_none(5.0) == {}


@pytest.mark.long
def test_up_serves_until_ctrl_c(shoal_command: Shoal, script: Path) -> None:
    """`shoal up` prints what to export, `shoal run` trains with it, and Ctrl-C ends all
    processes."""
    up = shoal_command.start("up", "--ps", "1", *ANY_PORTS)
    lines = read_until(up, "Ctrl-C stops")
    address = next(line.partition("=")[2] for line in lines if "export SHOAL_COORDINATOR=" in line)
    run = shoal_command.start(
        "run", "-n", "1", "--job", "first", str(script), environment={"SHOAL_COORDINATOR": address}
    )
    code, output = finish(run)
    assert code == 0, output
    again = shoal_command.start(
        "run", "-n", "1", "--job", "first", str(script), environment={"SHOAL_COORDINATOR": address}
    )
    code, output = finish(again)
    assert code == 1
    assert "job first is finished" in output
    assert "--fresh" in output
    assert "Traceback" not in output
    up.send_signal(signal.SIGINT)
    code, output = finish(up)
    assert code == 0, output
    assert shoal_command.processes() == {}
