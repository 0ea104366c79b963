"""A job's shards as they are held now: the layout, who leads each, and where that server is.

Layout and holders are two records. The layout is written once; the holders change with every
failover and move.
"""

from google.protobuf.message import DecodeError

from shoal_proto.errors import InternalError
from shoal_proto.v1.shards_pb2 import ShardMap
from shoal_server.core.shards.assignments import Holder, JobAssignments
from shoal_server.etcd import keys
from shoal_server.etcd.api import KeyValueStore
from shoal_server.etcd.records import assignments
from shoal_server.etcd.records import servers as registered


async def servers(store: KeyValueStore) -> dict[Holder, str]:
    """The parameter servers present: their addresses."""
    return {server.holder: server.address for server in await registered.read(store)}


async def read(store: KeyValueStore, job: str) -> ShardMap | None:
    """The layout as it was written, without holders."""
    found = await store.get(keys.shard_map(job))
    return None if found is None else parse(job, found.value)


async def read_current(store: KeyValueStore, job: str) -> ShardMap | None:
    """The layout with each shard's primary, its epoch and its address. The address is the last one
    known, or empty, while that server is not registered."""
    found = await read(store, job)
    return None if found is None else await fill(store, found)


async def read_held(
    store: KeyValueStore, job: str
) -> tuple[ShardMap, JobAssignments | None] | None:
    """As `read_current`, with the records of who holds the shards, where there are any."""
    layout = await read(store, job)
    if layout is None:
        return None
    entry = await assignments.read(store, job)
    if entry is None:
        return layout, None
    return await _filled(store, layout, entry.assignments), entry.assignments


async def fill(store: KeyValueStore, layout: ShardMap) -> ShardMap:
    """Write into the layout who holds its shards now."""
    entry = await assignments.read(store, layout.job)
    return layout if entry is None else await _filled(store, layout, entry.assignments)


async def _filled(store: KeyValueStore, layout: ShardMap, held: JobAssignments) -> ShardMap:
    addresses = {holder.server_id: a for holder, a in (await servers(store)).items()}
    holders = {assignment.shard_id: assignment for assignment in held.shards}
    for shard in layout.shards:
        assignment = holders.get(shard.shard_id)
        if assignment is None:
            raise InternalError(
                f"the record of shard holders of job {layout.job} has no shard {shard.shard_id}",
                seen=f"{len(holders)} shards",
                expected=f"all {len(layout.shards)} of the shard map",
            )
        last_known = shard.address if shard.server_id == assignment.primary.server_id else ""
        shard.server_id = assignment.primary.server_id
        shard.epoch = assignment.epoch
        shard.address = addresses.get(shard.server_id, last_known)
    return layout


def parse(job: str, value: bytes) -> ShardMap:
    """Raises InternalError for bytes that are no shard map."""
    try:
        return ShardMap.FromString(value)
    except DecodeError as error:
        raise InternalError(
            f"the shard map of job {job} in etcd does not parse", seen=repr(error)
        ) from error
