"""Lost shards that had values: every call is refused with StateLost, and none starts over."""

import asyncio
from array import array
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.clusters.parameter_servers import (
    ParameterServers,
    calls_to_shards,
    servers_fixture,
)
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


servers = servers_fixture(1)


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
def test_the_error_of_a_lost_shard_has_the_version_that_the_member_saw(
    servers: ParameterServers, call: str
) -> None:
    """The error also names job, shard and remedy."""
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


def test_the_version_in_the_error_counts_pushes_without_values(servers: ParameterServers) -> None:
    with closing(new_client(servers, "w0")) as client:
        client.create(SGD, filled(0.0))
        client.pull(filled(9.0))
        for _ in range(3):
            client.push(filled(-1.0))
        replace_server(servers)
        with pytest.raises(StateLost, match="this member has seen version 4") as lost:
            client.push(filled(-1.0))
        assert lost.value.details["version"] == "4"


def test_a_new_member_does_not_create_a_lost_shard(servers: ParameterServers) -> None:
    """Both the member that is to create the values and one that waits for them are refused."""
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
    """Values that are all zero, and must not be adopted."""

    def __init__(self) -> None:
        """Create the values without a model."""

    def present(self) -> dict[str, memoryview]:
        return filled(0.0)

    def writable(self) -> dict[str, memoryview]:
        return filled(0.0)

    def adopt(self) -> None:
        raise AssertionError("there were values")


def test_a_shard_without_values_is_created_by_the_next_member(servers: ParameterServers) -> None:
    """Server and first member end before the shards have values: the epoch rises, but nothing is
    lost."""
    new_client(servers, "w0").close()
    before = assignment(servers, 0)
    replace_server(servers)
    with closing(new_client(servers, "w1")) as client:
        client.create(SGD, filled(1.0))
        values = filled(9.0)
        client.pull(values)
        assert set(values["w"].cast("f")) == {1.0}
    assert assignment(servers, 0).epoch > before.epoch


def test_a_job_with_half_of_its_shards_created_starts(servers: ParameterServers) -> None:
    """The first member ends when one of two shards has values. Another member creates the other
    one, and does not replace the first."""
    with closing(new_client(servers, "w0")) as client:
        (first, _) = client.fetch_map().shards
        with calls_to_shards({first.shard_id}):
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


def test_initial_values_are_readable_once_the_record_has_them(
    servers: ParameterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No client has seen the values if the server ends before that write, so that others may
    replace them."""
    writing = asyncio.Event()
    revised = LedShard.wanted_record

    def held_up(led: LedShard, record: ShardAssignment) -> ShardAssignment:
        wanted = revised(led, record)
        if wanted.content is not ShardContent.PRESENT:
            return wanted
        writing.set()
        return replace(wanted, content=record.content)

    monkeypatch.setattr(LedShard, "wanted_record", held_up)
    monkeypatch.setattr("shoal_server.parameters.service.parameters_servicer.FORMING_S", 0.0)
    with closing(new_client(servers, "w0")) as client:
        client.create(SGD, filled(1.0))
        servers.run(asyncio.wait_for(writing.wait(), LIMIT_S))
        with pytest.raises(ShardNotReady):
            client.pull(filled(9.0), wait_s=0.0)
        monkeypatch.setattr(LedShard, "wanted_record", revised)
        replace_server(servers)
        client.create(SGD, filled(2.0))
        values = filled(9.0)
        client.pull(values)
        assert set(values["w"].cast("f")) == {2.0}


def test_a_snapshot_restores_lost_shards(servers: ParameterServers, tmp_path: Path) -> None:
    """Training continues after the restore."""
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
