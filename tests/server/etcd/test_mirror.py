"""The mirror of a prefix: on each kind of store, and after failures of lists and watches."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import CorruptError, InternalError, ShoalError, Unavailable
from shoal_server.etcd import mirror
from shoal_server.etcd.api import (
    Delete,
    KeyValue,
    KeyValueStore,
    Put,
    RangeResult,
    Revision,
    WatchBatch,
)
from shoal_server.etcd.mirror import MirroredKey, PrefixMirror, follow_key

from .conftest import Bench


class Changes(list[tuple[str, ...]]):
    """Calls made by a mirror, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = asyncio.Event()

    def note_change(self) -> None:
        self.append(("change",))
        self.changed.set()


def parse(item: MirroredKey) -> str | None:
    """Return the text, or None if it is empty. Raises InternalError if it is not text."""
    try:
        return item.value.decode() or None
    except UnicodeDecodeError as error:
        raise InternalError("no text", seen=repr(item.value)) from error


def mirrored(
    store: KeyValueStore, prefix: str, changes: Changes, *, resync: bool = False
) -> PrefixMirror[str]:
    """Return a mirror that records its calls."""
    return PrefixMirror(
        store,
        prefix,
        parse,
        on_put=lambda name, new, old: changes.append(("put", name, new, str(old))),
        on_delete=lambda name, old: changes.append(("delete", name, old)),
        on_change=changes.note_change,
        resync=resync,
    )


async def until(changes: Changes, *last: str) -> None:
    """Wait until this call was the last one of a batch."""
    async with asyncio.timeout(10):
        while changes[-2:] != [last, ("change",)]:
            changes.changed.clear()
            await changes.changed.wait()


async def test_existing_records_are_applied_before_the_block_begins(bench: Bench) -> None:
    """Later changes are reported in order, each with the value that it replaced."""
    await bench.store.put(bench.prefix + "a", b"1")
    await bench.store.put(bench.prefix + "b", b"2")
    changes = Changes()
    async with mirrored(bench.store, bench.prefix, changes) as found:
        assert found.is_in_sync
        assert dict(found.records) == {"a": "1", "b": "2"}
        assert changes == [("put", "a", "1", "None"), ("put", "b", "2", "None"), ("change",)]
        changes.clear()
        await bench.store.transact((), [Put(bench.prefix + "a", b"3"), Delete(bench.prefix + "b")])
        await bench.store.put(bench.prefix + "c", b"4")
        await until(changes, "put", "c", "4", "None")
        assert [each for each in changes if each != ("change",)] == [
            ("put", "a", "3", "1"),
            ("delete", "b", "2"),
            ("put", "c", "4", "None"),
        ]
        assert dict(found.records) == {"a": "3", "c": "4"}
    await bench.store.put(bench.prefix + "c", b"5")
    assert found.get("c") == "4"


async def test_the_newest_revision_of_each_key_counts(bench: Bench) -> None:
    """An older change that the watch delivers does not replace a value that was looked up."""
    key = bench.prefix + "a"
    changes = Changes()
    async with mirrored(bench.store, bench.prefix, changes) as found:
        for value in (b"1", b"2", b"3"):
            await bench.store.put(key, value)
        assert await found.look_up("a") == "3"
        await bench.store.put(bench.prefix + "end", b"1")
        await until(changes, "put", "end", "1", "None")
        puts = [each for each in changes if each[:2] == ("put", "a")]
        assert puts[-1][2] == "3"
        assert [each[2] for each in puts] == sorted({each[2] for each in puts})
        found.note(MirroredKey(key, b"old", Revision(1)))
        assert found.get("a") == "3"
        await bench.store.delete(key)
        assert await found.look_up("a") is None


async def test_items_that_are_older_than_the_watch_bring_no_record_back(bench: Bench) -> None:
    changes = Changes()
    await bench.store.put(bench.prefix + "a", b"1")
    old = await bench.store.range(bench.prefix)
    async with mirrored(bench.store, bench.prefix, changes) as found:
        await bench.store.delete(bench.prefix + "a")
        await until(changes, "delete", "a", "1")
        found.note_all(old.items)
        assert dict(found.records) == {}
        await bench.store.put(bench.prefix + "b", b"2")
        found.note_all((await bench.store.range(bench.prefix)).items)
        assert dict(found.records) == {"b": "2"}


class LateAnswers(MemoryStore):
    """Store whose answers to `get` wait until `is_sent` is set, while it is not None."""

    def __init__(self) -> None:
        super().__init__()
        self.is_sent: asyncio.Event | None = None
        self.is_read = asyncio.Event()

    async def get(self, key: str) -> KeyValue | None:
        found = await super().get(key)
        if self.is_sent is not None:
            self.is_read.set()
            await self.is_sent.wait()
        return found


@pytest.mark.parametrize("before", [None, "1"])
async def test_a_change_that_overtakes_the_answer_of_a_look_up_counts(before: str | None) -> None:
    """The record is deleted, or put, between the reading and the arrival of the answer."""
    store, changes = LateAnswers(), Changes()
    if before is not None:
        await store.put("/a", before.encode())
    async with mirrored(store, "/", changes) as found:
        store.is_sent = asyncio.Event()
        looking = asyncio.create_task(found.look_up("a"))
        await store.is_read.wait()
        if before is None:
            await store.put("/a", b"2")
            await until(changes, "put", "a", "2", "None")
        else:
            await store.delete("/a")
            await until(changes, "delete", "a", "1")
        store.is_sent.set()
        assert await looking == ("2" if before is None else None)


async def test_an_unreadable_record_keeps_the_last_value(bench: Bench) -> None:
    """A record that parses to None is removed."""
    changes = Changes()
    for name in ("kept", "dropped"):
        await bench.store.put(bench.prefix + name, b"1")
    async with mirrored(bench.store, bench.prefix, changes) as found:
        await bench.store.put(bench.prefix + "kept", b"\xff")
        await bench.store.put(bench.prefix + "dropped", b"")
        await until(changes, "delete", "dropped", "1")
        assert dict(found.records) == {"kept": "1"}


async def test_following_one_key_yields_each_of_its_values(bench: Bench) -> None:
    """The key is absent, written, written again and deleted; longer keys do not count."""
    key = bench.prefix + "a"
    await bench.store.put(key + "b", b"1")
    seen: list[bytes | None] = []
    following = follow_key(bench.store, key)
    async with asyncio.timeout(10):
        for value in (None, b"1", b"2", None):
            item = await anext(following)
            seen.append(None if item is None else item.value)
            if value is None and len(seen) == 1:
                await bench.store.put(key + "b", b"2")
                await bench.store.put(key, b"1")
            elif value == b"1":
                await bench.store.put(key, b"2")
            elif value == b"2":
                await bench.store.delete(key)
    await following.aclose()
    assert seen == [None, b"1", b"2", None]


class BreakingStore(MemoryStore):
    """A store whose lists and watches can be made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[ShoalError] = []
        self.broken = asyncio.Event()
        self.noticed = asyncio.Event()
        """Set once a list has failed."""
        self.num_lists = 0

    async def range(self, prefix: str) -> RangeResult:
        self.num_lists += 1
        if self.failures:
            self.noticed.set()
            raise self.failures.pop(0)
        return await super().range(prefix)

    async def watch(self, prefix: str, start: Revision) -> AsyncGenerator[WatchBatch, None]:
        changes = super().watch(prefix, start)
        while True:
            waiting = asyncio.ensure_future(anext(changes))
            broken = asyncio.ensure_future(self.broken.wait())
            await asyncio.wait({waiting, broken}, return_when=asyncio.FIRST_COMPLETED)
            broken.cancel()
            if not waiting.done():
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                raise CorruptError("etcd has lost history")
            yield waiting.result()


async def test_an_error_of_the_watch_is_raised() -> None:
    """The owner of a mirror without `resync` gets it, and the mirror is no longer in sync."""
    store = BreakingStore()
    changes = Changes()
    async with mirrored(store, "p/", changes) as found:
        failed = asyncio.ensure_future(found.wait_failed())
        store.broken.set()
        with pytest.raises(CorruptError, match="lost history"):
            await failed
        assert not found.is_in_sync


async def test_an_error_of_the_first_list_is_raised_at_once() -> None:
    """The block of a mirror without `resync` does not begin."""
    store = BreakingStore()
    store.failures.append(Unavailable("no etcd"))
    with pytest.raises(Unavailable):
        async with mirrored(store, "p/", Changes()):
            raise AssertionError("the block has begun")


async def test_a_mirror_with_resync_lists_again_after_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys deleted and added meanwhile are reported."""
    monkeypatch.setattr(mirror, "RESYNC_PAUSE_S", 0.02)
    store = BreakingStore()
    store.failures.append(Unavailable("no etcd yet"))
    changes = Changes()
    async with mirrored(store, "p/", changes, resync=True) as found:
        assert not found.is_in_sync
        await store.put("p/goes", b"1")
        await store.put("p/stays", b"2")
        async with asyncio.timeout(10):
            await found.wait_in_sync()
        changes.clear()
        store.noticed.clear()
        store.failures.append(Unavailable("still away"))
        store.broken.set()
        async with asyncio.timeout(10):
            await store.noticed.wait()
        assert not found.is_in_sync
        await store.delete("p/goes")
        await store.put("p/comes", b"3")
        store.broken.clear()
        async with asyncio.timeout(10):
            await found.wait_in_sync()
        assert changes == [("delete", "goes", "1"), ("put", "comes", "3", "None"), ("change",)]
        assert dict(found.records) == {"comes": "3", "stays": "2"}
        assert store.num_lists == 4
