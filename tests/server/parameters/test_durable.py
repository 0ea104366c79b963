"""Every server dies at once: what was acknowledged as durable is on their disks, and led again."""

from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clusters.parameter_servers import ParameterServers

from shoal_client.parameters.dense import ParameterClient
from shoal_proto.errors import InvalidSpec
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.parameters_pb2 import Acknowledgement
from shoal_proto.v1.shards_pb2 import ParameterSpec
from shoal_server.parameters.journal.config import JournalConfig

NUM_ELEMENTS = 600_000
SCHEMA = [ParameterSpec(name="w", shape=[NUM_ELEMENTS], dtype="float32")]
MOMENTUM = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0, momentum=0.5)])
DURABLE = Acknowledgement.ACKNOWLEDGEMENT_DURABLE


@pytest.fixture
def servers() -> Iterator[ParameterServers]:
    with ParameterServers(0) as servers:
        yield servers


def start(servers: ParameterServers, folder: Path, *names: str) -> None:
    for name in names:
        servers.add(name, journal=JournalConfig(directory=folder / name), lease_ttl_s=0.5)


def connect(servers: ParameterServers, token: Token) -> ParameterClient:
    return ParameterClient(
        [servers.coordinator], lambda: token, timeout_s=30.0, acknowledgement=DURABLE
    )


def filled(value: float) -> dict[str, memoryview]:
    return {"w": memoryview(array("f", [value]) * NUM_ELEMENTS).cast("B")}


def trained(servers: ParameterServers, token: Token) -> ParameterClient:
    client = connect(servers, token)
    client.place(SCHEMA)
    client.create(MOMENTUM, filled(0.0))
    client.pull(filled(9.0))
    return client


@pytest.mark.parametrize("names", [("ps-0",), ("ps-0", "ps-1")], ids=["one", "two"])
def test_servers_that_all_died_go_on(
    servers: ParameterServers, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Values, momentum and the memory of pushes come back from the journals."""
    start(servers, tmp_path, *names)
    token = servers.admit("w0")
    client = trained(servers, token)
    for _ in range(3):
        client.push(filled(-1.0))
    for name in names:
        servers.stop(name)
    start(servers, tmp_path, *names)
    values = filled(9.0)
    client.push(filled(-1.0), into=values)
    # 1, 1.5, 1.75 and 1.875 for gradients of -1 under momentum 0.5.
    assert set(values["w"].cast("f")) == {6.125}
    again = connect(servers, token)
    again.fetch_map()
    assert again.push(filled(-1.0)).duplicates == len(again.fetch_map().shards)
    client.close()
    again.close()


def test_a_backup_that_lives_is_not_robbed(servers: ParameterServers, tmp_path: Path) -> None:
    """It went on while the server was away: the journal is behind, and let go of."""
    start(servers, tmp_path, "ps-0", "ps-1")
    client = trained(servers, servers.admit("w0"))
    client.push(filled(-1.0))
    servers.stop("ps-0")
    client.push(filled(-1.0))
    start(servers, tmp_path, "ps-0")
    values = filled(9.0)
    client.push(filled(-1.0), into=values)
    assert set(values["w"].cast("f")) == {4.25}
    client.close()


def test_without_a_journal_nothing_is_durable(servers: ParameterServers) -> None:
    """The error says what to start the servers with."""
    servers.add("ps-0")
    client = trained(servers, servers.admit("w0"))
    with pytest.raises(InvalidSpec, match="--journal"):
        client.push(filled(-1.0))
    client.close()
