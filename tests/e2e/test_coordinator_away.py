"""The coordinator, or etcd, is down for long while jobs train: no member and no step is lost."""

import re
import signal
import time
from pathlib import Path

import pytest
from support.clusters.coordinator_processes import CoordinatorProcess
from support.clusters.etcd_fixture import etcd_processes
from support.processes.commands import Shoal, finish, read_until
from support.processes.served_process import ServedProcess, awaited
from support.training.counted_updates import counting_script

EPOCHS, STEPS_PER_EPOCH, RATE = 60, 28, 2.0**-10
LEADS_WITHIN_S = 60.0

SCRIPT = counting_script(EPOCHS, STEPS_PER_EPOCH, RATE)


@pytest.mark.long
@pytest.mark.parametrize("what", ["coordinator", pytest.param("etcd", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "away_s",
    [
        # Longer than the leader's lease, and than every limit after which a member is lost.
        8.0,
        # Longer than the leases of 30 s that members once had.
        pytest.param(45.0, marks=pytest.mark.nightly),
    ],
)
def test_training_continues_while_the_coordinator_or_etcd_is_down(
    shoal_command: Shoal, tmp_path: Path, away_s: float, what: str
) -> None:
    """Jobs of both kinds take steps meanwhile, and repeat none afterwards."""
    (tmp_path / "train.py").write_text(SCRIPT)
    with etcd_processes(tmp_path) as (supervisor, (etcd,)):
        first = CoordinatorProcess(supervisor, tmp_path, "first", etcd.endpoint).ready()
        server = ("ps", "--etcd", etcd.endpoint, "--listen", "127.0.0.1:0", "--id", "ps-0")
        ServedProcess(supervisor, tmp_path, "ps-0", *server).ready()
        to_cluster = {"SHOAL_COORDINATOR": first.grpc, "OMP_NUM_THREADS": "1"}
        runs = {
            strategy: shoal_command.start(
                "run", "-n", "2", "--job", strategy, "train.py", strategy, environment=to_cluster
            )
            for strategy in ("ddp", "async-sgd")
        }
        outputs = {strategy: read_until(run, "stepped on 20") for strategy, run in runs.items()}
        if what == "coordinator":
            first.process.send_signal(signal.SIGKILL)
        else:
            etcd.process.send_signal(signal.SIGSTOP)
        struck_s = time.monotonic()
        for strategy, run in runs.items():
            for _ in range(4):
                # Two members report every tenth step: the job trains while the part is away.
                outputs[strategy] += read_until(run, "stepped on")
        time.sleep(max(0.0, struck_s + away_s - time.monotonic()))
        leader = first
        if what == "coordinator":
            leader = CoordinatorProcess(
                supervisor, tmp_path, "second", etcd.endpoint, listen=first.grpc
            ).ready()
        else:
            etcd.process.send_signal(signal.SIGCONT)
        awaited(leader.leads, LEADS_WITHIN_S, "a coordinator leads")
        (tmp_path / "done").touch()
        for strategy, run in runs.items():
            code, output = finish(run, outputs[strategy])
            assert code == 0, output
            found = re.findall(r"did (\d+) ([0-9.]+) ([0-9.]+)", output)
            steps = [int(each[0]) for each in found]
            assert len(steps) == 2, output
            updates = sum(steps) if strategy == "async-sgd" else steps[0]
            assert updates == EPOCHS * STEPS_PER_EPOCH, "some steps were repeated"
            assert {float(weight) for each in found for weight in each[1:]} == {updates}, output
        text = leader.log_path.read_text()
        assert "member_removed" not in text
        assert "phase_aborted" not in text


@pytest.mark.long
def test_a_job_that_ends_while_the_coordinator_is_down_is_finished_afterwards(
    shoal_command: Shoal, tmp_path: Path
) -> None:
    """The workers wait at the end of their session, and repeat no step."""
    num_epochs = 10
    num_steps = num_epochs * STEPS_PER_EPOCH
    (tmp_path / "train.py").write_text(counting_script(num_epochs, STEPS_PER_EPOCH, RATE))
    with etcd_processes(tmp_path) as (supervisor, (etcd,)):
        first = CoordinatorProcess(supervisor, tmp_path, "first", etcd.endpoint).ready()
        to_cluster = {"SHOAL_COORDINATOR": first.grpc, "OMP_NUM_THREADS": "1"}
        run = shoal_command.start(
            "run", "-n", "2", "--job", "ddp", "train.py", "ddp", environment=to_cluster
        )
        output = read_until(run, "stepped on 20")
        first.process.send_signal(signal.SIGKILL)
        (tmp_path / "done").touch()
        # A member that has not done its work reports `leave_failed` instead, and ends.
        output += read_until(run, "waits_for=Leave", count=2)
        assert "\n".join(output).count(f"stepped on {num_steps}\n") == 2, output
        second = CoordinatorProcess(
            supervisor, tmp_path, "second", etcd.endpoint, listen=first.grpc
        ).ready()
        code, text = finish(run, output)
        assert code == 0, text
        assert text.count(f"did {num_steps} ") == 2, text
        assert "phase_finished" in second.log_path.read_text()
