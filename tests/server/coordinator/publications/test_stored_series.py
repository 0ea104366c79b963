"""Records of a series in etcd, written by one leader and read by the next."""

import os

import pytest
from support.clusters.hooked_store import (
    HookedStore,
    Transaction,
    UnreliableStore,
    answer_lost,
)

from shoal_proto.errors import RefusedError, Unavailable
from shoal_server.coordinator.publications.stored_series import SeriesWriter, read_one
from shoal_server.core.publications.limits import MAX_KEEP, MAX_PINS
from shoal_server.core.publications.protocol import WriteSeries
from shoal_server.core.publications.records import PublishedSegment, PublishedVersion, SeriesHead
from shoal_server.etcd import keys
from shoal_server.etcd.api import Delete, Revision
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.etcd.records.deflated_chunks import CHUNK_BYTES, digest_of

SERIES = "rl/policy"


def version(layout_digest: bytes, number: int = 1) -> PublishedVersion:
    return PublishedVersion(
        number=number,
        epoch=1,
        publication=1,
        step=10,
        layout_digest=layout_digest,
        segments=(PublishedSegment(digest=bytes(16), num_bytes=0, holders=("s1",)),),
        created_unix_s=1.0,
    )


@pytest.mark.parametrize("is_used", [False, True])
async def test_a_layout_of_which_a_leader_has_put_one_chunk_is_put_whole_by_the_next(
    is_used: bool,
) -> None:
    """This is so even if a kept version already uses the layout."""
    layout = os.urandom(2 * CHUNK_BYTES + 1)
    second = keys.series_layout_chunk(SERIES, digest_of(layout), 1)
    memory = UnreliableStore(lambda transaction: second in {put.key for put in transaction.puts})
    store = LeaderStore(memory, lambda: (), lambda reason: None)
    writer = SeriesWriter(store, SERIES, Revision(0))
    assert await writer.write(WriteSeries(head=SeriesHead(epoch=1)), [])
    memory.fails = "before"
    with pytest.raises(Unavailable):
        await writer.keep_layout(layout)
    assert len(await store.keys(keys.series_layouts(SERIES))) == 1

    memory.fails = ""
    if is_used:
        used = version(bytes.fromhex(digest_of(layout)))
        head = SeriesHead(number=1, epoch=1, kept=(1,))
        assert await writer.write(WriteSeries(head=head, put=(used,)), [used])
    _, successor = await read_one(store, SERIES)
    digest = await successor.keep_layout(layout)
    assert await successor.read_layout(digest) == layout


MAX_OPERATIONS = 128
"""etcd's default limit, of a transaction."""


class BoundedStore(HookedStore):
    async def before(self, transaction: Transaction) -> None:
        if len(transaction.then) > MAX_OPERATIONS:
            raise RefusedError("too many operations in txn request")


async def test_many_versions_with_different_layouts_are_dropped_at_once() -> None:
    """The versions are the most that are kept and pinned."""
    memory = BoundedStore()
    store = LeaderStore(memory, lambda: (), lambda reason: None)
    writer, numbers = SeriesWriter(store, SERIES, Revision(0)), range(1, MAX_KEEP + MAX_PINS + 1)
    kept: list[PublishedVersion] = []
    for number in numbers:
        kept.append(version(await writer.keep_layout(b"layout %d" % number), number))
        head = SeriesHead(number=number, epoch=1, kept=tuple(each.number for each in kept))
        assert await writer.write(WriteSeries(head=head, put=(kept[-1],)), kept)
    head = SeriesHead(number=len(kept), epoch=2)
    assert await writer.write(WriteSeries(head=head, drop=tuple(numbers)), [])
    # The newest layout stays for the next version.
    assert len(await store.keys(keys.series_layouts(SERIES))) == 1


async def test_a_layout_that_could_not_be_deleted_is_deleted_later() -> None:
    """The write succeeds all the same. The layout is stored anew if a version uses it again."""
    memory = UnreliableStore(
        lambda transaction: any(isinstance(each, Delete) for each in transaction.then)
    )
    store = LeaderStore(memory, lambda: (), lambda reason: None)
    writer, head = SeriesWriter(store, SERIES, Revision(0)), SeriesHead(epoch=1)
    first = await writer.keep_layout(b"first")
    await writer.keep_layout(b"second")
    memory.fails = "after"
    assert await writer.write(WriteSeries(head=head), [])
    memory.fails = ""
    assert await writer.keep_layout(b"first") == first
    assert await writer.read_layout(first) == b"first"
    assert await writer.write(WriteSeries(head=SeriesHead(epoch=2)), [])
    assert len(await store.keys(keys.series_layouts(SERIES))) == 1


class SlowStore(HookedStore):
    """A store in which deletions take effect late, while `is_slow`: their callers get an error."""

    def __init__(self) -> None:
        super().__init__()
        self.is_slow = False
        self._late: list[Transaction] = []

    async def before(self, transaction: Transaction) -> None:
        if self.is_slow and any(isinstance(each, Delete) for each in transaction.then):
            self._late.append(transaction)
            raise answer_lost()

    async def end_late(self) -> None:
        self.is_slow = False
        for each in self._late:
            await self.transact(*each)


@pytest.mark.parametrize("has_version", [False, True])
async def test_a_late_deletion_leaves_a_layout_that_was_put_anew(has_version: bool) -> None:
    """The deletion arrives before or after the next version, which uses the layout."""
    memory = SlowStore()
    store = LeaderStore(memory, lambda: (), lambda reason: None)
    writer = SeriesWriter(store, SERIES, Revision(0))
    first = await writer.keep_layout(b"first")
    await writer.keep_layout(b"second")
    memory.is_slow = True
    assert await writer.write(WriteSeries(head=SeriesHead(epoch=1)), [])
    assert await writer.keep_layout(b"first") == first
    if not has_version:
        await memory.end_late()
    used, head = version(first), SeriesHead(number=1, epoch=1, kept=(1,))
    assert await writer.write(WriteSeries(head=head, put=(used,)), [used])
    await memory.end_late()
    assert await writer.read_layout(first) == b"first"
