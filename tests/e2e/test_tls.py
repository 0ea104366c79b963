"""`shoal up` uses TLS by default: jobs train and recover, and no other caller has access."""

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.network.gates import Network
from support.processes.commands import (
    ANY_PORTS,
    DEADLINE_S,
    Shoal,
    every_shard_has_a_copy,
    finish,
    part_pids,
    read_until,
)
from support.processes.served_process import awaited
from support.training.counted_updates import counting_script

EPOCHS, STEPS_PER_EPOCH, RATE = 60, 28, 2.0**-10

SCRIPT = """
import os, pathlib, sys, shoal, torch
torch.manual_seed(1)
done = pathlib.Path("done")
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with shoal.join() as session:
    model, optimizer = session.distribute(model, optimizer, strategy=sys.argv[1])
    data = torch.ones(64, 64)
    for batch in session.batches(data, global_batch_size=16, epochs=int(sys.argv[2])):
        with session.step():
            session.backward(model(batch.inputs).square().mean())
        if batch.step == 5:
            print("trains", os.getpid(), flush=True)
        if batch.step % 20 == 19:
            print("goes on in", session.generation, "with", session.world_size, flush=True)
        if done.exists():
            session.stop("seen enough")
"""


def variables(welcome: list[str]) -> dict[str, str]:
    """The variables that `shoal up` says to export."""
    exported = (line.split("export ")[1] for line in welcome if "export " in line)
    return dict(line.split("=", 1) for line in exported)


@pytest.mark.long
def test_jobs_train_and_recover_with_tls(shoal_command: Shoal, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    up = shoal_command.start("up", "--dir", str(tmp_path / "up"), *ANY_PORTS)
    welcome = read_until(up, "Ctrl-C stops the cluster")
    cluster = {**variables(welcome), "OMP_NUM_THREADS": "1"}
    # The addresses are enough: no certificate has to be exported.
    assert set(cluster) == {"SHOAL_COORDINATOR", "SHOAL_HTTP", "OMP_NUM_THREADS"}
    for each in (tmp_path / "up" / "certs").rglob("*"):
        assert each.stat().st_mode & 0o077 == 0, each

    # A worker is killed; the other continues, and the launcher starts a new one.
    run = shoal_command.start(
        "run", "-n", "2", "--job", "ddp", "train.py", "ddp", "100000", environment=cluster
    )
    printed = read_until(run, "trains", count=2)
    (victim, *_) = re.findall(r"trains (\d+)", "\n".join(printed))
    os.kill(int(victim), signal.SIGKILL)
    printed += read_until(run, "with 1")
    printed += read_until(run, "with 2")
    (tmp_path / "done").touch()
    code, output = finish(run, printed)
    assert code == 0, output
    (tmp_path / "done").unlink()

    # Gradients go over a socket, as from another machine.
    by_socket = {**cluster, "SHOAL_TRANSPORT": "tcp"}
    run = shoal_command.start(
        "run", "-n", "2", "--job", "async", "train.py", "async-sgd", "50", environment=by_socket
    )
    code, output = finish(run)
    assert code == 0 and "bulk_connection_failed" not in output, output

    status = shoal_command.start("status", "--all", environment=cluster)
    code, output = finish(status)
    assert code == 0 and "ddp" in output and "async" in output, output
    code, output = finish(shoal_command.start("rm", "async", environment=cluster))
    assert code == 0, output

    # Start the script by hand, as in the README, with only the coordinator's address.
    (tmp_path / "done").touch()
    by_hand = subprocess.run(
        [sys.executable, "train.py", "ddp", "100000"],
        cwd=tmp_path,
        env={**os.environ, **cluster, "SHOAL_JOB": "by-hand"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert by_hand.returncode == 0, by_hand.stdout
    code, output = finish(shoal_command.start("status", "--all", environment=cluster))
    assert code == 0 and "by-hand" in output, output

    # A job scheduler may give each process a TMPDIR of its own.
    (tmp_path / "own").mkdir()
    elsewhere = {**cluster, "TMPDIR": str(tmp_path / "own")}
    code, output = finish(shoal_command.start("status", "--all", environment=elsewhere))
    assert code == 0 and "by-hand" in output, output
    arguments = ("-n", "1", "--job", "elsewhere", "train.py", "ddp", "100000")
    code, output = finish(shoal_command.start("run", *arguments, environment=elsewhere))
    assert code == 0, output

    # The address is not known to be this user's, as from another machine. Without a certificate the
    # command fails at once and names it; with the one that `shoal up` prints, it
    # succeeds.
    with Network() as network:
        wire = network.wire(cluster["SHOAL_COORDINATOR"])
        without = {"SHOAL_COORDINATOR": wire.endpoints[0]}
        code, output = finish(shoal_command.start("stop", "ddp", environment=without))
        assert code == 1 and "speaks TLS, and this process has no certificate" in output, output
        assert "Set SHOAL_TLS to the folder of certificates that `shoal up` prints" in output, (
            output
        )
        (named,) = [line.split()[1] for line in welcome if line.startswith("certificates")]
        given = {**without, "SHOAL_TLS": named}
        code, output = finish(shoal_command.start("status", "--all", environment=given))
        assert code == 0 and "by-hand" in output, output
    up.send_signal(signal.SIGINT)
    code, output = finish(up)
    assert code == 0, output


@pytest.mark.long
def test_asynchronous_training_with_tls_survives_kills(
    shoal_command: Shoal, tmp_path: Path
) -> None:
    """Gradients go by sockets, as from other machines. A worker, a server and the coordinator are
    killed, and all copies of the parameters end with the same number of updates."""
    (tmp_path / "train.py").write_text(counting_script(EPOCHS, STEPS_PER_EPOCH, RATE))
    up = shoal_command.start("up", "--tls", "--ps", "2", "--dir", str(tmp_path / "up"), *ANY_PORTS)
    cluster = variables(read_until(up, "Ctrl-C stops the cluster"))
    environment = {**cluster, "OMP_NUM_THREADS": "1", "SHOAL_TRANSPORT": "tcp"}
    run = shoal_command.start(
        *("run", "-n", "3", "--job", "async-sgd", "train.py", "async-sgd"),
        environment=environment,
    )
    text = read_until(run, "stepped on", count=6)
    shards = f"{cluster['SHOAL_HTTP']}/api/v1/jobs/async-sgd/shards"

    (victim, *_) = [
        pid
        for pid, line in shoal_command.processes().items()
        if line.endswith("train.py async-sgd") and "shoal_client" not in line
    ]
    os.kill(victim, signal.SIGKILL)
    text += read_until(run, "stepped on 10")
    for part in ("ps-0", "coordinator"):
        awaited(partial(every_shard_has_a_copy, shards), 120.0, "every shard has a copy")
        os.kill(part_pids(shoal_command)[part], signal.SIGKILL)
        read_until(up, f"shoal up: {part} serves again")
        text += read_until(run, "stepped on", count=6)
    (tmp_path / "done").touch()
    code, output = finish(run, text)
    assert code == 0, output
    found = re.findall(r"did (\d+) ([0-9.]+) ([0-9.]+)", output)
    assert len(found) == 3, output
    (updates,) = {float(weight) for each in found for weight in each[1:]}
    assert updates >= EPOCHS * STEPS_PER_EPOCH
    up.send_signal(signal.SIGINT)
    code, output = finish(up)
    assert code == 0, output
