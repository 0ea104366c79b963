"""Parameter servers that are cut off only from etcd serve until they may be declared dead."""

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.clusters.etcd_fixture import running_etcd
from support.clusters.one_tensor import OneTensor
from support.clusters.parameter_servers import ParameterServers
from support.network.gates import Network, Wire
from support.processes.served_process import awaited

from shoal_client.parameters.dense import ParameterClient
from shoal_proto.errors import ShoalError
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.parameters_pb2 import Acknowledgement
from shoal_server.core.shards.assignments import ShardAssignment, ShardContent
from shoal_server.etcd import keys
from shoal_server.etcd.records import assignments as records

MODEL = OneTensor(4)
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])
LEASE_S, DEAD_AFTER_S = 1.0, 8.0
LIMIT_S = 30.0
HOLDERS = ("ps-0", "ps-1")
LEVELS = {
    "applied": Acknowledgement.ACKNOWLEDGEMENT_APPLIED,
    "replicated": Acknowledgement.ACKNOWLEDGEMENT_REPLICATED,
}


@pytest.fixture
def wires(tmp_path: Path, network: Network) -> Iterator[dict[str, Wire]]:
    """Connections of each server and of the coordinator to etcd."""
    with running_etcd(tmp_path) as etcd:
        yield {name: network.wire(etcd) for name in (*HOLDERS, "ps-2", "coordinator")}


@pytest.fixture
def servers(wires: dict[str, Wire]) -> Iterator[ParameterServers]:
    """Two servers, which hold all shards."""
    with ParameterServers(0, etcd=wires["coordinator"].endpoints[0]) as servers:
        for name in HOLDERS:
            add(servers, wires, name)
        try:
            yield servers
        finally:
            for wire in wires.values():
                wire.restore()


def add(servers: ParameterServers, wires: dict[str, Wire], name: str) -> None:
    servers.add(name, wires[name].endpoints[0], lease_ttl_s=LEASE_S)


def new_client(
    servers: ParameterServers,
    level: Acknowledgement.ValueType = LEVELS["replicated"],
    *,
    member: str = "w0",
    timeout_s: float = LIMIT_S,
) -> ParameterClient:
    """A client of a worker that knows the primary of its shard."""
    token = servers.admit(member)
    client = ParameterClient(
        [servers.coordinator], lambda: token, timeout_s=timeout_s, acknowledgement=level
    )
    client.place(MODEL.schema)
    client.create(SGD, MODEL.filled(0.0))
    client.pull(MODEL.filled(9.0))
    return client


def assignment(servers: ParameterServers) -> ShardAssignment:
    entry = servers.run(records.read(servers.store, "job"))
    assert entry is not None
    (found,) = entry.assignments.shards
    return found


def cut_from_etcd(servers: ParameterServers, wires: dict[str, Wire]) -> None:
    """Cut both holders of the shard off from etcd, and wait until their leases have expired."""
    awaited(lambda: assignment(servers).backups, LIMIT_S, "the shard has a copy")
    for name in HOLDERS:
        wires[name].silence()

    def registered() -> set[str]:
        found = servers.run(servers.store.range(keys.SERVERS))
        return {item.key.removeprefix(keys.SERVERS) for item in found.items}

    awaited(lambda: not registered() & set(HOLDERS), LIMIT_S, "the leases run out")


def test_pushes_continue_during_a_short_cut_from_etcd(
    servers: ParameterServers, wires: dict[str, Wire]
) -> None:
    """Pushes continue even for a worker that fetches the map meanwhile, without any server's
    address. The shard stays with its holders, and no push is lost."""
    with closing(new_client(servers)) as client:
        awaited(lambda: assignment(servers).backups, LIMIT_S, "the shard has a copy")
        # Have another server lead the shard than the layout names.
        servers.stop(assignment(servers).primary.server_id)
        gone = ({*HOLDERS} - servers.running).pop()
        client.push(MODEL.filled(-1.0))
        add(servers, wires, gone)
        cut_from_etcd(servers, wires)
        before = assignment(servers)
        client.fetch_map()
        for _ in range(3):
            client.push(MODEL.filled(-1.0))
        for name in HOLDERS:
            wires[name].restore()
        client.push(MODEL.filled(-1.0))
        values = MODEL.filled(9.0)
        client.pull(values)
        assert set(values["w"].cast("f")) == {5.0}
        assert assignment(servers).primary == before.primary


@pytest.fixture
def soon_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time after which a server is declared dead."""
    for name, module in tuple(sys.modules.items()):
        if name.startswith("shoal_server.") and hasattr(module, "DEAD_AFTER_S"):
            monkeypatch.setattr(module, "DEAD_AFTER_S", DEAD_AFTER_S)


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("level", LEVELS)
def test_a_server_declared_dead_acknowledges_no_push(
    soon_dead: None, servers: ParameterServers, wires: dict[str, Wire], level: str
) -> None:
    """Both holders of the shard are cut off from etcd for good, and a third server runs. Pushes are
    acknowledged only until the record declares the shard lost or another server's, and refused
    later."""
    new_client(servers).close()
    impatient = new_client(servers, LEVELS[level], member="w1", timeout_s=1.0)
    with closing(impatient) as client:
        add(servers, wires, "ps-2")
        cut_from_etcd(servers, wires)
        pushed, last_s, refusal = 0, 0.0, None
        give_up_s = time.monotonic() + 4 * DEAD_AFTER_S
        while (now := assignment(servers)).primary.server_id in HOLDERS and (
            now.content is not ShardContent.LOST
        ):
            assert time.monotonic() < give_up_s, "the holders were not declared dead"
            try:
                client.push(MODEL.filled(-1.0))
            except ShoalError as error:
                refusal = error
            else:
                assert refusal is None, "refused, and acknowledged again"
                pushed, last_s = pushed + 1, time.monotonic()
        declared_s = time.monotonic()
        assert pushed and last_s < declared_s
        assert refusal is not None, "no push was refused"
        with pytest.raises(ShoalError):
            client.push(MODEL.filled(-1.0))
