"""`shoal ps` processes on a real etcd: they start, serve, end, and continue without etcd."""

import signal
import sys
import time
from pathlib import Path

import pytest
from support.clusters.etcd_fixture import etcd_processes, running_etcd
from support.clusters.one_tensor import OneTensor
from support.clusters.parameter_servers import ParameterServers
from support.processes.served_process import ServedProcess

from shoal_client.local.process import ChildCommand, Supervisor
from shoal_client.parameters.dense import ParameterClient
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_server.etcd import keys

START_S = 40.0
MODEL = OneTensor(500_000)
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])


def server(supervisor: Supervisor, directory: Path, name: str, etcd: str) -> ServedProcess:
    """Start a `shoal ps` process."""
    arguments = ("ps", "--etcd", etcd, "--id", name, "--listen", "127.0.0.1:0")
    return ServedProcess(supervisor, directory, name, *arguments)


def trained(servers: ParameterServers) -> ParameterClient:
    token = servers.admit("w0")
    client = ParameterClient([servers.coordinator], lambda: token, timeout_s=30.0)
    return MODEL.create(client, SGD)


@pytest.mark.long
def test_two_processes_serve_one_model_and_end_cleanly(tmp_path: Path) -> None:
    """Each server has a part of the model. SIGTERM ends a server with exit code 0, and its key is
    deleted. A port in use and a bad argument end the command with an error that names them."""
    with running_etcd(tmp_path) as etcd, Supervisor() as supervisor:
        starting = [server(supervisor, tmp_path, f"ps-{i}", etcd) for i in range(2)]
        first, second = (each.ready() for each in starting)
        with ParameterServers(0, etcd=etcd) as servers:
            client = trained(servers)
            assert {s.address for s in client.fetch_map().shards} == {
                first.grpc,
                second.grpc,
            }
            values = MODEL.filled(9.0)
            client.push(MODEL.filled(-1.0), into=values)
            assert set(values["w"].cast("f")) == {1.0}
            client.close()
            assert second.process.stop(10) == 0, second.log_path.read_text()
            assert servers.run(servers.store.get(keys.server("ps-1"))) is None
            assert servers.run(servers.store.get(keys.server("ps-0"))) is not None
        arguments = [sys.executable, "-m", "shoal_client", "ps", "--etcd", etcd]
        for more, message in (
            (["--listen", first.grpc], first.grpc),
            (["--listen", "nowhere"], "host:port"),
        ):
            log_path = tmp_path / "refused.log"
            command = ChildCommand(name="refused", arguments=[*arguments, *more], log_path=log_path)
            assert supervisor.spawn(command).wait(START_S) in (1, 2)
            assert message in log_path.read_text()


@pytest.mark.long
def test_training_continues_while_etcd_is_away(tmp_path: Path) -> None:
    """Known members push for 6 s without etcd, longer than a server's lease. Once etcd is back, the
    server is registered."""
    with etcd_processes(tmp_path) as (_, (etcd,)), Supervisor() as supervisor:
        server(supervisor, tmp_path, "ps-0", etcd.endpoint).ready()
        with ParameterServers(0, etcd=etcd.endpoint) as servers:
            client = trained(servers)
            values = MODEL.filled(9.0)
            etcd.process.send_signal(signal.SIGSTOP)
            num_pushes, until_s = 0, time.monotonic() + 6.0
            while time.monotonic() < until_s:
                client.push(MODEL.filled(-1.0), into=values)
                num_pushes += 1
            assert set(values["w"].cast("f")) == {float(num_pushes)}
            etcd.process.send_signal(signal.SIGCONT)
            client.push(MODEL.filled(-1.0), into=values)
            deadline_s = time.monotonic() + 20.0
            while servers.run(servers.store.get(keys.server("ps-0"))) is None:
                assert time.monotonic() < deadline_s
            client.close()
