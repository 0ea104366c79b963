"""A job's name used again on a running cluster: interrupted, started over, finished, removed."""

import signal
from pathlib import Path

import pytest
from support.processes.commands import Shoal, finish, read_until

EPOCHS, STEPS_PER_EPOCH, RATE = 3, 28, 2.0**-10

# All gradients are 1, so the weights count the updates since the initial values.
SCRIPT = f"""
import pathlib, time, shoal, torch
model = torch.nn.Linear(8, 8, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr={RATE})
slowly = pathlib.Path("slowly").exists()
with shoal.join() as session:
    model, optimizer = session.distribute(model, optimizer, strategy="async-sgd")
    data = torch.ones(32 * {STEPS_PER_EPOCH}, 8)
    for batch in session.batches(data, global_batch_size=32, epochs={EPOCHS}):
        with session.step():
            session.backward(model(batch.inputs).sum() / len(batch.inputs))
        if batch.step == 5:
            print("trains", flush=True)
        time.sleep(slowly)
(weight,) = model.parameters()
print("generation", session.generation, "updates", (-weight.max() / {RATE}).item(), flush=True)
"""


@pytest.mark.long
def test_a_jobs_name_can_be_used_again(shoal_command: Shoal, tmp_path: Path) -> None:
    """--fresh is refused while members live, and starts an interrupted or finished job over from
    its initial weights. A job that cannot be joined any more is reported in one line before
    anything starts."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "slowly").touch()
    up = shoal_command.start("up", "--ps", "1")
    welcome = read_until(up, "Ctrl-C stops the cluster")
    assert any("export SHOAL_COORDINATOR=" in line for line in welcome)
    coordinator = next(line.split()[-1] for line in welcome if line.startswith("coordinator"))

    def shoal(*arguments: str) -> tuple[int, str]:
        to_cluster = {"SHOAL_COORDINATOR": coordinator, "OMP_NUM_THREADS": "1"}
        return finish(shoal_command.start(*arguments, environment=to_cluster))

    interrupted = shoal_command.start(
        "run", "--job", "train", "train.py", environment={"SHOAL_COORDINATOR": coordinator}
    )
    read_until(interrupted, "trains")
    code, output = shoal("run", "--fresh", "--job", "train", "train.py")
    assert code == 1, output
    assert "job train has 1 live member; saw " in output
    assert "Stop them first. To join them, use `shoal run` without --fresh." in output
    interrupted.send_signal(signal.SIGINT)
    code, output = finish(interrupted)
    assert code == 128 + signal.SIGINT, output
    (tmp_path / "slowly").unlink()

    expected = f"updates {float(EPOCHS * STEPS_PER_EPOCH)}"
    for generation in (2, 3):
        code, output = shoal("run", "--fresh", "--job", "train", "train.py")
        assert code == 0, output
        assert "job train starts over: the records of its last run are removed" in output
        assert f"generation {generation} {expected}" in output
        code, output = shoal("run", "--job", "train", "train.py")
        assert code == 1, output
        line = output.strip().splitlines()[-1]
        assert line.startswith("shoal: job train is finished (")
        assert line.endswith("run it again with --fresh, or give another --job [JobFinished]")
        assert "workers elsewhere" not in output, "no worker can join a finished job"
        # As a Job of Kubernetes that replaces a pod late.
        code, output = shoal("run", "--finished-ok", "--job", "train", "train.py")
        assert (code, "job train is finished (" in output) == (0, True), output

    assert shoal("rm", "train") == (0, "job train is removed\n")
    code, output = shoal("rm", "trains")
    assert code == 1, output
    assert "there is no job 'trains'" in output
    up.send_signal(signal.SIGINT)
    code, output = finish(up)
    assert code == 0, output


@pytest.mark.long
def test_workers_of_a_finished_job_wait_for_sigterm(shoal_command: Shoal, tmp_path: Path) -> None:
    """A launcher with --finished-file does not end with its job, and not either if it is started
    again afterwards, as a Deployment does it: it writes the file and waits for SIGTERM."""
    (tmp_path / "train.py").write_text(SCRIPT)
    up = shoal_command.start("up", "--ps", "1")
    welcome = read_until(up, "Ctrl-C stops the cluster")
    coordinator = next(line.split()[-1] for line in welcome if line.startswith("coordinator"))
    file = tmp_path / "finished"
    for is_started_again in (False, True):
        options = ("--job", "train", "--finished-file", str(file), "train.py")
        run = shoal_command.start(
            "run", *options, environment={"SHOAL_COORDINATOR": coordinator, "OMP_NUM_THREADS": "1"}
        )
        output = read_until(run, "waiting for SIGTERM")
        assert any("job train is finished (" in line for line in output) == is_started_again
        assert file.exists()
        run.send_signal(signal.SIGTERM)
        code, rest = finish(run)
        assert code == 128 + signal.SIGTERM, rest
    up.send_signal(signal.SIGINT)
    code, rest = finish(up)
    assert code == 0, rest
