"""Drains as users request them: by a command, or by a signal."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.processes.commands import Shoal, finish, read_until
from support.training.stepping_script import SCRIPT, await_steps


@pytest.mark.long
def test_a_drain_costs_no_step_of_other_members(shoal_command: Shoal, tmp_path: Path) -> None:
    """Members drained by `shoal drain` and by SIGTERM finish their step and exit with 143. No step
    of another member fails because of it, and the last member completes the job."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = shoal_command.start("run", "-n", "3", "--ps", "0", str(script))
    lines = read_until(run, "coordinator at ")
    found = re.search(r"coordinator at (\S+), status page at (\S+)", lines[-1])
    assert found is not None
    coordinator, http = found.groups()
    first, second, _ = await_steps(tmp_path, 3).items()

    asked = ("--job", "train", "--coordinator", coordinator, "--http", http)
    code, reply = finish(shoal_command.start("drain", first[0], *asked))
    assert code == 0, reply
    assert re.fullmatch(
        rf"{first[0]} left job train after [0-9.]+ s; generation \d+ runs with 2 members",
        reply.strip(),
    )
    await_steps(tmp_path, 2)
    os.kill(second[1], signal.SIGTERM)
    await_steps(tmp_path, 1)

    (tmp_path / "finish").touch()
    code, output = finish(run)
    assert code == 0, output
    for member, _ in (first, second):
        assert f"{member} was drained (exit code 143)" in output
    assert "1 of 3 workers completed, drained: " in output
    assert "started again" not in output
    steps = (tmp_path / "steps").read_text().splitlines()
    assert all(line.endswith(" True") for line in steps), "a step was lost"


@pytest.mark.long
def test_sigterm_drains_a_run(shoal_command: Shoal, tmp_path: Path) -> None:
    """`shoal run` gets SIGTERM: each worker finishes its step, none is killed, and the exit code is
    143."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = shoal_command.start("run", "-n", "2", "--ps", "0", str(script))
    await_steps(tmp_path, 2)
    run.send_signal(signal.SIGTERM)
    code, output = finish(run)
    assert code == 128 + signal.SIGTERM, output
    assert output.count("was drained (exit code 143)") == 2, output
    assert "SIGKILL" not in output
    assert shoal_command.await_none(5.0) == {}


KEEPS = """
import os, pathlib, sys, time
import shoal, torch

here = pathlib.Path(__file__).parent
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = (torch.randn(240, 8), torch.randn(240, 2))
strategy = {"local-sgd": shoal.LocalSGD(every_steps=7)}.get(sys.argv[1], sys.argv[1])
keeps = shoal.Checkpoints(here / "kept", every_steps=100_000)
with shoal.join() as session:
    (here / f"pid-{session.member_id}").write_text(str(os.getpid()))
    model, optimizer = session.distribute(model, optimizer, strategy=strategy, checkpoints=keeps)
    for batch in session.batches(data, global_batch_size=6, epochs=10):
        with session.step() as step:
            session.forward_backward(batch, torch.nn.functional.mse_loss)
        with open(here / "steps", "a") as steps:
            print(session.member_id, batch.step, session.world_size, step.committed, file=steps)
        if not (here / "finish").exists():
            time.sleep(0.02)
    state = session.state_dict()
    if session.is_first:
        torch.save(state, here / "trained.pt")
"""


def last_step(directory: Path) -> int:
    """The last step committed by any member of KEEPS."""
    lines = [line.split() for line in (directory / "steps").read_text().splitlines()]
    return max(int(step) for _, step, _, committed in lines if committed == "True")


def as_one_process(directory: Path) -> dict[str, torch.Tensor]:
    """Weights of KEEPS after training from its first step to its last in one process."""
    alone = directory / "alone"
    alone.mkdir()
    (alone / "train.py").write_text(KEEPS)
    (alone / "finish").touch()
    script = [sys.executable, str(alone / "train.py"), "ddp"]
    subprocess.run(script, check=True, capture_output=True, timeout=120)
    return torch.load(alone / "trained.pt")


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp",
        pytest.param("ddp", marks=pytest.mark.nightly),
        pytest.param("pipeline", marks=pytest.mark.long),
        pytest.param("local-sgd", marks=pytest.mark.nightly),
    ],
)
def test_sigterm_of_a_job_keeps_its_last_step(
    shoal_command: Shoal, tmp_path: Path, strategy: str
) -> None:
    """The only launcher gets SIGTERM: the members write a checkpoint of the last step that any of
    them committed, and the job continues from it."""
    script = tmp_path / "train.py"
    script.write_text(KEEPS)
    command = ("run", "-n", "2", "--ps", "0", str(script), strategy)
    run = shoal_command.start(*command)
    await_steps(tmp_path, 2)
    run.send_signal(signal.SIGTERM)
    code, output = finish(run)
    assert code == 128 + signal.SIGTERM, output
    assert output.count("was drained (exit code 143)") == 2, output
    next_step = last_step(tmp_path) + 1
    kept = [path.name for path in (tmp_path / "kept").iterdir()]
    assert kept == [f"step-{next_step:08d}"], output

    (tmp_path / "steps").unlink()
    (tmp_path / "finish").touch()
    code, output = finish(shoal_command.start(*command))
    assert code == 0, output
    first = (tmp_path / "steps").read_text().splitlines()[0].split()
    assert int(first[1]) == next_step, "the job did not continue from the checkpoint"
    if strategy != "local-sgd":
        trained = torch.load(tmp_path / "trained.pt")
        for name, expected in as_one_process(tmp_path).items():
            torch.testing.assert_close(trained[name], expected, rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("lost", ["", "before", "behind"])
def test_members_without_replacement_keep_their_last_step(
    shoal_command: Shoal, tmp_path: Path, lost: str
) -> None:
    """The job has as many members as `--min`. One may be killed before the signal, so that the
    other waits for more members, or right after it."""
    script = tmp_path / "train.py"
    script.write_text(KEEPS)
    options = ("-n", "2", "--min", "2", "--ps", "0", "--max-restarts", "0")
    run = shoal_command.start("run", *options, str(script), "ddp")
    await_steps(tmp_path, 2)
    first, _ = (int(path.read_text()) for path in tmp_path.glob("pid-*"))
    if lost == "before":
        os.kill(first, signal.SIGKILL)
        read_until(run, "1 more member, no limit")
    run.send_signal(signal.SIGTERM)
    if lost == "behind":
        os.kill(first, signal.SIGKILL)
    code, output = finish(run)
    assert code != 0, output
    kept = [path.name for path in (tmp_path / "kept").iterdir()]
    assert kept == [f"step-{last_step(tmp_path) + 1:08d}"], output


@pytest.mark.long
def test_a_script_without_a_launcher_keeps_its_last_step(tmp_path: Path) -> None:
    """A script started as `python train.py` gets SIGTERM: a checkpoint of its last step exists at
    its end."""
    script = tmp_path / "train.py"
    script.write_text(KEEPS)
    process = subprocess.Popen([sys.executable, str(script), "ddp"])
    await_steps(tmp_path, 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    kept = [path.name for path in (tmp_path / "kept").iterdir()]
    assert kept == [f"step-{last_step(tmp_path) + 1:08d}"]


@pytest.mark.long
def test_a_stopped_job_keeps_its_last_step(shoal_command: Shoal, tmp_path: Path) -> None:
    """`shoal stop` ends all members after the same step, and they write a checkpoint of it."""
    script = tmp_path / "train.py"
    script.write_text(KEEPS)
    run = shoal_command.start("run", "-n", "2", "--ps", "0", str(script), "fsdp")
    lines = read_until(run, "coordinator at ")
    found = re.search(r"coordinator at ([^, ]+)", lines[-1])
    assert found is not None
    await_steps(tmp_path, 2)
    stop = ("stop", "train", "--coordinator", found.group(1))
    code, reply = finish(shoal_command.start(*stop))
    assert code == 0, reply
    code, output = finish(run)
    assert code == 128 + signal.SIGTERM, output
    kept = [path.name for path in (tmp_path / "kept").iterdir()]
    assert kept == [f"step-{last_step(tmp_path) + 1:08d}"]


@pytest.mark.long
def test_a_worker_that_ignores_sigterm_is_killed(shoal_command: Shoal, tmp_path: Path) -> None:
    """Too few workers are left in a run with a cluster of its own: a worker that ignores SIGTERM is
    killed after the grace period."""
    script = tmp_path / "train.py"
    os.mkfifo(tmp_path / "deaf")
    script.write_text("""
import os, pathlib, signal, sys
deaf = pathlib.Path(__file__).with_name("deaf")
if os.environ["SHOAL_MEMBER_ID"].endswith("-0"):
    sys.exit(int(deaf.read_text()))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf.write_text("5")
while True: signal.pause()
""")
    options = ("-n", "2", "--min", "2", "--ps", "0", "--grace-s", "0.5")
    code, output = finish(shoal_command.start("run", *options, str(script)))
    assert code == 5, output
    assert "1 workers left, at least 2 needed" in output
    assert "was killed by SIGKILL" in output
