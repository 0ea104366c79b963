"""The coordinator is killed and stays away while jobs train: nobody is lost, and no step is."""

import re
import signal
import time
from pathlib import Path

import pytest
from e2e.conftest import Shoal, finish, read_until
from support.clusters.coordinator_processes import CoordinatorProcess
from support.clusters.etcd_fixture import running_etcd
from support.processes.served_process import ServedProcess, awaited

from shoal_client.local.process import Supervisor

EPOCHS, STEPS_PER_EPOCH, RATE = 60, 28, 2.0**-10
LEADS_WITHIN_S = 60.0

# Each gradient is one everywhere, so the weights count the updates: none lost, none twice.
SCRIPT = f"""
import pathlib, sys, time, shoal, torch
done, steps = pathlib.Path("done"), 0
model = torch.nn.Linear(8, 8, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr={RATE})
with shoal.join() as session:
    # Without a policy for staleness, so that the weights count the updates here too.
    strategy = shoal.AsyncSGD(staleness="none") if sys.argv[1] == "async-sgd" else sys.argv[1]
    model, optimizer = session.distribute(model, optimizer, strategy=strategy)
    data = torch.ones(32 * {STEPS_PER_EPOCH}, 8)
    for batch in session.batches(data, global_batch_size=32, epochs={EPOCHS}):
        with session.step():
            session.backward(model(batch.inputs).sum() / len(batch.inputs))
        steps += 1
        if steps % 10 == 0:
            print("stepped on", steps, flush=True)
        if not done.exists():
            time.sleep(0.04)
(weight,) = model.parameters()
print("did", steps, (-weight.min() / {RATE}).item(), (-weight.max() / {RATE}).item(), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "away_s",
    [
        # Longer than the leader's lease, and than every limit after which a member is lost.
        8.0,
        # Longer than the leases of 30 s that members once were under.
        pytest.param(45.0, marks=pytest.mark.nightly),
    ],
)
def test_training_outlasts_the_coordinator(
    shoal_command: Shoal, tmp_path: Path, away_s: float
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with running_etcd(tmp_path) as etcd, Supervisor(grace_s=5.0) as supervisor:
        first = CoordinatorProcess(supervisor, tmp_path, "first", etcd).ready()
        server = ("ps", "--etcd", etcd, "--listen", "127.0.0.1:0", "--id", "ps-0")
        ServedProcess(supervisor, tmp_path, "ps-0", *server).ready()
        to_cluster = {"SHOAL_COORDINATOR": first.grpc, "OMP_NUM_THREADS": "1"}
        runs = {
            strategy: shoal_command.start(
                "run", "-n", "2", "--job", strategy, "train.py", strategy, environment=to_cluster
            )
            for strategy in ("ddp", "async-sgd")
        }
        said = {strategy: read_until(run, "stepped on 20") for strategy, run in runs.items()}
        first.process.send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        for _ in range(4):
            # Two members tell of every tenth step: the job steps on while nobody is there.
            said["ddp"] += read_until(runs["ddp"], "stepped on")
        time.sleep(max(0.0, killed_s + away_s - time.monotonic()))
        second = CoordinatorProcess(supervisor, tmp_path, "second", etcd, listen=first.grpc).ready()
        awaited(second.leads, LEADS_WITHIN_S, "the second one leads")
        said["async-sgd"] += read_until(runs["async-sgd"], "stepped on")
        (tmp_path / "done").touch()
        for strategy, run in runs.items():
            code, output = finish(run, said[strategy])
            assert code == 0, output
            found = re.findall(r"did (\d+) ([0-9.]+) ([0-9.]+)", output)
            steps = [int(each[0]) for each in found]
            assert len(steps) == 2, output
            updates = sum(steps) if strategy == "async-sgd" else steps[0]
            print(f"{strategy}: {updates - EPOCHS * STEPS_PER_EPOCH} steps taken again")
            assert {float(weight) for each in found for weight in each[1:]} == {updates}, output
            # Samples leased in the quarter of a second before the kill are leased again.
            again = updates - EPOCHS * STEPS_PER_EPOCH
            assert 0 <= again <= (20 if strategy == "async-sgd" else 0)
        told = second.log_path.read_text()
        assert "member_removed" not in told
        assert "phase_aborted" not in told
