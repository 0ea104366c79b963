"""Storage of a series in etcd: layouts first, then head and versions in one transaction, then the
removal of unused layouts.

Each write compares the head's revision. No two heads are equal, so etcd's head shows if a write of
unknown outcome took effect. A removal of layouts takes effect only if no layout was written after
the head: a late removal could otherwise delete a layout that was put again meanwhile.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import structlog

from shoal_proto.errors import InternalError, ShoalError, VersionGone
from shoal_server.core.publications.protocol import WriteSeries
from shoal_server.core.publications.records import PublishedVersion, StoredSeries
from shoal_server.etcd import keys
from shoal_server.etcd.api import (
    Delete,
    KeyValue,
    Operation,
    Put,
    Revision,
    none_written_after,
    unchanged_since,
)
from shoal_server.etcd.json_fields import UnreadableRecord
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.etcd.records import deflated_chunks
from shoal_server.etcd.records import series as records
from shoal_server.etcd.repeat import until_answered

log = structlog.get_logger(__name__)

DELETES_A_TRANSACTION = 100
"""etcd's limit is 128 operations."""


class SeriesWriter:
    """Writer of one series."""

    def __init__(
        self,
        store: LeaderStore,
        name: str,
        revision: Revision,
        *,
        layouts: Iterable[str] = (),
    ) -> None:
        """`revision`: the head's in etcd; 0 without one. `layouts`: digests with a chunk in
        etcd."""
        self._store = store
        self._name = name
        self._revision = revision
        self._layouts = set(layouts)
        self._whole_layouts: set[str] = set()
        """Digests of the layouts that this writer has stored. Other layouts may lack chunks in
        etcd."""
        self._newest_layout = ""
        """Digest of the newest layout, which the next version may use."""
        self._writing = asyncio.Lock()

    async def write(self, write: WriteSeries, versions: Iterable[PublishedVersion]) -> bool:
        """Write the head and versions; False if another coordinator has written the head.
        `versions`: all that exist after the write.

        Retries through outages of etcd, and, once this coordinator does not lead, until cancelled.
        Raises refusals of etcd.
        """
        used = {version.layout_digest.hex() for version in versions}
        head = Put(keys.series_head(self._name), records.encode_head(write.head))
        # Locked until the outcome is known, and layouts are deleted.
        async with self._writing:
            operations: list[Operation] = [
                head,
                *(
                    Put(keys.series_version(self._name, v.number), records.encode_version(v))
                    for v in write.put
                ),
                *(Delete(keys.series_version(self._name, number)) for number in write.drop),
            ]
            made_at = await self._written(head, operations)
            if made_at is None:
                return False
            self._revision = made_at
            await self._delete_layouts(self._layouts - used - {self._newest_layout})
            return True

    async def _delete_layouts(self, unused: set[str]) -> None:
        """Delete layouts. What remains after an error is deleted after the next write."""
        self._whole_layouts -= unused
        condition = none_written_after(keys.series_layouts(self._name), self._revision)
        left = sorted(unused)
        while left:
            some, left = left[:DELETES_A_TRANSACTION], left[DELETES_A_TRANSACTION:]
            deletes = [Delete(keys.series_layouts(self._name, each), prefix=True) for each in some]
            try:
                result = await self._store.transact([condition], deletes)
            except ShoalError as error:
                log.warning("layouts_not_deleted", series=self._name, reason=str(error))
                return
            if result.succeeded:
                self._layouts.difference_update(some)

    async def _written(self, head: Put, operations: Sequence[Operation]) -> Revision | None:
        """Return the revision of the write, repeated if necessary; None if another coordinator has
        written the head."""
        condition = unchanged_since(head.key, self._revision)

        async def attempt() -> Revision | None:
            result = await self._store.transact([condition], operations)
            return result.revision if result.succeeded else await self._made_before(head)

        return await until_answered(
            attempt,
            lambda error: log.warning("series_not_written", series=self._name, reason=str(error)),
        )

    async def _made_before(self, head: Put) -> Revision | None:
        stored = await self._store.get(head.key)
        return stored.mod_revision if stored is not None and stored.value == head.value else None

    async def keep_layout(self, serialized: bytes) -> bytes:
        """Store the layout of the next version, unless this writer has; return its digest. Raises
        what the store raises."""
        digest = deflated_chunks.digest_of(serialized)
        async with self._writing:
            if digest not in self._whole_layouts:
                chunks = await asyncio.to_thread(deflated_chunks.cut, serialized)
                self._layouts.add(digest)
                for number, chunk in enumerate(chunks):
                    key = keys.series_layout_chunk(self._name, digest, number)
                    await self._store.transact([], [Put(key, chunk)])
                self._whole_layouts.add(digest)
            self._newest_layout = digest
        return bytes.fromhex(digest)

    async def read_layout(self, digest: bytes) -> bytes:
        """Read a serialized layout. Raises VersionGone if no kept version has it, InternalError if
        its chunks do not match the digest, and what the store raises."""
        chunks = await self._store.range(keys.series_layouts(self._name, digest.hex()))
        if not chunks.items:
            raise VersionGone(
                f"no kept version of {self._name} has that layout",
                seen=f"layout {digest.hex()[:12]}",
                expected="the layout of a version that is kept",
                fix="Read the series again, and fetch a version that it still has.",
            )
        try:
            return deflated_chunks.join((item.value for item in chunks.items), digest.hex())
        except UnreadableRecord as error:
            raise InternalError(
                f"a layout of series {self._name} in etcd does not parse", seen=str(error)
            ) from error

    async def delete_records(self) -> None:
        """Delete all records of the series, which frees its name and numbers. Raises what the store
        raises."""
        await self._store.transact(
            [],
            [
                Delete(f"{keys.SERIES}{self._name}/", prefix=True),
                Delete(keys.series_layouts(self._name), prefix=True),
            ],
        )


SeriesWithWriter = tuple[StoredSeries, SeriesWriter]


async def read_all(store: LeaderStore) -> tuple[dict[str, SeriesWithWriter], dict[str, ShoalError]]:
    """Read all series, and return the error of each unreadable one by name. Raises what the store
    raises."""
    listed = (await store.range(keys.SERIES)).items
    layouts = await store.keys(keys.SERIES_LAYOUTS)
    return _parsed(store, listed, layouts)


async def read_one(store: LeaderStore, name: str) -> SeriesWithWriter:
    """Read one series; an empty one if it does not exist. Raises InternalError for unreadable
    records, and what the store raises."""
    listed = (await store.range(f"{keys.SERIES}{name}/")).items
    layouts = await store.keys(keys.series_layouts(name))
    series, broken = _parsed(store, listed, layouts)
    if name in broken:
        raise broken[name]
    return series.get(name) or (StoredSeries(), SeriesWriter(store, name, Revision(0)))


def _parsed(
    store: LeaderStore, listed: Iterable[KeyValue], layouts: Iterable[str]
) -> tuple[dict[str, SeriesWithWriter], dict[str, ShoalError]]:
    series: dict[str, SeriesWithWriter] = {}
    broken: dict[str, ShoalError] = {}
    digests = _digests(layouts)
    of_series: dict[str, dict[str, KeyValue]] = {}
    for item in listed:
        split = records.split_name(item.key.removeprefix(keys.SERIES))
        if split is not None:
            of_series.setdefault(split[0], {})[item.key] = item
    for name, items in of_series.items():
        head = items.get(keys.series_head(name))
        try:
            stored = records.parse_series(name, {key: item.value for key, item in items.items()})
        except InternalError as error:
            broken[name] = error
            continue
        if stored is not None and head is not None:
            layouts = digests.get(name, ())
            series[name] = stored, SeriesWriter(store, name, head.mod_revision, layouts=layouts)
    return series, broken


def _digests(layouts: Iterable[str]) -> Mapping[str, set[str]]:
    digests: dict[str, set[str]] = {}
    for key in layouts:
        name, _, rest = key.removeprefix(keys.SERIES_LAYOUTS).rpartition("/")[0].rpartition("/")
        if name and rest:
            digests.setdefault(name, set()).add(rest)
    return digests
