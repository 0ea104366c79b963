"""Shards of a snapshot are reassigned if their server ends before it has loaded them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.clusters.assignment_records import write_assignments
from support.clusters.hooked_store import HookedStore, Transaction, answer_lost
from support.clusters.memory_store import MemoryStore
from support.clusters.snapshot_world import manifest_of

from shoal_proto.errors import DeadlineExceeded, Unavailable
from shoal_proto.v1 import snapshots_pb2 as pb
from shoal_server.coordinator.servers.server_calls import ServerCalls
from shoal_server.coordinator.snapshots.loading import MAX_TRIES, SnapshotLoader
from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment, ShardContent
from shoal_server.etcd import keys
from shoal_server.etcd.api import Put, TransactionResult
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.etcd.records import assignments as records
from shoal_server.snapshots.library import SnapshotLibrary
from shoal_server.snapshots.manifest import ManifestEntry
from shoal_server.snapshots.storage import Storage

GONE, PRESENT = Holder("ps-0", "one"), Holder("ps-1", "one")
ADDRESSES = {GONE: "gone:1", PRESENT: "present:1"}


class Store(HookedStore):
    """A store in which another process writes to the records before the next `num_changed` writes
    to them, and which loses the answer to the next write if `loses_answer`."""

    num_changed = 0
    loses_answer = False

    async def before(self, transaction: Transaction) -> None:
        if self.num_changed and transaction.puts:
            self.num_changed -= 1
            items = (await self.range(keys.assignments_of_placement("job", "run"))).items
            await MemoryStore.transact(self, (), [Put(item.key, item.value) for item in items])

    def after(self, transaction: Transaction, result: TransactionResult) -> None:
        if self.loses_answer and transaction.puts:
            self.loses_answer = False
            raise answer_lost()


class Calls(ServerCalls):
    """Calls that reach one server only, with the shards that it was to load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[int] = []

    async def call(self, address: str, method: Any, request: Any, timeout_s: float) -> Any:
        if address != ADDRESSES[PRESENT]:
            raise Unavailable(f"{address} has ended")
        self.loaded += [file.shard.shard_id for file in request.files]
        return pb.LoadReply()


class World:
    """Two shards that the server `GONE` was to load when it ended."""

    def __init__(self, folder: Path) -> None:
        self.store = Store()
        self.calls = Calls()
        self._library = SnapshotLibrary(Storage(str(folder)), "job")
        shards = tuple(
            ShardAssignment(shard_id=i, epoch=1, primary=GONE, content=ShardContent.LOADING)
            for i in range(2)
        )
        self.wanted = JobAssignments(job="job", copies=1, shards=shards, placement_id="run")

    async def load_all(self) -> JobAssignments:
        async def choose(listed: Mapping[Holder, str]) -> Mapping[Holder, str]:
            return {PRESENT: ADDRESSES[PRESENT]}

        leading = LeaderStore(self.store, tuple, lambda reason: None)
        loader = SnapshotLoader(leading, self.calls, choose)
        parts = [
            ManifestEntry(
                shard_id=i, epoch=1, version=3, kind="dense", file="f", num_bytes=9, sha256=""
            )
            for i in range(2)
        ]
        manifest = manifest_of("job", 1, parts)
        return await loader.load_all(self._library, manifest, self.wanted, ADDRESSES)

    async def check_reassigned(self) -> None:
        assigned = await self.load_all()
        assert [shard.primary for shard in assigned.shards] == [PRESENT] * 2
        assert self.calls.loaded == [0, 1]
        stored = await records.read(self.store, "job")
        assert stored is not None and stored.assignments.shards == assigned.shards


@pytest.fixture
async def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    await write_assignments(world.store, world.wanted)
    return world


async def test_shards_are_reassigned_if_only_the_last_attempt_succeeds(world: World) -> None:
    """The records change during every attempt but the last."""
    world.store.num_changed = MAX_TRIES - 1
    await world.check_reassigned()


async def test_a_restore_ends_if_no_attempt_to_reassign_shards_succeeds(world: World) -> None:
    """No server loads the shards."""
    world.store.num_changed = MAX_TRIES
    with pytest.raises(DeadlineExceeded, match="holders of job job changed"):
        await world.load_all()
    assert world.calls.loaded == []


async def test_shards_are_loaded_if_the_answer_to_their_reassignment_is_lost(world: World) -> None:
    """The write took effect: the records name the server that is to load the shards."""
    world.store.loses_answer = True
    await world.check_reassigned()
