"""Launchers under real signals, for jobs with too few members and for workers that cannot end."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from support.network.ports import free_port
from support.processes.commands import ANY_PORTS, Shoal, finish, read_until
from support.training.stepping_script import SCRIPT, await_steps

LIMITS = ("--join-s", "10", "--collective-s", "4", "--heartbeat-s", "0.4")


@pytest.mark.long
def test_a_joiner_whose_time_limit_expired_is_started_again(
    shoal_command: Shoal, tmp_path: Path
) -> None:
    """The restarted worker meets a later one, and both complete."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "finish").touch()
    up = shoal_command.start("up", "--ps", "0", *ANY_PORTS, *LIMITS)
    found = re.search(r"coordinator +(\S+)", read_until(up, "coordinator ")[-1])
    assert found is not None
    options = ("-n", "1", "--min", "2", "--desired", "2", "--job", "few")
    arguments = ("run", *options, "--coordinator", found[1], str(script))
    first = shoal_command.start(*arguments)
    lines = read_until(first, "started again in 0.5 s (restart 1 of 3)")
    assert "no generation formed within 10 s: 1 of at least 2 members were ready" in "".join(lines)
    assert "ended with a temporary error (exit code 1)" in lines[-1]
    second = shoal_command.start(*arguments)
    for process in (first, second):
        code, output = finish(process)
        assert code == 0, output
        assert "1 of 1 workers completed" in output


@pytest.mark.long
def test_a_run_waits_for_a_cluster_that_starts_after_it(
    shoal_command: Shoal, tmp_path: Path
) -> None:
    """The cluster's certificates are made, and announced, while the run waits."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "finish").touch()
    port = free_port()
    waiting = {**os.environ, "SHOAL_ADMISSION_S": "600"}
    address = f"127.0.0.1:{port}"
    run = shoal_command.start("run", "--coordinator", address, str(script), environment=waiting)
    read_until(run, "Waiting for a coordinator for up to")
    shoal_command.start("up", "--ps", "0", "--port", str(port), "--http-port", "0")
    code, output = finish(run)
    assert code == 0, output
    assert "a coordinator has answered" in output


@pytest.mark.long
def test_signals_to_launcher_and_workers_drain(shoal_command: Shoal, tmp_path: Path) -> None:
    """Slurm and systemd signal both the launcher and its workers."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = shoal_command.start("run", "-n", "2", "--ps", "0", str(script))
    for pid in (*await_steps(tmp_path, 2).values(), run.pid):
        os.kill(pid, signal.SIGTERM)
    code, output = finish(run)
    assert code == 128 + signal.SIGTERM, output
    assert output.count("was drained (exit code 143)") == 2, output
    assert "was killed by" not in output


@pytest.mark.long
def test_a_run_is_not_suspended(shoal_command: Shoal, tmp_path: Path) -> None:
    """Ctrl-Z would leave the workers' output unread, and workers that print would be expelled. The
    terminal sends it to the reader of the run's output too."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    line = f"{sys.executable} -u -m shoal_client run -n 1 --ps 0 {script} 2>&1 | cat"
    job = "import os; os.setpgid(0, 0); os.execv('/bin/sh', ['sh', '-c', os.environ['LINE']])"
    shell = shoal_command.start_python("-c", job, environment={"LINE": line})
    await_steps(tmp_path, 1)
    os.killpg(shell.pid, signal.SIGTSTP)
    read_until(shell, "Ctrl-Z does not suspend a run")
    (tmp_path / "finish").touch()
    _, output = finish(shell)
    assert "1 of 1 workers completed" in output


@pytest.mark.long
def test_a_halted_worker_is_replaced(shoal_command: Shoal, tmp_path: Path) -> None:
    """The job trains meanwhile, and the launcher does not wait for a SIGCONT that never comes."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = shoal_command.start("run", "-n", "2", "--ps", "0", str(script))
    member, pid = next(iter(await_steps(tmp_path, 2).items()))
    os.kill(pid, signal.SIGSTOP)
    lines = read_until(run, f"{member} was killed by SIGKILL; started again (restart 1 of 3)")
    assert f"{member} was declared lost while it was halted" in "".join(lines)
    while pid in await_steps(tmp_path, 2).values():
        pass
    (tmp_path / "finish").touch()
    code, output = finish(run)
    assert code == 0, output
    assert "2 of 2 workers completed" in output
