"""`shoal up`, and `shoal run` on its own cluster, while parts are killed with SIGKILL and jobs
train."""

import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest
from support.processes.commands import (
    ANY_PORTS,
    Shoal,
    every_shard_has_a_copy,
    finish,
    part_pids,
    read_until,
)
from support.processes.served_process import awaited
from support.training.counted_updates import counting_script

EPOCHS, STEPS_PER_EPOCH, RATE = 60, 28, 2.0**-10


@pytest.mark.long
def test_training_survives_a_kill_of_each_part(shoal_command: Shoal, tmp_path: Path) -> None:
    """Parts of `shoal up` are killed in turn while a DDP job and an asynchronous one train. Each
    part is started again, both jobs end with every update applied once, and no process is left."""
    (tmp_path / "train.py").write_text(counting_script(EPOCHS, STEPS_PER_EPOCH, RATE))
    up = shoal_command.start("up", "--dir", str(tmp_path / "up"), *ANY_PORTS)
    welcome = read_until(up, "Ctrl-C stops the cluster")
    coordinator = next(line.split()[-1] for line in welcome if line.startswith("coordinator"))
    to_cluster = {"SHOAL_COORDINATOR": coordinator, "OMP_NUM_THREADS": "1"}
    runs = {
        strategy: shoal_command.start(
            "run", "-n", "2", "--job", strategy, "train.py", strategy, environment=to_cluster
        )
        for strategy in ("ddp", "async-sgd")
    }
    outputs = {strategy: read_until(run, "stepped on") for strategy, run in runs.items()}
    page = next(line.split()[-1] for line in welcome if line.startswith("status page"))
    shards = f"{page}/api/v1/jobs/async-sgd/shards"
    for part in ("ps-0", "coordinator", "etcd", "ps-1"):
        awaited(partial(every_shard_has_a_copy, shards), 120.0, "every shard has a copy")
        os.kill(part_pids(shoal_command)[part], signal.SIGKILL)
        read_until(up, f"shoal up: {part} was killed by SIGKILL; starting it again")
        read_until(up, f"shoal up: {part} serves again")
    (tmp_path / "done").touch()
    for strategy, run in runs.items():
        code, output = finish(run, outputs[strategy])
        assert code == 0, output
        found = re.findall(r"did (\d+) ([0-9.]+) ([0-9.]+)", output)
        steps = [int(each[0]) for each in found]
        # DDP workers step together, asynchronous ones at their own pace. Reports of samples that a
        # coordinator took just before its end may be lost; these samples are trained again, in a
        # few more steps.
        updates = sum(steps) if strategy == "async-sgd" else steps[0]
        assert {float(weight) for each in found for weight in each[1:]} == {updates}, output
        assert updates >= EPOCHS * STEPS_PER_EPOCH
        assert strategy == "async-sgd" or updates == EPOCHS * STEPS_PER_EPOCH
    assert up.poll() is None
    up.send_signal(signal.SIGINT)
    code, output = finish(up)
    assert code == 0, output
    assert shoal_command.await_none(5.0) == {}


@pytest.mark.long
def test_a_run_ends_if_the_data_of_its_etcd_are_damaged(
    shoal_command: Shoal, tmp_path: Path
) -> None:
    """The run names etcd, ends its worker, and leaves no process."""
    (tmp_path / "wait.py").write_text("import signal; print('waits', flush=True); signal.pause()")
    run = shoal_command.start("run", "--ps", "0", "wait.py", environment={"TMPDIR": str(tmp_path)})
    read_until(run, "waits")
    for path in tmp_path.glob("shoal-run-*/etcd/etcd.etcd/**/*.wal"):
        path.write_bytes(b"no log at all")
    os.kill(part_pids(shoal_command)["etcd"], signal.SIGKILL)
    code, output = finish(run)
    assert code == 1, output
    assert "ending the workers: etcd cannot stay up" in output
    assert shoal_command.await_none(5.0) == {}
