"""Servers at their memory limit refuse copies, and primaries continue without these."""

import itertools
from array import array
from collections.abc import MutableMapping
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.clusters.memory_limits import (
    ADAM,
    MIB,
    MODEL,
    SGD,
    Embedder,
    connect,
    created,
    describe,
    drop,
    users,
)
from support.clusters.parameter_servers import ParameterServers, servers_fixture
from support.processes.served_process import awaited

from shoal_proto.v1.shards_pb2 import ParameterSpec
from shoal_server.core.shards.assignments import JobAssignments
from shoal_server.etcd import keys
from shoal_server.etcd.api import Revision
from shoal_server.etcd.records import assignments as records
from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts
from shoal_server.parameters.process import hand_over

PATIENCE = PeerTimeouts(full_s=0.2)
"""Timeouts with which a full server is soon offered a copy again."""


servers = servers_fixture(0)


def wait_until_whole(servers: ParameterServers, job: str) -> JobAssignments:
    """Wait until every shard has its backup, and return the assignments."""

    async def follow() -> JobAssignments:
        snapshot = await servers.store.range(keys.ASSIGNMENTS)
        entry = await records.read(servers.store, job)
        if entry is not None and is_whole(entry.assignments):
            return entry.assignments
        async for _ in servers.store.watch(keys.ASSIGNMENTS, Revision(snapshot.revision + 1)):
            entry = await records.read(servers.store, job)
            if entry is not None and is_whole(entry.assignments):
                return entry.assignments
        raise AssertionError("the watch ended")

    return servers.run(follow())


def is_whole(assignments: JobAssignments) -> bool:
    return all(len(assignment.backups) == 1 for assignment in assignments.shards)


def await_refusal(servers: ParameterServers) -> str:
    """Wait until a server refuses copies of ps-0, and return its reason."""

    async def follow() -> str:
        replicas = servers.servers["ps-0"].replicas
        snapshot = await servers.store.range(keys.ASSIGNMENTS)
        changes = servers.store.watch(keys.ASSIGNMENTS, Revision(snapshot.revision + 1))
        while not replicas.full_peers:
            await anext(changes)
        return next(iter(replicas.full_peers.values()))

    return servers.run(follow())


def test_training_continues_without_the_copies_that_a_full_server_refuses(
    servers: ParameterServers,
) -> None:
    """The primary's description has the reason. Shards can be created meanwhile, and a server that
    is added gets the copies."""
    servers.add("ps-0", timeouts=PATIENCE)
    client = created(servers, ADAM, "job")
    servers.add("ps-1", memory_limit_bytes=1024)
    assert "no memory left for a copy of shard" in await_refusal(servers)
    (peer,) = describe(servers, "ps-0").full_peers
    assert peer.server_id == "ps-1"
    assert "at most 1024 bytes" in peer.reason
    assert describe(servers, "ps-1").held_bytes == 0
    client.push(MODEL.filled(-1.0))
    small = connect(servers, "third", timeout_s=8.0)
    (shard,) = small.place([ParameterSpec(name="w", shape=[1000], dtype="float32")]).shards
    assert shard.server_id == "ps-0", "the turn depends on the job's name"
    values = {"w": memoryview(array("f", [0.0]) * 1000).cast("B")}
    small.create(SGD, values)
    small.push(values)
    servers.add("ps-2")
    assignments = wait_until_whole(servers, "job")
    holders = {holder.server_id for shard in assignments.shards for holder in shard.holders}
    assert holders == {"ps-0", "ps-2"}
    client.push(MODEL.filled(-1.0))
    client.close()
    small.close()


def logged_on_leaving(servers: ParameterServers, server_id: str) -> list[MutableMapping[str, Any]]:
    with capture_logs() as lines:
        servers.run(hand_over(servers.servers[server_id], drain_s=0.1))
    return [line for line in lines if line["event"] == "server_stopped_with_sole_copies"]


def test_a_server_that_leaves_with_the_only_copies_names_them(servers: ParameterServers) -> None:
    """The server that could take them has no memory; later there is no other server."""
    servers.add("ps-0", timeouts=PATIENCE)
    client = created(servers, ADAM, "job")
    servers.add("ps-1", memory_limit_bytes=1024)
    await_refusal(servers)
    (line,) = logged_on_leaving(servers, "ps-0")
    shard_ids = [shard.shard_id for shard in client.shard_map.shards]
    assert (line["job"], line["shard_ids"]) == ("job", shard_ids)
    assert "ps-1: " in line["reason"] and "at most 1024 bytes" in line["reason"]
    servers.stop("ps-1")
    (line,) = logged_on_leaving(servers, "ps-0")
    assert line["shard_ids"] == shard_ids
    client.close()


def test_a_server_that_leaves_its_copies_to_others_names_none(servers: ParameterServers) -> None:
    for name in ("ps-0", "ps-1"):
        servers.add(name, timeouts=PATIENCE)
    client = created(servers, SGD, "job")
    wait_until_whole(servers, "job")
    assert not logged_on_leaving(servers, "ps-0")
    client.close()


@pytest.mark.long
def test_a_refused_copy_is_made_once_there_is_memory(servers: ParameterServers) -> None:
    """Another job's shards had it before."""
    servers.add("ps-0", timeouts=PATIENCE)
    another = created(servers, SGD, "another")
    client = created(servers, ADAM, "job")
    servers.add("ps-1", memory_limit_bytes=6 * MIB + MIB // 2)
    assert "no memory left for a copy of shard" in await_refusal(servers)
    drop(servers, "another")
    wait_until_whole(servers, "job")
    client.push(MODEL.filled(-1.0))
    # The sum is updated a few times a second.
    awaited(lambda: describe(servers, "ps-1").held_bytes > 6 * MIB, 10.0, "both copies count")
    another.close()
    client.close()


def test_a_copy_of_a_table_grows_only_up_to_the_memory_limit(servers: ParameterServers) -> None:
    """The primary, which has memory, continues without the copy, and acknowledges all pushes."""
    servers.add("ps-0", timeouts=PATIENCE)
    member = Embedder(servers, users(), timeout_s=20.0)
    member.push(range(100))
    servers.add("ps-1", memory_limit_bytes=2 * MIB)
    wait_until_whole(servers, "tables")
    batches = (range(start, start + 2000) for start in itertools.count(0, 2000))
    # The sum is updated only four times a second: a few more batches may be accepted.
    while not servers.servers["ps-0"].replicas.full_peers:
        member.push(next(batches))
    assert "no memory left for" in await_refusal(servers)
    held_bytes = describe(servers, "ps-1").held_bytes
    while describe(servers, "ps-0").held_bytes < 2 * held_bytes + 4 * MIB:
        member.push(next(batches))
    assert describe(servers, "ps-1").held_bytes <= held_bytes + 2 * MIB
    member.close()
