"""Keeps what a release writes into etcd: run with the code of that release.

    PYTHONPATH=tests .venv/bin/python tests/support/releases/record_etcd.py 0.1.0

A cluster trains until each kind of record is there; what lies in etcd then is kept as
tests/releases/etcd-VERSION.json: by key the value, in base64.
"""

import asyncio
import base64
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

from support.clusters.coordinator_processes import CoordinatorProcess
from support.clusters.etcd_fixture import running_etcd
from support.processes.served_process import ServedProcess, awaited

from shoal_client.local.process import Supervisor
from shoal_server.etcd import keys
from shoal_server.etcd.remote.client import EtcdClient
from shoal_server.etcd.remote.config import EtcdConfig

KEPT = Path(__file__).resolve().parent.parent.parent / "releases"
SCRIPT = """
import pathlib, sys, shoal, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with shoal.join() as session:
    model, optimizer = session.distribute(model, optimizer, strategy=sys.argv[1])
    for batch in session.batches(torch.ones(320, 8), global_batch_size=32, epochs=int(sys.argv[2])):
        with session.step():
            session.backward(model(batch.inputs).square().mean())
        if batch.step == 20:
            print("trains", flush=True)
"""
FOR_EVER = "1000000"


def kept_at(version: str) -> Path:
    return KEPT / f"etcd-{version}.json"


def keep(version: str) -> Path:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        etcd = stack.enter_context(running_etcd(directory))
        supervisor = stack.enter_context(Supervisor(grace_s=5.0))
        coordinator = CoordinatorProcess(supervisor, directory, "coordinator", etcd).ready()
        for name in ("ps-0", "ps-1"):
            given = ("--listen", "127.0.0.1:0", "--id", name)
            ServedProcess(supervisor, directory, name, "ps", "--etcd", etcd, *given).ready()
        awaited(coordinator.leads, 30.0, "the coordinator leads")
        (directory / "train.py").write_text(SCRIPT)
        shoal = (sys.executable, "-m", "shoal_client")
        at = ("--coordinator", coordinator.grpc)

        def run(job: str, strategy: str, epochs: str) -> "Popen[str]":
            given = ("-n", "2", "--job", job, "train.py", strategy, epochs)
            return Popen(
                [*shoal, "run", *at, *given], cwd=directory, stdout=PIPE, stderr=STDOUT, text=True
            )

        def done(*command: str) -> None:
            subprocess.run([*shoal, *command, *at], check=True, cwd=directory, timeout=60)

        for job in ("finished", "begun-anew"):
            output, _ = run(job, "ddp", "3").communicate(timeout=120)
            assert "2 of 2" in output, output
        done("rm", "begun-anew")
        running = [run("sync", "ddp", FOR_EVER), run("async", "async-sgd", FOR_EVER)]
        for process in running:
            stack.callback(process.kill)
            assert process.stdout is not None
            assert any("trains" in line for line in process.stdout)
        records = asyncio.run(_all_records(etcd))
    target = kept_at(version)
    target.write_text(json.dumps(records, indent=0, sort_keys=True) + "\n")
    return target


async def _all_records(etcd: str) -> dict[str, str]:
    async with EtcdClient(EtcdConfig(endpoints=(etcd,))) as store:
        found = await store.range(keys.ROOT)
    return {item.key: base64.b64encode(item.value).decode() for item in found.items}


if __name__ == "__main__":
    print(keep(sys.argv[1]))
