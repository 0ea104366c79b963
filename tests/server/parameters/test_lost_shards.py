"""Lost shards that had been trained: every call is refused by name, and none begins anew."""

import asyncio
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.clusters.parameter_servers import ParameterServers
from support.clusters.snapshot_cluster import SCHEMA as SNAPSHOT_SCHEMA
from support.clusters.snapshot_cluster import Pusher, Snapshots, buffers, elements

from shoal.strategies.asynchronous.first_values import first_values
from shoal.strategies.asynchronous.shared_values import SharedValues
from shoal_client.parameters.dense import ParameterClient
from shoal_proto.errors import ShardNotReady, StateLost
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import ParameterSpec
from shoal_server.core.replication.leading.led_shard import LedShard
from shoal_server.core.shards.assignments import ShardAssignment, ShardContent
from shoal_server.etcd.records import assignments as records

NUM_ELEMENTS = 10
SCHEMA = [
    ParameterSpec(name="v", shape=[NUM_ELEMENTS], dtype="float32"),
    ParameterSpec(name="w", shape=[NUM_ELEMENTS], dtype="float32", group=1),
]
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)] * 2)
LIMIT_S = 20.0


@pytest.fixture
def servers() -> Iterator[ParameterServers]:
    with ParameterServers(1) as servers:
        yield servers


def filled(value: float) -> dict[str, memoryview]:
    data = array("f", [value]) * NUM_ELEMENTS
    return {spec.name: memoryview(array("f", data)).cast("B") for spec in SCHEMA}


def new_client(servers: ParameterServers, member_id: str) -> ParameterClient:
    token = servers.admit(member_id)
    client = ParameterClient([servers.coordinator], lambda: token, timeout_s=LIMIT_S)
    client.place(SCHEMA)
    return client


def assignment(servers: ParameterServers, shard_id: int) -> ShardAssignment:
    entry = servers.run(records.read(servers.store, "job"))
    assert entry is not None
    found = entry.assignments.find(shard_id)
    assert found is not None
    return found


def replace_server(servers: ParameterServers) -> None:
    """Stop the only server, and start an empty process under its name."""
    servers.stop("ps-0")
    servers.add("ps-0")


CALLS: dict[str, Callable[[ParameterClient], object]] = {
    "push": lambda client: client.push(filled(-1.0)),
    "pull": lambda client: client.pull(filled(9.0)),
    "create": lambda client: client.create(SGD, filled(0.0)),
}


@pytest.mark.sampled()
@pytest.mark.parametrize("call", CALLS)
def test_who_trained_is_told_what_was_lost(servers: ParameterServers, call: str) -> None:
    """The error names job, shard, the newest version that the member has seen, and the remedy."""
    with closing(new_client(servers, "w0")) as client:
        client.create(SGD, filled(0.0))
        client.push(filled(-1.0), into=filled(9.0))
        replace_server(servers)
        with pytest.raises(StateLost, match="shoal restore job --from URL") as lost:
            CALLS[call](client)
        details = lost.value.details
        assert (details["job"], details["version"]) == ("job", "2")
        assert details["shard"] in ("0", "1")
        assert f"shard {details['shard']} of job job" in str(lost.value)
        assert "version 2" in str(lost.value)


def test_the_version_told_is_that_of_the_last_push_also_where_no_values_came_back(
    servers: ParameterServers,
) -> None:
    with closing(new_client(servers, "w0")) as client:
        client.create(SGD, filled(0.0))
        client.pull(filled(9.0))
        for _ in range(3):
            client.push(filled(-1.0))
        replace_server(servers)
        with pytest.raises(StateLost, match="this member has seen version 4") as lost:
            client.push(filled(-1.0))
        assert lost.value.details["version"] == "4"


def test_a_fresh_member_does_not_begin_anew_what_others_trained(
    servers: ParameterServers,
) -> None:
    """The refusal comes to the member that should create the values, and to one that waits."""
    with closing(new_client(servers, "w0")) as client:
        client.create(SGD, filled(0.0))
        client.push(filled(-1.0))
    replace_server(servers)
    for number, creates in enumerate([True, False]):
        with closing(new_client(servers, f"w{number + 1}")) as client, pytest.raises(StateLost):
            client.create(SGD, filled(0.0))
        with closing(new_client(servers, f"w{number + 1}")) as client, pytest.raises(StateLost):
            first_values(
                client,
                Values(),
                SGD,
                creates=creates,
                limit_s=0.0,
                is_broken=lambda: False,
            )
    assert {assignment(servers, i).content for i in (0, 1)} == {ShardContent.LOST}


class Values(SharedValues):
    """Values that are all zero, and never adopted."""

    def __init__(self) -> None:
        """Create the values without a model."""

    def present(self) -> dict[str, memoryview]:
        return filled(0.0)

    def writable(self) -> dict[str, memoryview]:
        return filled(0.0)

    def adopt(self) -> None:
        raise AssertionError("there were values")


def test_what_nobody_has_created_is_created_by_the_next_one(servers: ParameterServers) -> None:
    """Server and first member died before the shards had any values: the epoch has risen, but
    nothing is lost."""
    new_client(servers, "w0").close()
    before = assignment(servers, 0)
    replace_server(servers)
    with closing(new_client(servers, "w1")) as client:
        client.create(SGD, filled(1.0))
        values = filled(9.0)
        client.pull(values)
        assert set(values["w"].cast("f")) == {1.0}
    assert assignment(servers, 0).epoch > before.epoch


def test_a_job_that_was_created_by_half_starts(servers: ParameterServers) -> None:
    """The first member dies when one of two shards has its values: another member creates the other
    one, and replaces nothing."""
    with closing(new_client(servers, "w0")) as client:
        (first, _) = client.fetch_map().shards
        whole, client._job._map = client._job._map, None
        assert whole is not None
        half = type(whole)()
        half.CopyFrom(whole)
        del half.shards[1:]
        client._job._map = half
        client.create(SGD, filled(1.0))
    assert assignment(servers, first.shard_id).content is ShardContent.PRESENT
    with closing(new_client(servers, "w1")) as client:
        with pytest.raises(ShardNotReady):
            client.pull(filled(9.0), wait_s=0.0)
        client.create(SGD, filled(2.0))
        values = filled(9.0)
        client.pull(values)
        assert {name: set(data.cast("f")) for name, data in values.items()} == {
            "v": {1.0},
            "w": {2.0},
        }


def test_first_values_are_seen_by_nobody_before_the_record_tells_of_them(
    servers: ParameterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of a server that dies before the write were seen by no client, so that other initial
    values may replace them."""
    writing = asyncio.Event()
    is_formed = LedShard._is_formed

    def held_up(self: LedShard, record: ShardAssignment) -> bool:
        writing.set()
        return False

    monkeypatch.setattr(LedShard, "_is_formed", held_up)
    monkeypatch.setattr("shoal_server.parameters.service.parameters_servicer.FORMING_S", 0.0)
    with closing(new_client(servers, "w0")) as client:
        client.create(SGD, filled(1.0))
        servers.run(asyncio.wait_for(writing.wait(), LIMIT_S))
        with pytest.raises(ShardNotReady):
            client.pull(filled(9.0), wait_s=0.0)
        monkeypatch.setattr(LedShard, "_is_formed", is_formed)
        replace_server(servers)
        client.create(SGD, filled(2.0))
        values = filled(9.0)
        client.pull(values)
        assert set(values["w"].cast("f")) == {2.0}


def test_a_snapshot_brings_back_what_was_lost(servers: ParameterServers, tmp_path: Path) -> None:
    """Training goes on after `shoal restore`, which the error names."""
    snapshots = Snapshots(servers, tmp_path)
    member = Pusher(servers, "w0", weight=1.0)
    member.push()
    snapshots.take()
    replace_server(servers)
    with pytest.raises(StateLost):
        member.push()
    snapshots.restore(under_members=True)
    values = buffers(0.0)
    member.client.pull(values)
    assert elements(values) == {-1.0}
    member.push()
    assert len(SNAPSHOT_SCHEMA) == len(values)
    member.close()
    snapshots.close()
