"""Reports of members that join and leave: real workers, signals and commands."""

import os
import re
import signal
from pathlib import Path

import pytest
from support.processes.commands import Shoal, finish, read_until
from support.training.stepping_script import SCRIPT, await_steps


@pytest.mark.long
def test_a_killed_and_a_drained_worker_are_reported_in_one_line_each(
    shoal_command: Shoal, tmp_path: Path
) -> None:
    """Lines have the cause, the members that continue, the pause and the steps lost. They appear in
    `shoal events -f`, given only the coordinator's gRPC address, and in rank 0's log. `shoal logs`
    shows that log and a killed worker's; no other line reports a change, and Ctrl-C prints no
    traceback."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("here = ", "print('this is', os.getpid())\nhere = "))
    # Imitate another host: `shoal logs` then knows no files of this one.
    logs = ("--log-dir", str(tmp_path / "logs"))
    run = shoal_command.start(
        "run", "-n", "3", "--ps", "0", "--max-restarts", "0", *logs, str(script)
    )
    (line,) = [each for each in read_until(run, "coordinator at ") if "coordinator at" in each]
    found = re.search(r"coordinator at (\S+),", line)
    assert found is not None
    address = ("--coordinator", found[1])
    pids = await_steps(tmp_path, 3)
    follow = shoal_command.start("events", "train", "-f", *address)
    assert read_until(follow, "generation 1: ")[-1].endswith(" generation 1: 3 begin")

    rank_0, killed, drained = sorted(pids)
    os.kill(pids[killed], signal.SIGKILL)
    text = read_until(follow, "generation ")[-1]
    lost = rf"lost {killed} \(SIGKILL\); 2 go on; paused [0-9.]+ s; 0 steps lost"
    assert re.search(rf"generation \d+: {lost}$", text), text

    code, reply = finish(shoal_command.start("drain", drained, "--job", "train", *address))
    assert code == 0, reply
    text = read_until(follow, "generation ")[-1]
    left = rf"{drained} \(drained: an operator asked for it\) left; 1 goes on;"
    assert re.search(rf"generation \d+: {left} paused [0-9.]+ s; 0 steps lost$", text), text
    follow.send_signal(signal.SIGINT)
    code, output = finish(follow)
    assert (code, output.strip()) == (130, "")

    code, shown = finish(shoal_command.start("logs", "train", killed, *address))
    assert code == 0 and shown.startswith(f"this is {pids[killed]}\n"), shown
    code, shown = finish(shoal_command.start("logs", rank_0, "--job", "train", *address))
    assert code == 0, shown
    own = [line for line in shown.splitlines() if "generation " in line]
    assert len(own) == 2 and re.search(lost, own[0]), shown
    run.send_signal(signal.SIGINT)
    code, output = finish(run)
    assert code == 130, output
    assert "Traceback" not in output and "KeyboardInterrupt" not in output
