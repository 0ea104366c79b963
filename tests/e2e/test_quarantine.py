"""Broken records are in etcd when the next coordinator starts. One job is quarantined, and repaired
while its members train; the other job trains, and the coordinator leads from its first term on."""

import asyncio
import re
import signal
from pathlib import Path

import pytest
from support.clusters.coordinator_processes import CoordinatorProcess
from support.clusters.etcd_fixture import running_etcd
from support.clusters.garbage import all_garbage
from support.processes.commands import Shoal, finish, read_until
from support.processes.served_process import awaited

from shoal_client.local.process import Supervisor
from shoal_server.etcd import keys
from shoal_server.etcd.remote.client import EtcdClient
from shoal_server.etcd.remote.config import EtcdConfig

STEPS, RATE = 2000, 2.0**-10
LEADS_WITHIN_S = 60.0

# All gradients are 1, so the weights count the updates: none is lost, none is applied twice.
SCRIPT = f"""
import pathlib, time, shoal, torch
done, steps = pathlib.Path("done"), 0
model = torch.nn.Linear(8, 8, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr={RATE})
with shoal.join() as session:
    model, optimizer = session.distribute(model, optimizer, strategy="ddp")
    for batch in session.batches(torch.ones(32 * {STEPS}, 8), global_batch_size=32, epochs=1):
        with session.step():
            session.backward(model(batch.inputs).sum() / len(batch.inputs))
        steps += 1
        if steps % 10 == 0:
            print("stepped on", steps, flush=True)
        if not done.exists():
            time.sleep(0.04)
(weight,) = model.parameters()
print("did", (-weight.min() / {RATE}).item(), (-weight.max() / {RATE}).item(), flush=True)
"""


async def spoil(endpoint: str) -> None:
    """Spoil the bad job's newest record, and records of many other jobs."""
    async with EtcdClient(EtcdConfig(endpoints=(endpoint,))) as store:
        for garbage in all_garbage():
            for key, value in garbage.entries.items():
                await store.put(key, value)
        await store.put(keys.generation("bad", 1), b"\x00 garbage")


@pytest.mark.long
def test_a_job_is_repaired_while_both_train(shoal_command: Shoal, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with running_etcd(tmp_path) as etcd, Supervisor(grace_s=5.0) as supervisor:
        first = CoordinatorProcess(supervisor, tmp_path, "first", etcd).ready()
        to_cluster = {"SHOAL_COORDINATOR": first.grpc, "OMP_NUM_THREADS": "1"}
        runs = {
            job: shoal_command.start(
                "run", "-n", size, "--job", job, "train.py", environment=to_cluster
            )
            for job, size in (("good", "1"), ("bad", "2"))
        }
        for run in runs.values():
            read_until(run, "stepped on 20")
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(10.0)
        asyncio.run(spoil(etcd))
        second = CoordinatorProcess(supervisor, tmp_path, "second", etcd, listen=first.grpc).ready()
        awaited(second.leads, LEADS_WITHIN_S, "the second one leads")

        def result_of(*arguments: str) -> tuple[int, str]:
            environment = {**to_cluster, "SHOAL_HTTP": second.http}
            return finish(shoal_command.start(*arguments, environment=environment))

        code, output = result_of("status")
        shown = " ".join(output.split())
        assert code == 0 and "quarantined" in shown, output
        assert keys.generation("bad", 1) in shown.replace(" ", ""), output
        for run in (*runs.values(), *runs.values()):
            read_until(run, "stepped on")
        code, output = result_of("repair", "bad")
        assert code == 1 and f"{keys.generation('bad', 1)}: the record of a generation" in output
        assert "garbage" in output and "job bad is quarantined since" in output, output
        code, output = result_of("repair", "bad", "--apply")
        assert code == 0 and "/shoal/v1/quarantine/bad/" in output, output
        assert "job bad goes on" in output, output
        for run in (*runs.values(), *runs.values()):
            read_until(run, "stepped on")
        code, output = result_of("repair", "bad")
        assert code == 0 and "job bad is not quarantined" in output, output
        (tmp_path / "done").touch()
        for job, run in runs.items():
            code, output = finish(run)
            assert code == 0, (job, output)
            counts = re.findall(r"did ([\d.]+) ([\d.]+)", output)
            assert {float(each) for count in counts for each in count} == {STEPS}, (job, output)
        assert "leadership_ended" not in second.log_path.read_text()
