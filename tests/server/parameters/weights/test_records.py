"""The mirror of the series' records."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from support.clusters.memory_store import MemoryStore

from shoal_server.core.publications.records import PublishedSegment, PublishedVersion
from shoal_server.etcd import keys
from shoal_server.etcd.records.series import encode_version
from shoal_server.parameters.weights.records import SeriesRecords

SERIES = "job/policy"


async def test_segments_of_the_newest_version_come_first() -> None:
    """Servers read segments from disk in this order: readers wait for the newest version."""
    store, followed = MemoryStore(), asyncio.Queue[list[bytes]]()

    def follow(series: str, segments: Mapping[bytes, PublishedSegment]) -> None:
        followed.put_nowait(list(segments))

    for number in (1, 3, 2):
        version = PublishedVersion(
            number=number,
            epoch=1,
            publication=number,
            step=1,
            layout_digest=b"",
            segments=(PublishedSegment(digest=bytes([number]), num_bytes=1, holders=("ps-0",)),),
            created_unix_s=0.0,
        )
        await store.put(keys.series_version(SERIES, number), encode_version(version))
    holdings = cast("Any", SimpleNamespace(follow=lambda *args: None))
    async with SeriesRecords(store, holdings, cast("Any", SimpleNamespace(follow=follow))):
        async with asyncio.timeout(10.0):
            assert await followed.get() == [b"\3", b"\2", b"\1"]
