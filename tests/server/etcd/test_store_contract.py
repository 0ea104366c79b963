"""The contract of KeyValueStore, run against etcd and against the store in memory."""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import pairwise

import pytest
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import CorruptError, InvalidSpec, LeaseExpired, RefusedError
from shoal_server.etcd.api import (
    Compare,
    Delete,
    EventKind,
    Get,
    KeyValue,
    KeyValueStore,
    LeaseId,
    Operation,
    Put,
    Revision,
    WatchBatch,
    absent,
    created_at,
    none_written_after,
    unchanged_since,
    value_is,
)
from shoal_server.etcd.remote.client import EtcdClient
from shoal_server.etcd.remote.config import EtcdConfig

from .conftest import Bench


async def collect(
    watch: AsyncGenerator[WatchBatch, None], until: Revision, limit_s: float = 10
) -> list[WatchBatch]:
    """Return the batches up to that revision."""
    batches: list[WatchBatch] = []
    async with asyncio.timeout(limit_s):
        async for batch in watch:
            batches.append(batch)
            if batch.revision >= until:
                break
    return batches


async def test_a_key_has_its_revisions_and_version(bench: Bench) -> None:
    """The revisions of a key are those of its creation and of its last write, and its version is
    the number of writes."""
    key = bench.prefix + "a"
    assert await bench.store.get(key) is None
    first = await bench.store.put(key, b"1")
    second = await bench.store.put(key, b"\x00\xff")
    assert second == first + 1
    assert await bench.store.get(key) == KeyValue(key, b"\x00\xff", first, second, 2)
    await bench.store.delete(key)
    third = await bench.store.put(key, b"")
    assert await bench.store.get(key) == KeyValue(key, b"", third, third, 1)


async def test_a_range_has_the_keys_of_its_prefix(bench: Bench) -> None:
    """The keys are in order, as of one revision, and keys beside the prefix are left out."""
    for name in ("b", "a", "ab", "ä", "zz"):
        await bench.store.put(bench.prefix + name, name.encode())
    last = await bench.store.put(bench.prefix[:-1] + "0", b"neighbour")
    snapshot = await bench.store.range(bench.prefix)
    assert [item.key for item in snapshot.items] == [
        bench.prefix + name for name in ("a", "ab", "b", "zz", "ä")
    ]
    assert snapshot.revision == last


async def test_a_delete_returns_the_number_of_deleted_keys(bench: Bench) -> None:
    """A delete of no key makes no revision."""
    for name in ("x/1", "x/2", "y"):
        revision = await bench.store.put(bench.prefix + name, b"")
    assert await bench.store.delete(bench.prefix + "nothing") == 0
    assert (await bench.store.range(bench.prefix)).revision == revision
    assert await bench.store.delete(bench.prefix + "y") == 1
    assert await bench.store.delete(bench.prefix + "x/", prefix=True) == 2
    assert (await bench.store.range(bench.prefix)).items == ()


async def test_a_transaction_runs_one_branch_at_one_revision(bench: Bench) -> None:
    """All its operations, reads included, see one revision."""
    a, b = bench.prefix + "a", bench.prefix + "b"
    made = await bench.store.transact((absent(a), absent(b)), (Put(a, b"1"), Put(b, b"2"), Get(a)))
    assert made.succeeded
    ((read,),) = made.reads
    assert (read.value, read.mod_revision) == (b"1", made.revision)
    again = await bench.store.transact((absent(a),), (Put(a, b"9"),), (Get(bench.prefix, True),))
    assert not again.succeeded
    assert [item.value for item in again.reads[0]] == [b"1", b"2"]
    assert again.revision == made.revision
    swap = await bench.store.transact((value_is(a, b"1"),), (Delete(a), Put(b, b"3"), Get(b)))
    assert swap.succeeded
    assert await bench.store.get(a) is None


@pytest.mark.parametrize("right", [True, False])
async def test_each_comparison_holds_for_the_stored_value_alone(bench: Bench, right: bool) -> None:
    """An absent key has revision 0, and no value."""
    key = bench.prefix + "k"
    created = await bench.store.put(key, b"1")
    newest = await bench.store.put(key, b"2")
    off = 0 if right else 1
    for compare in (
        value_is(key, b"2" if right else b"1"),
        unchanged_since(key, Revision(newest + off)),
        created_at(key, Revision(created + off)),
        unchanged_since(bench.prefix + "none", Revision(off)),
        created_at(bench.prefix + "none", Revision(off)),
    ):
        assert (await bench.store.transact((compare,), ())).succeeded is right, compare
    assert not (await bench.store.transact((value_is(bench.prefix + "none", b""),), ())).succeeded


async def test_a_comparison_may_cover_all_keys_of_a_prefix(bench: Bench) -> None:
    """The comparison holds if no key of the prefix was written since the revision, and if there is
    none."""
    first = await bench.store.put(bench.prefix + "a/1", b"")
    second = await bench.store.put(bench.prefix + "a/2", b"")
    await bench.store.put(bench.prefix + "b", b"")
    for prefix, revision, holds in (
        ("a/", second, True),
        ("a/", first, False),
        ("a/1", first, True),
        ("none/", first, True),
    ):
        compare = none_written_after(bench.prefix + prefix, revision)
        assert (await bench.store.transact((compare,), ())).succeeded is holds, prefix


async def test_a_refused_transaction_changes_nothing(bench: Bench) -> None:
    """Calls with empty keys, unknown leases or unknown fields are refused as well."""
    a, b = bench.prefix + "a", bench.prefix + "b"
    for then in (
        (Put(b, b"1"), Put(a, b"1"), Put(a, b"2")),
        (Put(b, b"1"), Put(a, b"1"), Delete(bench.prefix, True)),
    ):
        with pytest.raises(RefusedError):
            await bench.store.transact((), then)
    with pytest.raises(LeaseExpired):
        await bench.store.transact((), (Put(b, b"1"), Put(a, b"1", LeaseId(987654321))))
    with pytest.raises(LeaseExpired):
        await bench.store.put(a, b"1", LeaseId(987654321))
    for bad in (bench.store.get(""), bench.store.put("", b""), bench.store.delete("")):
        with pytest.raises(InvalidSpec):
            await bad
    with pytest.raises(InvalidSpec):
        await bench.store.transact((Compare(a, "colour", 1),), ())
    assert (await bench.store.range(bench.prefix)).items == ()


@pytest.mark.sampled()
async def test_keys_are_deleted_with_their_lease(bench: Bench) -> None:
    """The keys of a lease that is not renewed are deleted, and a watch delivers this."""
    brief, kept = await bench.store.grant(1), await bench.store.grant(1)
    await bench.store.put(bench.prefix + "brief", b"1", brief)
    revision = await bench.store.put(bench.prefix + "kept", b"2", kept)
    ttl_s = await bench.store.keep_alive(kept)
    assert 1 <= ttl_s <= 2
    async with aclosing(bench.store.watch(bench.prefix, Revision(revision + 1))) as watch:

        async def renew() -> None:
            while True:
                await asyncio.sleep(ttl_s / 4)
                assert await bench.store.keep_alive(kept) > 0

        renewing = asyncio.create_task(renew())
        (batch,) = await collect(watch, Revision(revision + 1))
        renewing.cancel()
    assert [(event.kind, event.key) for event in batch.events] == [
        (EventKind.DELETE, bench.prefix + "brief")
    ]
    assert await bench.store.keep_alive(brief) == 0.0
    item = await bench.store.get(bench.prefix + "kept")
    assert item is not None
    assert item.lease == kept
    await bench.store.revoke(kept)
    await bench.store.revoke(kept)
    assert await bench.store.get(bench.prefix + "kept") is None


async def test_a_put_without_a_lease_removes_the_key_from_its_lease(bench: Bench) -> None:
    """The end of the lease does not delete it."""
    lease = await bench.store.grant(30)
    await bench.store.put(bench.prefix + "a", b"1", lease)
    await bench.store.put(bench.prefix + "a", b"2")
    await bench.store.revoke(lease)
    assert await bench.store.get(bench.prefix + "a") is not None


async def test_a_watch_delivers_history_and_then_new_changes(bench: Bench) -> None:
    """Each change is delivered once and in order."""
    key = bench.prefix + "a"
    await bench.store.put(key, b"0")
    start = await bench.store.put(key, b"1")
    await bench.store.put(bench.prefix[:-1] + "0", b"neighbour")
    async with aclosing(bench.store.watch(bench.prefix, start)) as watch:
        (first,) = await collect(watch, start)
        await bench.store.delete(key)
        end = await bench.store.put(key, b"2")
        rest = await collect(watch, end)
    events = [event for batch in (first, *rest) for event in batch.events]
    assert [(event.kind, event.value) for event in events] == [
        (EventKind.PUT, b"1"),
        (EventKind.DELETE, b""),
        (EventKind.PUT, b"2"),
    ]
    assert not any(batch.reset for batch in (first, *rest))


async def test_a_watch_never_splits_a_revision(bench: Bench) -> None:
    """The changes of one transaction are in one batch, even if they are large."""
    value = bytes(100_000)
    keys = [f"{bench.prefix}{number:02}" for number in range(12)]
    made = await bench.store.transact((), [Put(key, value) for key in keys])
    for number in range(40):
        last = await bench.store.put(keys[number % 12], value)
    async with aclosing(bench.store.watch(bench.prefix, made.revision)) as watch:
        batches = await collect(watch, last)
    first = [event for event in batches[0].events if event.mod_revision == made.revision]
    assert [event.key for event in first] == keys
    revisions = [event.mod_revision for batch in batches for event in batch.events]
    assert sorted(set(revisions)) == list(range(made.revision, last + 1))
    assert len(revisions) == 12 + 40
    for earlier, later in pairwise(batches):
        assert earlier.revision < later.events[0].mod_revision


async def test_a_watch_from_a_compacted_revision_is_reset(bench: Bench) -> None:
    """The watch delivers the current keys, and continues from there."""
    start = await bench.store.put(bench.prefix + "gone", b"1")
    await bench.store.put(bench.prefix + "kept", b"2")
    await bench.store.delete(bench.prefix + "gone")
    end = await bench.store.put(bench.prefix + "kept", b"3")
    await bench.compact(end)
    async with aclosing(bench.store.watch(bench.prefix, start)) as watch:
        (reset,) = await collect(watch, end)
        assert reset.reset
        assert [(event.key, event.value) for event in reset.events] == [
            (bench.prefix + "kept", b"3")
        ]
        last = await bench.store.put(bench.prefix + "new", b"4")
        (batch,) = await collect(watch, last)
    assert not batch.reset
    assert [event.key for event in batch.events] == [bench.prefix + "new"]


async def test_a_watch_cannot_start_at_0_or_in_the_future(bench: Bench) -> None:
    """The next revision is the last one allowed: a store with less history has lost some."""
    revision = (await bench.store.range(bench.prefix)).revision
    with pytest.raises(InvalidSpec):
        await anext(bench.store.watch(bench.prefix, Revision(0)))
    with pytest.raises(CorruptError, match="lost history"):
        await anext(bench.store.watch(bench.prefix, Revision(revision + 2)))


async def test_watches_are_independent(bench: Bench) -> None:
    """A watch that is not read delays neither other watches nor writers."""
    start = Revision((await bench.store.range(bench.prefix)).revision + 1)
    async with aclosing(bench.store.watch(bench.prefix, start)) as idle:
        await bench.store.put(bench.prefix + "first", b"")
        await anext(idle)
        for number in range(50):
            last = await bench.store.put(f"{bench.prefix}{number}", bytes(10_000))
        async with aclosing(bench.store.watch(bench.prefix, start)) as busy:
            delivered = await collect(busy, last)
        assert sum(len(batch.events) for batch in delivered) == 51
        late = await collect(idle, last)
    assert sum(len(batch.events) for batch in late) == 50


async def test_close_ends_calls_and_watches_with_an_error(bench: Bench) -> None:
    """The error is RefusedError, not a cancellation."""
    start = Revision((await bench.store.range(bench.prefix)).revision + 1)
    watch = bench.store.watch(bench.prefix, start)
    waiting = asyncio.create_task(anext(watch))
    await bench.store.put(bench.prefix + "a", b"")
    await waiting
    waiting = asyncio.create_task(anext(watch))
    # Give the watch time to wait; the assertions hold in either case.
    await bench.store.get(bench.prefix + "a")
    await bench.store.close()
    async with asyncio.timeout(5):
        with pytest.raises(RefusedError, match="closed"):
            await waiting
        with pytest.raises(RefusedError, match="closed"):
            await bench.store.get(bench.prefix + "a")


async def test_the_double_does_not_count_expired_keys_as_deleted() -> None:
    """A delete ends expired leases first, as any call does."""
    now_s = 0.0
    memory = MemoryStore(clock=lambda: now_s)
    await memory.put("a", b"", await memory.grant(2))
    await memory.put("b", b"")
    now_s = 3.0
    assert await memory.delete("a") == 0
    assert await memory.delete("b") == 1


async def test_the_store_in_memory_answers_like_etcd(etcd_endpoint: str) -> None:
    """Random calls get the same answers, and the same history, from both."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    prefix = f"/shoal/test/random-{seed}/"
    memory = MemoryStore()
    async with EtcdClient(EtcdConfig(endpoints=(etcd_endpoint,))) as client:
        base = (await client.range(prefix)).revision - 1
        theirs = await _transcript(client, random.Random(seed), prefix, base)
        ours = await _transcript(memory, random.Random(seed), prefix, 0)
    for index, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        assert our == their, f"answer {index} differs, seed {seed}"


async def _transcript(
    store: KeyValueStore, dice: random.Random, prefix: str, base: int
) -> list[object]:
    """Return a store's answers to random calls, with revisions counted from `base`."""

    def item(each: KeyValue) -> object:
        created, modified = each.create_revision - base, each.mod_revision - base
        return (each.key, each.value, created, modified, each.version)

    def operation() -> Operation:
        key, prefixed = prefix + dice.choice("abc") + dice.choice("12"), dice.random() < 0.3
        kind = dice.randrange(4)
        if kind < 2:
            return Put(key, bytes([dice.randrange(4)]))
        return (Delete if kind == 2 else Get)(key[:-1] if prefixed else key, prefixed)

    def compare() -> Compare:
        key = prefix + dice.choice("abc") + dice.choice("12")
        return absent(key) if dice.random() < 0.5 else value_is(key, bytes([dice.randrange(4)]))

    answers: list[object] = []
    for _ in range(300):
        compares = [compare() for _ in range(dice.randrange(3))]
        branches = [[operation() for _ in range(dice.randrange(4))] for _ in range(2)]
        try:
            result = await store.transact(compares, *branches)
        except RefusedError:
            answers.append("refused")
            continue
        reads = [[item(each) for each in read] for read in result.reads]
        answers.append((result.succeeded, result.revision - base, reads))
    end = (await store.range(prefix)).revision
    async with aclosing(store.watch(prefix, Revision(base + 1))) as watch:
        # The newest revision may belong to a change under another prefix.
        for batch in await collect(watch, end):
            answers.extend(
                (event.kind, event.key, event.value, event.mod_revision - base)
                for event in batch.events
            )
    return answers
