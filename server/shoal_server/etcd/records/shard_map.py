"""A job's shard map: the layout, the primary of each shard, and the primary's address.

Holders change with every failover and move, so they are stored as shard assignments, apart from the
layout. The layout is written by the first placement, and again by a restore; its own primaries stay
those of the first placement. Its head is written after its chunks, and makes it the job's layout.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import structlog
from google.protobuf.message import DecodeError

from shoal_proto.errors import InternalError, RetryError
from shoal_proto.v1.shards_pb2 import ShardMap
from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import JobAssignments
from shoal_server.etcd import keys
from shoal_server.etcd.api import (
    Compare,
    Delete,
    Get,
    Keyspace,
    KeyValue,
    Put,
    Revision,
    created_at,
    unchanged_since,
)
from shoal_server.etcd.json_fields import Fields, UnreadableRecord
from shoal_server.etcd.records import assignments, deflated_chunks
from shoal_server.etcd.records import servers as registered
from shoal_server.etcd.repeat import transact_until_known

log = structlog.get_logger(__name__)

FORMAT = 1
MAX_CHUNKS = deflated_chunks.MAX_LAYOUT_BYTES // deflated_chunks.CHUNK_BYTES
READERS_KEEP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayout:
    """A layout to write: `chunks` first, then `head`."""

    job: str
    digest: str
    head: Put
    chunks: Sequence[Put]


def stored(layout: ShardMap) -> StoredLayout:
    serialized = layout.SerializeToString(deterministic=True)
    digest = deflated_chunks.digest_of(serialized)
    parts = deflated_chunks.cut(serialized)
    record = {
        "format": FORMAT,
        "digest": digest,
        "num_chunks": len(parts),
        "num_bytes": len(serialized),
    }
    return StoredLayout(
        job=layout.job,
        digest=digest,
        head=Put(keys.shard_map(layout.job), json.dumps(record).encode()),
        chunks=[
            Put(keys.shard_map_chunk(layout.job, digest, number), part)
            for number, part in enumerate(parts)
        ],
    )


async def write_chunks(store: Keyspace, layout: StoredLayout) -> Compare:
    """Write a layout's chunks; return the condition that all still exist."""
    conditions = [await _write_chunk(store, chunk) for chunk in layout.chunks]
    # Chunks are deleted together: if the first exists, all do.
    return conditions[0]


async def _write_chunk(store: Keyspace, chunk: Put) -> Compare:
    # The key contains the content's digest: repeating is harmless.
    result = await transact_until_known(store, [], [chunk, Get(chunk.key)])
    return created_at(chunk.key, result.reads[0][0].create_revision)


async def delete_other_layouts(
    store: Keyspace, decided: StoredLayout, decided_at: Revision
) -> None:
    prefix = keys.shard_map_chunks(decided.job)
    still_decided = unchanged_since(decided.head.key, decided_at)
    try:
        found = await store.keys(prefix)
        digests = {key.removeprefix(prefix).partition("/")[0] for key in found}
        for digest in digests - {decided.digest}:
            gone = Delete(keys.shard_map_chunks(decided.job, digest), prefix=True)
            await store.transact([still_decided], [gone])
    except RetryError as error:
        # Other layouts do no harm, and are deleted with the job.
        log.warning("other_layouts_not_deleted", job=decided.job, reason=str(error))


async def servers(store: Keyspace) -> dict[Holder, str]:
    return {server.holder: server.address for server in await registered.read(store)}


async def servers_for_shards(store: Keyspace) -> dict[Holder, str]:
    """Addresses of the servers for new shards: those that stay, or all if every server is leaving.
    A leaving server ends once it holds no shard."""
    found = await registered.read(store)
    staying = [server for server in found if not server.is_leaving]
    return {server.holder: server.address for server in staying or found}


async def read(store: Keyspace, job: str) -> ShardMap | None:
    """The layout as written; None if there is none. Its primaries, epochs and addresses are those
    of the first placement. Raises InternalError if it does not parse."""
    return parse(job, (await store.range(keys.shard_map(job))).items)


async def read_held(store: Keyspace, job: str) -> tuple[ShardMap, JobAssignments | None] | None:
    """The layout with each shard's current primary, epoch and address, and the shard assignments,
    if any; None if there is no layout.

    If the shards are not placed, the layout is as written. `address`: that of the process
    registered under the primary's server id, even after a restart, since the new process may lead
    from its journal. Without such a process: the layout's address if that is of the same server,
    else empty. Raises InternalError for a missing or unreadable record.
    """
    layout = await read(store, job)
    return None if layout is None else await _held(store, layout)


async def fill(store: Keyspace, layout: ShardMap) -> ShardMap:
    """A copy of the layout with current primaries, epochs and addresses. Raises InternalError as
    `read_held` does."""
    return (await _held(store, layout))[0]


async def _held(store: Keyspace, layout: ShardMap) -> tuple[ShardMap, JobAssignments | None]:
    listed = (await store.range(keys.assignments(layout.job))).items
    addresses = {holder.server_id: a for holder, a in (await servers(store)).items()}
    # Thousands of records: parsing must not hold up the event loop.
    return await asyncio.to_thread(_filled, layout, listed, addresses)


def _filled(
    layout: ShardMap, listed: Collection[KeyValue], addresses: dict[str, str]
) -> tuple[ShardMap, JobAssignments | None]:
    filled = ShardMap()
    filled.CopyFrom(layout)
    found = assignments.parse_all(layout.job, listed)
    if found is None:
        return filled, None
    filled.run = found.members_placement_id
    holders = {assignment.shard_id: assignment for assignment in found.shards}
    for shard in filled.shards:
        assignment = holders.get(shard.shard_id)
        if assignment is None:
            raise InternalError(
                f"the shard assignments of job {layout.job} have no shard {shard.shard_id}",
                seen=f"{len(holders)} shards",
                expected=f"all {len(layout.shards)} of the shard map",
            )
        last_known = shard.address if shard.server_id == assignment.primary.server_id else ""
        shard.server_id = assignment.primary.server_id
        shard.epoch = assignment.epoch
        shard.address = addresses.get(shard.server_id, last_known)
    return filled, found


def parse(job: str, items: Collection[KeyValue]) -> ShardMap | None:
    """The layout in items of the job below `keys.shard_map`; None if there is none. Raises
    InternalError if they do not parse."""
    values = {item.key: item.value for item in items}
    head = values.get(keys.shard_map(job))
    if head is None:
        return None
    digest, num_chunks = _parse_head(job, head)
    numbers = range(num_chunks)
    chunks = (values.get(keys.shard_map_chunk(job, digest, number), b"") for number in numbers)
    try:
        serialized = deflated_chunks.join(chunks, digest)
    except UnreadableRecord as error:
        raise _unreadable(job, str(error)) from error
    return from_bytes(job, serialized)


def from_bytes(job: str, serialized: bytes) -> ShardMap:
    """Parse a shard map. Raises InternalError if it does not parse."""
    try:
        return ShardMap.FromString(serialized)
    except DecodeError as error:
        raise _unreadable(job, repr(error)) from error


class ShardMapReader:
    """Reads layouts and caches the last few: repeated reads cost one small read of etcd. Do not
    change returned layouts, which are shared."""

    def __init__(self, store: Keyspace) -> None:
        self._store = store
        self._kept: OrderedDict[str, tuple[bytes, ShardMap]] = OrderedDict()

    async def read(self, job: str) -> ShardMap | None:
        """The current layout as written: its primaries, epochs and addresses may be out of date.
        Raises InternalError as the function `read` does."""
        head = await self._store.get(keys.shard_map(job))
        kept = self._kept.pop(job, None)
        if head is None:
            return None
        if kept is None or kept[0] != head.value:
            items = (await self._store.range(keys.shard_map(job))).items
            layout = await asyncio.to_thread(parse, job, items)
            value = next((i.value for i in items if i.key == head.key), None)
            if layout is None or value is None:
                return None
            kept = value, layout
        self._kept[job] = kept
        while len(self._kept) > READERS_KEEP:
            self._kept.popitem(last=False)
        return kept[1]


def _parse_head(job: str, value: bytes) -> tuple[str, int]:
    try:
        record = Fields.parsed(value)
        found = record.text("digest"), record.count("num_chunks", most=MAX_CHUNKS)
        later = record.count("format") > FORMAT
    except UnreadableRecord as error:
        raise _unreadable(job, f"{value[:80]!r}, {error}") from error
    if later:
        raise _unreadable(job, "a shard map of a later release")
    return found


def _unreadable(job: str, seen: str) -> InternalError:
    return InternalError(f"the shard map of job {job} in etcd does not parse", seen=seen)
