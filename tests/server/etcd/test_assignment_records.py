"""Records of shard assignments: all of a job are placed or none, and each is changed on its own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import replace

import pytest
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import InternalError, NotLeader, Unavailable
from shoal_proto.v1.replication_pb2 import ShardHolding
from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment, ShardContent
from shoal_server.etcd import keys
from shoal_server.etcd.api import (
    Compare,
    Get,
    Operation,
    Put,
    Revision,
    TransactionResult,
    WatchBatch,
    absent,
    created_at,
)
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.etcd.records import assignments as records
from shoal_server.etcd.records.assignment_mirror import AssignmentMirror

MAX_OPERATIONS = 128
"""Default limit of operations in one of etcd's transactions."""
A, B, C = (Holder(f"ps-{i}", "one") for i in range(3))
LIMIT_S = 10.0


class WatchedStore(MemoryStore):
    """Store that asserts etcd's limit of operations, with hooks before and after each transaction
    that writes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_written: list[int] = []
        """Number of keys that each transaction put."""
        self.before: Callable[[Sequence[Operation]], None] = lambda then: None
        self.after: Callable[[TransactionResult], None] = lambda result: None
        self.after_read: Callable[[], Awaitable[None]] | None = None
        """Called once, before the answer to the next transaction that only reads."""

    async def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> TransactionResult:
        assert max(map(len, (compares, then, otherwise))) <= MAX_OPERATIONS
        puts = [operation for operation in then if isinstance(operation, Put)]
        if puts:
            self.before(then)
        result = await super().transact(compares, then, otherwise)
        if puts:
            if result.succeeded:
                self.num_written.append(len(puts))
            self.after(result)
        if self.after_read is not None and all(isinstance(each, Get) for each in then):
            after_read, self.after_read = self.after_read, None
            await after_read()
        return result


@pytest.fixture
def store() -> WatchedStore:
    return WatchedStore()


def placed(num_shards: int, placement_id: str = "run", job: str = "job") -> JobAssignments:
    shards = (
        ShardAssignment(shard_id=i, epoch=1, primary=A, backups=(B,)) for i in range(num_shards)
    )
    return JobAssignments(job=job, copies=2, shards=tuple(shards), placement_id=placement_id)


def without(gone: Holder) -> records.Change:
    def change(assignment: ShardAssignment) -> ShardAssignment:
        return replace(assignment, backups=tuple(h for h in assignment.backups if h != gone))

    return change


async def read(store: MemoryStore, job: str = "job") -> JobAssignments | None:
    found = await records.read(store, job)
    return None if found is None else found.assignments


class Changes:
    """Notifications of a mirror."""

    def __init__(self) -> None:
        self.changed: list[tuple[str, set[int]]] = []
        self.gone: list[str] = []
        self.event = asyncio.Event()

    def on_change(self, job: str, shard_ids: Collection[int]) -> None:
        self.changed.append((job, set(shard_ids)))
        self.event.set()

    def on_gone(self, job: str) -> None:
        self.gone.append(job)
        self.event.set()

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not is_so():
                self.event.clear()
                await self.event.wait()


async def test_a_job_of_many_shards_is_read_as_it_was_placed(store: WatchedStore) -> None:
    """Transactions stay within etcd's limit of operations; the last one decides."""
    wanted = placed(1050)
    assert (await records.place(store, wanted)).succeeded
    assert await read(store) == wanted
    assert await records.jobs(store) == ["job"]
    assert sum(store.num_written) == 1051
    assert store.num_written[-1] == 1


async def test_an_unfinished_placement_is_not_read(store: WatchedStore) -> None:
    """The records of an unfinished placement are deleted once another placement is decided."""

    def die(then: Sequence[Operation]) -> None:
        if len(store.num_written) == 2:
            raise Unavailable("the coordinator is killed")

    store.before = die
    changes = Changes()
    async with AssignmentMirror(store, changes.on_change, changes.on_gone) as mirror:
        with pytest.raises(Unavailable):
            await records.place(store, placed(250, "first"))
        assert await read(store) is None
        store.before = lambda then: None
        assert (await records.place(store, placed(2, "second"))).succeeded
        assert await read(store) == placed(2, "second")
        await changes.until(lambda: bool(changes.changed))
        assert changes.changed == [("job", {0, 1})]
        assert mirror.assembled("job") == placed(2, "second")
    assert await store.keys(keys.assignments_of_placement("job", "first")) == ()


async def test_of_two_placements_at_once_one_is_decided(store: WatchedStore) -> None:
    """The other placement leaves no records."""
    head = keys.assignments_head("job")
    results = await asyncio.gather(
        *(records.place(store, placed(150, each), compares=[absent(head)]) for each in "ab")
    )
    assert sorted(result.succeeded for result in results) == [False, True]
    found = await read(store)
    assert found is not None
    assert found.shards == placed(150).shards
    assert len(await store.keys(keys.ASSIGNMENTS)) == 151


async def test_a_placement_whose_records_were_deleted_is_not_decided(store: WatchedStore) -> None:
    """The job is reset while it is placed: otherwise some of its shards would have no holders."""
    hits = []

    def reset(result: TransactionResult) -> None:
        if len(store.num_written) == 1 and not hits:
            hits.append(None)
            # The store in memory awaits nothing.
            with pytest.raises(StopIteration):
                store.delete(keys.assignments("job"), prefix=True).send(None)

    store.after = reset
    assert not (await records.place(store, placed(250))).succeeded
    assert await store.keys(keys.ASSIGNMENTS) == ()


async def test_a_deposed_leader_places_nothing(store: WatchedStore) -> None:
    """Every write is fenced, not only the last one, which decides."""
    changes: list[str] = []
    deposed = LeaderStore(store, lambda: [created_at(keys.LEADER, Revision(7))], changes.append)
    with pytest.raises(NotLeader):
        await records.place(deposed, placed(3))
    assert await store.keys(keys.ASSIGNMENTS) == ()
    assert len(changes) == 1


async def test_changes_of_a_hundred_shards_are_one_transaction(store: WatchedStore) -> None:
    """A change that another writer makes to one of the shards meanwhile is kept beside this one."""
    await records.place(store, placed(120))
    changes = Changes()
    async with AssignmentMirror(store, changes.on_change, changes.on_gone) as mirror:
        store.num_written.clear()
        assert await mirror.change("job", range(100), without(B))
        assert store.num_written == [100]
        assert changes.changed[1:] == [("job", set(range(100)))]
        others = iter([7])

        def write_too(then: Sequence[Operation]) -> None:
            for shard_id in others:
                theirs = replace(placed(1).shards[0], shard_id=shard_id, epoch=2)
                key = keys.shard_assignment("job", "run", shard_id)
                # The store in memory awaits nothing.
                with pytest.raises(StopIteration):
                    store.put(key, records.encode_shard("run", theirs)).send(None)

        store.before = write_too
        assert await mirror.change("job", range(120), lambda h: replace(h, joining=C))
    found = await read(store)
    assert found is not None
    assert [h.epoch for h in found.shards] == [2 if i == 7 else 1 for i in range(120)]
    assert {h.joining for h in found.shards} == {C}


async def test_a_change_is_decided_again_on_the_newest_record(store: WatchedStore) -> None:
    """The change is computed again from the record that another writer has changed, and leaves that
    shard as it is."""
    await records.place(store, placed(2))
    async with AssignmentMirror(store, lambda job, ids: None, lambda job: None) as late:
        async with AssignmentMirror(store, lambda job, ids: None, lambda job: None) as first:
            await first.change("job", [0], lambda h: replace(h, primary=C, epoch=2))

        def taken_over(h: ShardAssignment) -> ShardAssignment:
            return replace(h, primary=B, epoch=h.epoch + 1) if h.primary == A else h

        assert await late.change("job", [0, 1], taken_over)
    found = await read(store)
    assert found is not None
    assert [(h.primary, h.epoch) for h in found.shards] == [(C, 2), (B, 2)]


@pytest.mark.parametrize("is_made", [True, False])
async def test_a_change_of_unknown_outcome_is_made_once(store: WatchedStore, is_made: bool) -> None:
    """The record is read again, and shows if the write took effect."""
    await records.place(store, placed(1))
    outcomes = iter([True])

    def lose_answer(_: object) -> None:
        if next(outcomes, False):
            raise Unavailable("the connection broke", details={"outcome": "unknown"})

    if is_made:
        store.after = lose_answer
    else:
        store.before = lose_answer
    async with AssignmentMirror(store, lambda job, ids: None, lambda job: None) as mirror:
        epochs = 0

        def next_epoch(h: ShardAssignment) -> ShardAssignment:
            nonlocal epochs
            epochs += 1
            return replace(h, epoch=h.epoch + 1, primary=B) if h.primary == A else h

        assert await mirror.change("job", [0], next_epoch)
        assert mirror.of_job("job")[0].epoch == 2
        assert epochs == 2
    found = await read(store)
    assert found is not None
    assert found.shards[0].epoch == 2


async def test_a_write_of_unknown_outcome_cannot_take_effect_later(store: WatchedStore) -> None:
    """The caller no longer wants the change when it is decided again."""
    await records.place(store, placed(1))
    transact, late = store.transact, list[tuple[Sequence[Compare], Sequence[Operation]]]()

    async def lose_first(
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> TransactionResult:
        if not late and any(isinstance(operation, Put) for operation in then):
            late.append((compares, then))
            raise Unavailable("no answer", details={"outcome": "unknown"})
        return await transact(compares, then, otherwise)

    store.transact = lose_first  # type: ignore[method-assign]
    async with AssignmentMirror(store, lambda job, ids: None, lambda job: None) as mirror:
        wishes = iter([True])
        await mirror.change(
            "job", [0], lambda h: replace(h, primary=C) if next(wishes, False) else h
        )
    assert not (await transact(*late[0])).succeeded
    found = await read(store)
    assert found is not None
    assert found.shards[0].primary == A


@pytest.mark.parametrize("is_made", [True, False])
async def test_a_change_returns_once_the_outcome_of_its_write_is_known(
    store: WatchedStore, monkeypatch: pytest.MonkeyPatch, *, is_made: bool
) -> None:
    """etcd is unavailable after the write, and the caller no longer wants the change. The call
    returns once the write took effect or never can. Otherwise a primary might continue without a
    backup that the record names."""
    await records.place(store, placed(1))
    transact, late = store.transact, list[tuple[Sequence[Compare], Sequence[Operation]]]()
    outages = iter([True, True])

    async def away(
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> TransactionResult:
        if not late:
            late.append((compares, then))
            if is_made:
                await transact(compares, then, otherwise)
            raise Unavailable("the connection broke", details={"outcome": "unknown"})
        if next(outages, False):
            raise Unavailable("no etcd answered")
        return await transact(compares, then, otherwise)

    table = AssignmentMirror(store, lambda job, shard_ids: None, lambda job: None)
    watched = asyncio.Event()

    async def not_yet(*args: object) -> AsyncIterator[WatchBatch]:
        # The mirror learns of changes only by its own reads.
        await watched.wait()
        yield WatchBatch(Revision(0), ())

    monkeypatch.setattr(store, "watch", not_yet)
    async with table:
        store.transact = away  # type: ignore[method-assign]
        wishes = iter([True])
        await table.change_until_written(
            "job", [0], lambda h: replace(h, primary=C) if next(wishes, False) else h
        )
        held = table.of_job("job").get(0)
        assert held is not None
        assert held.primary == (C if is_made else A)
    assert not (await transact(*late[0])).succeeded


async def test_a_job_that_is_gone_is_not_changed(store: WatchedStore) -> None:
    """The mirror is notified of the removal only later."""
    await records.place(store, placed(2))
    changes = Changes()
    async with AssignmentMirror(store, changes.on_change, changes.on_gone) as mirror:
        removed = records.delete_assignments("job")
        await store.transact((), [removed])
        assert not await mirror.change("job", [0], without(B))
        await changes.until(lambda: changes.gone == ["job"])
        assert mirror.of_job("job") == {}
        assert list(mirror.jobs) == []


async def test_a_new_run_of_a_job_is_reported_as_the_end_of_the_last(store: WatchedStore) -> None:
    """The mirror has seen no deletion of the earlier run's records."""
    await records.place(store, placed(3, "first"))
    changes = Changes()
    async with AssignmentMirror(store, changes.on_change, changes.on_gone) as mirror:
        await records.place(store, placed(2, "second"))
        await changes.until(lambda: len(changes.changed) == 2)
        assert changes.gone == ["job"]
        assert changes.changed[-1] == ("job", {0, 1})
        assert mirror.assembled("job") == placed(2, "second")


async def test_unknown_fields_of_a_later_release_are_kept(store: WatchedStore) -> None:
    """A change of the record by this release keeps them."""
    await records.place(store, placed(1))
    key = keys.shard_assignment("job", "run", 0)
    before = await store.get(key)
    assert before is not None
    unknown = b"\xf2\x07\x05hello"
    await store.put(key, before.value + unknown)
    async with AssignmentMirror(store, lambda job, ids: None, lambda job: None) as mirror:
        await mirror.change(
            "job", [0], lambda h: replace(h, backups=(), content=ShardContent.PRESENT)
        )
    after = await store.get(key)
    assert after is not None
    assert unknown in after.value
    assert not ShardHolding.FromString(after.value).backups


def of_later_format(value: bytes) -> bytes:
    message = ShardHolding.FromString(value)
    message.format = records.FORMAT + 1
    return message.SerializeToString()


def of_another_shard(value: bytes) -> bytes:
    message = ShardHolding.FromString(value)
    message.shard_id = 7
    return message.SerializeToString()


@pytest.mark.parametrize("spoil", [lambda value: b"\xff\xff", of_later_format, of_another_shard])
async def test_an_unreadable_record_affects_only_its_job(
    store: WatchedStore, spoil: Callable[[bytes], bytes]
) -> None:
    """Readers of the job get an error; other jobs are read and changed as usual."""
    await records.place(store, placed(2))
    await records.place(store, placed(2, job="other"))
    key = keys.shard_assignment("job", "run", 1)
    found = await store.get(key)
    assert found is not None
    await store.put(key, spoil(found.value))
    # Keys of an earlier layout, and of no known layout.
    await store.put(keys.ASSIGNMENTS + "job", found.value)
    await store.put(keys.ASSIGNMENTS + "third/head", b"\xff")
    with pytest.raises(InternalError, match="job/run/00000001"):
        await records.read(store, "job")
    async with AssignmentMirror(store, lambda job, ids: None, lambda job: None) as mirror:
        with pytest.raises(InternalError, match="not every shard of job job"):
            mirror.assembled("job")
        assert await mirror.change("job", [0, 1], without(B))
        assert mirror.of_job("job").keys() == {0}
        assert await mirror.change("other", [0, 1], without(B))
        assert sorted(mirror.jobs) == ["job", "other"]


async def test_a_refresh_of_one_shard_notices_another_run(store: WatchedStore) -> None:
    """The mirror then has the new run, and reports the end of the last."""
    await records.place(store, placed(3, "first"))
    changes = Changes()
    async with AssignmentMirror(store, changes.on_change, changes.on_gone) as mirror:
        async with AssignmentMirror(store, lambda job, ids: None, lambda job: None) as other:
            await other.change("job", [0, 1], without(B))
        await mirror.refresh("job", [1])
        assert mirror.of_job("job")[1].backups == ()
        await records.place(store, placed(2, "second"))
        await mirror.refresh("job", [1])
        assert mirror.assembled("job") == placed(2, "second")
    assert changes.gone == ["job"]


async def test_a_refresh_brings_no_deleted_job_back(store: WatchedStore) -> None:
    """The watch delivers the deletion before the answer of the refresh arrives."""
    await records.place(store, placed(3))
    changes = Changes()
    async with AssignmentMirror(store, changes.on_change, changes.on_gone) as mirror:

        async def delete_job() -> None:
            await store.transact((), [records.delete_assignments("job")])
            await changes.until(lambda: changes.gone == ["job"])

        store.after_read = delete_job
        await mirror.refresh("job", [1])
        assert list(mirror.jobs) == []
    assert changes.gone == ["job"]
