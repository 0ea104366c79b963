"""`shoal up`, and `shoal run` on its own cluster, with kill -9 of the parts while jobs train."""

import os
import re
import signal
from functools import partial
from pathlib import Path

import httpx
import pytest
from e2e.conftest import ANY_PORTS, Shoal, finish, read_until
from support.network import http
from support.processes.served_process import awaited

EPOCHS, STEPS_PER_EPOCH, RATE = 60, 28, 2.0**-10

# Each gradient is one everywhere, so the weights count the updates: none lost, none twice. For that
# a stale one is stepped on as it is.
SCRIPT = f"""
import pathlib, sys, time, shoal, torch
done, steps = pathlib.Path("done"), 0
model = torch.nn.Linear(8, 8, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr={RATE})
strategy = sys.argv[1]
if strategy == "async-sgd":
    strategy = shoal.AsyncSGD(staleness="none")
with shoal.join() as session:
    model, optimizer = session.distribute(model, optimizer, strategy=strategy)
    data = torch.ones(32 * {STEPS_PER_EPOCH}, 8)
    for batch in session.batches(data, global_batch_size=32, epochs={EPOCHS}):
        with session.step():
            session.backward(model(batch.inputs).sum() / len(batch.inputs))
        steps += 1
        if batch.step == 5:
            print("trains", flush=True)
        if not done.exists():
            time.sleep(0.04)
(weight,) = model.parameters()
print("did", steps, (-weight.min() / {RATE}).item(), (-weight.max() / {RATE}).item(), flush=True)
"""


def part_pids(command: Shoal) -> dict[str, int]:
    """The parts that run, by name."""
    found = {}
    for pid, line in command.processes().items():
        if " coordinator " in line:
            found["coordinator"] = pid
        elif server := re.search(r" --id (ps-\d)", line):
            found[server[1]] = pid
        elif "--data-dir" in line:
            found["etcd"] = pid
    return found


def every_shard_has_a_copy(page: str) -> bool:
    """Whether the job loses nothing with one server more."""
    try:
        answer = http.get(f"{page}/api/v1/jobs/async-sgd/shards", timeout=5.0)
    except httpx.HTTPError:
        return False
    if answer.status_code != 200:
        return False
    copies = [shard["replication"]["copies"] for shard in answer.json()["shards"]]
    return bool(copies) and all(any(not c["joining"] for c in each) for each in copies)


@pytest.mark.long
def test_training_outlives_each_part_of_a_cluster(shoal_command: Shoal, tmp_path: Path) -> None:
    """Every part of `shoal up` is killed in turn while a DDP job and an asynchronous one train:
    each is started again, both jobs end with every update applied once, and nothing is left."""
    (tmp_path / "train.py").write_text(SCRIPT)
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
    said = {strategy: read_until(run, "trains") for strategy, run in runs.items()}
    page = next(line.split()[-1] for line in welcome if line.startswith("status page"))
    for part in ("ps-0", "coordinator", "etcd", "ps-1"):
        awaited(partial(every_shard_has_a_copy, page), 120.0, "every shard has a copy")
        os.kill(part_pids(shoal_command)[part], signal.SIGKILL)
        read_until(up, f"shoal up: {part} was killed by SIGKILL; starting it again")
        read_until(up, f"shoal up: {part} serves again")
    (tmp_path / "done").touch()
    for strategy, run in runs.items():
        code, output = finish(run, said[strategy])
        assert code == 0, output
        found = re.findall(r"did (\d+) ([0-9.]+) ([0-9.]+)", output)
        steps = [int(each[0]) for each in found]
        # Together in each step, or each at its own pace. Reports of samples that a coordinator took
        # just before it died may be lost, and the samples are trained on again: a few steps more.
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
def test_a_run_ends_when_its_own_cluster_cannot_stay_up(
    shoal_command: Shoal, tmp_path: Path
) -> None:
    """Its etcd's data go bad: the run names etcd, ends its worker, and leaves nothing behind."""
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
