"""Planned moves of shards: workers find the new primary, and shards that move together pause
once."""

import asyncio
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import pytest
from support.clusters.assignment_records import write_assignments
from support.clusters.memory_store import MemoryStore
from support.clusters.parameter_servers import (
    REBALANCING,
    ParameterServers,
    config,
    servers_fixture,
)
from support.models.dense_shards import EPOCH, SIZES, is_live, new_shard, numbers

from shoal_client.parameters.dense import ParameterClient
from shoal_client.parameters.servers import ShardServers
from shoal_proto.errors import WrongEpoch
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import ParameterSpec
from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.effects import LeadShard, ResumePushes, StopPushes
from shoal_server.core.replication.protocol.limits import ReplicationLimits
from shoal_server.core.replication.replication_core import ReplicationCore
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment
from shoal_server.etcd import keys
from shoal_server.etcd.api import Revision
from shoal_server.etcd.mirror import MirroredKey
from shoal_server.etcd.records import assignments as records
from shoal_server.parameters.process import running
from shoal_server.parameters.replication.acknowledgements import Acknowledgements
from shoal_server.parameters.replication.core_driver import CoreDriver
from shoal_server.parameters.replication.incoming_images import IncomingImages
from shoal_server.parameters.replication.outgoing_links import OutgoingLinks
from shoal_server.parameters.replication.shard_roles import ShardRoles
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.dense import DensePush
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica

JOB = "job"
NUM_ELEMENTS = 1_500_000
LIMIT_S = 60.0
SCHEMA = [
    ParameterSpec(name="v", shape=[NUM_ELEMENTS], dtype="float32"),
    ParameterSpec(name="w", shape=[8], dtype="float32", group=1),
]
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0, momentum=0.5)] * 2)


servers = servers_fixture(2)


@pytest.fixture
def client(servers: ParameterServers) -> Iterator[ParameterClient]:
    """Return a client whose parameters exist, all zero, and whose shards each have a backup."""
    token = servers.admit("w0")
    client = ParameterClient([servers.coordinator], lambda: token, timeout_s=30.0)
    client.place(SCHEMA)
    client.create(SGD, filled(0.0))
    client.pull(filled(9.0))
    yield client
    client.close()


def filled(value: float) -> dict[str, memoryview]:
    return {spec.name: memoryview(array("f", [value]) * spec.shape[0]).cast("B") for spec in SCHEMA}


def assert_pushed(client: ParameterClient, num_pushes: int) -> None:
    """Check that so many gradients of -1 are in the values, each once."""
    value = velocity = 0.0
    for _ in range(num_pushes):
        velocity = 0.5 * velocity + 1.0
        value += velocity
    values = filled(9.0)
    client.pull(values)
    for name, buffer in values.items():
        assert set(buffer.cast("f")) == {value}, name


async def name_successors(servers: ParameterServers) -> int:
    """Name each shard's backup as its successor, so that all shards move and loads stay even.
    Return the revision of the change."""
    entry = await records.read(servers.store, JOB)
    assert entry is not None

    def named(assignment: ShardAssignment) -> ShardAssignment:
        return replace(assignment, joining=None, successor=assignment.backups[0])

    all_named = replace(entry.assignments, shards=tuple(map(named, entry.assignments.shards)))
    await write_assignments(servers.store, all_named)
    return entry.revision + 1


async def first_move(servers: ParameterServers, since: int) -> dict[int, ShardAssignment]:
    """Return the shards that moved in the first revision in which any shard moved."""
    epochs: dict[int, int] = {}
    moved: dict[int, dict[int, ShardAssignment]] = defaultdict(dict)
    watch = servers.store.watch(keys.assignments(JOB), Revision(since))
    async with aclosing(watch) as batches:
        async for batch in batches:
            for event in batch.events:
                stored = records.parse(MirroredKey(event.key, event.value, event.mod_revision))
                if isinstance(stored, records.StoredShard):
                    h = stored.assignment
                    if h.epoch > epochs.setdefault(h.shard_id, h.epoch):
                        moved[stored.revision][h.shard_id] = h
            if moved:
                return moved[min(moved)]
    raise AssertionError("the watch ended")


async def all_moved(servers: ParameterServers) -> None:
    """Wait until every named successor has taken over."""
    entry = await records.read(servers.store, JOB)
    assert entry is not None
    waits = {h.shard_id for h in entry.assignments.shards if h.successor is not None}
    watch = servers.store.watch(keys.assignments(JOB), Revision(entry.revision + 1))
    async with aclosing(watch) as batches, asyncio.timeout(LIMIT_S):
        while waits:
            for event in (await anext(batches)).events:
                stored = records.parse(MirroredKey(event.key, event.value, event.mod_revision))
                if isinstance(stored, records.StoredShard) and stored.assignment.successor is None:
                    waits.discard(stored.assignment.shard_id)


async def evened_out(servers: ParameterServers) -> dict[str, set[int]]:
    """Return each server's shards once both lead several and none is moving. A server that was slow
    to answer when shards were placed gets some only later."""
    watch = servers.store.watch(keys.assignments(JOB), Revision(1))
    async with aclosing(watch) as batches, asyncio.timeout(LIMIT_S):
        async for _ in batches:
            entry = await records.read(servers.store, JOB)
            led: dict[str, set[int]] = defaultdict(set)
            is_moving = False
            for h in entry.assignments.shards if entry is not None else ():
                led[h.primary.server_id].add(h.shard_id)
                is_moving |= not h.backups or bool(h.joining or h.successor)
            if not is_moving and len(led) == 2 and min(map(len, led.values())) > 1:
                return led
    raise AssertionError("the watch ended")


def swap_all(servers: ParameterServers) -> None:
    """Let the two servers swap all their shards."""
    servers.run(name_successors(servers))
    servers.run(all_moved(servers))


def swap(servers: ParameterServers) -> dict[int, ShardAssignment]:
    """Let the two servers swap their shards, and return those that moved first."""
    revision = servers.run(name_successors(servers))
    return servers.run(first_move(servers, revision))


def test_a_push_follows_a_shard_without_the_coordinator(
    servers: ParameterServers, client: ParameterClient
) -> None:
    """The server that refuses a push names the new primary; later pushes go there directly."""
    servers.run(servers.coordinator_server.stop(None))
    swap_all(servers)
    first = client.push(filled(-1.0))
    second = client.push(filled(-1.0))
    assert (first.retries, second.retries) == (1, 0)
    assert_pushed(client, 2)


def test_a_push_is_answered_with_the_successors_address(
    servers: ParameterServers, client: ParameterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client connects to it before pushes are refused."""
    addresses: set[str] = set()

    def connect_ahead(servers: ShardServers[Any], address: str, connect: object) -> None:
        addresses.add(address)

    monkeypatch.setattr(ShardServers, "connect_ahead", connect_ahead)
    num_pushes, give_up_s = 0, time.monotonic() + LIMIT_S
    while not addresses and time.monotonic() < give_up_s:
        servers.run(name_successors(servers))
        client.push(filled(-1.0))
        num_pushes += 1
        servers.run(all_moved(servers))
    assert addresses and addresses <= {shard.address for shard in client.fetch_map().shards}
    assert_pushed(client, num_pushes)


def test_a_pull_follows_a_shard_without_the_coordinator(
    servers: ParameterServers, client: ParameterClient
) -> None:
    """The server that refuses a pull names the new primary."""
    client.push(filled(-1.0))
    servers.run(servers.coordinator_server.stop(None))
    swap_all(servers)
    assert_pushed(client, 1)


def test_shards_that_move_together_move_in_one_revision(
    servers: ParameterServers, client: ParameterClient
) -> None:
    """A worker that pushes to all these shards pauses once."""
    led = servers.run(evened_out(servers))
    servers.stop(REBALANCING)
    assert set(swap(servers)) in led.values()
    client.push(filled(-1.0))
    assert_pushed(client, 1)


@pytest.mark.parametrize("part", ["joining", "successor"])
async def test_a_future_primary_has_a_link_to_its_backup(part: str) -> None:
    """The first push to the new primary then need not wait for a link."""
    store = MemoryStore()
    async with running(config("ps-0"), store) as last, running(config("ps-1"), store) as next_:
        me = next_.replicas.me
        assignment = ShardAssignment(
            shard_id=0,
            epoch=1,
            primary=last.replicas.me,
            backups=() if part == "joining" else (me,),
            joining=me if part == "joining" else None,
            successor=me if part == "successor" else None,
        )
        await write_assignments(store, JobAssignments(job=JOB, copies=2, shards=(assignment,)))
        await next_.replicas.refresh(JOB)
        assert "link-to-ps-0" in {task.get_name() for task in asyncio.all_tasks()}
    await store.close()


async def test_updates_before_a_handover_that_is_given_up_count_as_staleness_on_an_undone_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The primary stops pushes for its successor, and resumes them in the same epoch."""
    me = Holder("ps-0", "one")
    driver = CoreDriver(ReplicationCore(me, ReplicationLimits()))
    monkeypatch.setattr(driver, "submit_event", lambda event: None)
    catalog = Catalog(MemoryStore(), me)
    roles = ShardRoles(
        driver,
        catalog=catalog,
        images=cast(IncomingImages, None),
        acknowledgements=cast(Acknowledgements, None),
        links=cast(OutgoingLinks, None),
    )
    shard = new_shard("sgd", "float32")
    assert catalog.add(ShardReplica(JOB, shard, ReplicaRole.PRIMARY, EPOCH))
    key, epoch = (JOB, shard.shard_id), EPOCH + 1
    roles.lead_shard(LeadShard(key, epoch))
    undone = DensePush(
        session="s",
        sequence=1,
        epoch=epoch,
        base_version=500,
        base_epoch=EPOCH,
        lr=None,
        blocks=(1,),
        gradient=numbers(1, SIZES[1], "float32"),
    )
    assert shard.push(undone, is_live).staleness == 0
    roles.stop_pushes(StopPushes(key))
    again = replace(undone, sequence=2)
    with pytest.raises(WrongEpoch):
        shard.push(again, is_live)
    roles.resume_pushes(ResumePushes(key))
    assert shard.push(again, is_live).staleness == 1
    await roles.close()
