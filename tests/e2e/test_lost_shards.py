"""Servers of a shard are all killed at once: the shard is reported lost by name until an operator
decides."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.processes.commands import Shoal, finish, part_pids, read_until

SCRIPT = """
import pathlib, time, shoal, torch
done = pathlib.Path("done")
trained = 0
model = torch.nn.Linear(8, 8, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
with shoal.join() as session:
    model, optimizer = session.distribute(model, optimizer, strategy="async-sgd")
    for batch in session.batches(torch.ones(32 * 500, 8), global_batch_size=32, epochs=4):
        with session.step():
            session.backward(model(batch.inputs).sum() / len(batch.inputs))
        trained += len(batch.indices)
        if batch.step == 20:
            print("trains", flush=True)
        if not done.exists():
            time.sleep(0.05)
print("is done with", trained, flush=True)
"""
NUM_SAMPLES = 32 * 500 * 4
CALL_S = 120.0
"""The longest that a push waits. The loss is known once both servers were started again; if that
takes longer than a push waits, the worker ends without StateLost."""


@pytest.mark.long
def test_a_lost_shard_is_named_until_its_loss_is_accepted(
    shoal_command: Shoal, tmp_path: Path
) -> None:
    """The worker ends with StateLost and `shoal status` names the lost shard. `shoal accept-loss`
    gives it up only for the right job, and only if its name is repeated; then training
    continues."""
    (tmp_path / "train.py").write_text(SCRIPT)
    up = shoal_command.start("up", "--dir", str(tmp_path / "up"), "--join-s", f"{4 * CALL_S:g}")
    welcome = read_until(up, "Ctrl-C stops the cluster")
    coordinator = next(line.split()[-1] for line in welcome if line.startswith("coordinator"))
    page = next(word for line in welcome for word in line.split() if word.startswith("http://"))
    environment = {
        "SHOAL_COORDINATOR": coordinator,
        "SHOAL_HTTP": page,
        "OMP_NUM_THREADS": "1",
    }

    def shoal(*arguments: str, typed: str = "") -> "subprocess.Popen[str]":
        return shoal_command.start(*arguments, environment=environment, typed=typed)

    def result_of(*arguments: str, typed: str = "") -> tuple[int, str]:
        return finish(shoal(*arguments, typed=typed))

    run = shoal("run", "-n", "1", "--job", "digits", "train.py")
    before = read_until(run, "trains")
    code, output = result_of("accept-loss", "digits", "--yes")
    assert code == 1 and "job digits has lost no shard" in output

    pids = part_pids(shoal_command)
    for server in ("ps-0", "ps-1"):
        os.kill(pids[server], signal.SIGKILL)
    code, output = finish(run, before)
    assert code != 0
    assert "StateLost" in output
    assert "shard 0 of job digits was lost with every server that had it" in output
    assert "shoal accept-loss digits" in output

    code, output = result_of("status", "--job", "digits")
    assert code == 0
    assert "lost: shard 0 of job digits was lost" in output, output
    assert "No snapshot of its present shards is at" in output

    code, output = result_of("accept-loss", "digit", "--yes")
    assert code == 1 and "there is no job 'digit'" in output
    code, output = result_of("accept-loss", "digits", typed="digit\n")
    assert code == 1 and "nothing has changed" in output, output
    code, output = result_of("accept-loss", "digits", typed="digits\n")
    assert code == 0, output
    assert "loss of shard 0 (" in output and "of job digits accepted by" in output
    assert f"of {NUM_SAMPLES} were trained on): the next run trains on all of them" in output
    code, output = result_of("accept-loss", "digits")
    assert code == 0 and ", in an earlier call" in output, output
    assert "The job's samples start over" not in output
    code, output = result_of("status", "--job", "digits")
    assert "lost: shard" not in output
    assert "loss of shard 0" in output, output

    (tmp_path / "done").touch()
    code, output = result_of("run", "-n", "1", "--job", "digits", "train.py")
    assert code == 0, output
    # The next run trains on all samples: nothing is left of what the last run learned from the
    # first ones.
    assert f"is done with {NUM_SAMPLES}" in output
    up.send_signal(signal.SIGINT)
    assert finish(up)[0] == 0
