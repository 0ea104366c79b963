"""Shard maps in etcd: of any size, in chunks that count once a small record names them."""

import json
import random

import pytest
from support.clusters.assignment_records import write_assignments
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import InternalError
from shoal_proto.v1.shards_pb2 import Block, Shard, ShardMap
from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment
from shoal_server.etcd import keys
from shoal_server.etcd.api import Put
from shoal_server.etcd.records import shard_map

MAX_REQUEST_BYTES = 1024 * 1024
"""Bound on a request; etcd takes 1.5 MiB."""


def layout(num_shards: int, server_id: str = "ps-0") -> ShardMap:
    """Return a shard map that hardly compresses."""
    rng = random.Random(3)
    names = (f"{rng.randbytes(100).hex()}" for _ in range(num_shards))
    shards = (
        Shard(shard_id=i, server_id=server_id, blocks=[Block(parameter=name, num_elements=8)])
        for i, name in enumerate(names)
    )
    return ShardMap(job="job", shards=shards)


async def write(store: MemoryStore, written: ShardMap) -> shard_map.StoredLayout:
    stored = shard_map.stored(written)
    assert all(len(chunk.value) < MAX_REQUEST_BYTES for chunk in stored.chunks)
    chunks_exist = await shard_map.write_chunks(store, stored)
    result = await store.transact([chunks_exist], [stored.head])
    assert result.succeeded
    await shard_map.delete_other_layouts(store, stored, result.revision)
    return stored


async def test_a_shard_map_is_read_as_it_was_written() -> None:
    """The shard map may be larger than a request. Keys of the earlier map are deleted."""
    store = MemoryStore()
    assert await shard_map.read(store, "job") is None
    large = layout(20_000)
    stored = await write(store, large)
    assert len(stored.chunks) > 2
    assert await shard_map.read(store, "job") == large
    small = layout(2)
    await write(store, small)
    assert await shard_map.read(store, "job") == small
    assert len(await store.keys(keys.job_prefix("job"))) == 2


async def test_a_shard_map_is_not_read_before_it_is_decided() -> None:
    """A shard map cannot be decided once its chunks were deleted, even if they are written
    again."""
    store = MemoryStore()
    stored = shard_map.stored(layout(2))
    chunks_exist = await shard_map.write_chunks(store, stored)
    assert await shard_map.read(store, "job") is None
    await store.delete(keys.job_prefix("job"), prefix=True)
    await shard_map.write_chunks(store, stored)
    assert not (await store.transact([chunks_exist], [stored.head])).succeeded


async def test_a_primary_that_is_not_registered_has_the_address_of_its_successor() -> None:
    """A later process of the server may become primary from the server's journal. Without one, the
    address is the written one; if that is of another server, it is empty."""
    store = MemoryStore()
    written = layout(2)
    for shard in written.shards:
        shard.address = "written:1"
    await write(store, written)
    shards = tuple(
        ShardAssignment(shard_id=number, epoch=2, primary=Holder(server_id, "first"))
        for number, server_id in enumerate(("ps-0", "ps-1"))
    )
    placed = JobAssignments(job="job", copies=1, shards=shards, placement_id="run")
    await write_assignments(store, placed)

    async def addresses() -> list[str]:
        return [shard.address for shard in (await shard_map.fill(store, written)).shards]

    assert await addresses() == ["written:1", ""]
    for server_id in ("ps-0", "ps-1"):
        record = {"address": f"{server_id}:2", "incarnation": "second"}
        await store.put(keys.server(server_id), json.dumps(record).encode())
    assert await addresses() == ["ps-0:2", "ps-1:2"]


@pytest.mark.parametrize("spoil", ["chunk", "missing", "head"])
async def test_an_unreadable_shard_map_is_an_error(spoil: str) -> None:
    """The error names the job."""
    store = MemoryStore()
    stored = await write(store, layout(2))
    key = stored.head.key if spoil == "head" else stored.chunks[0].key
    if spoil == "missing":
        await store.delete(key)
    else:
        await store.put(key, b"\xff\xff")
    with pytest.raises(InternalError, match="the shard map of job job"):
        await shard_map.read(store, "job")


async def test_a_reader_keeps_the_shard_map_until_there_is_another() -> None:
    """Reading it again returns the same object."""
    store = MemoryStore()
    reader = shard_map.ShardMapReader(store)
    assert await reader.read("job") is None
    await write(store, layout(2))
    first = await reader.read("job")
    assert first == layout(2)
    assert await reader.read("job") is first
    await write(store, layout(2, "ps-1"))
    assert await reader.read("job") == layout(2, "ps-1")
    await store.transact((), [Put("/elsewhere", b"")])
    await store.delete(keys.job_prefix("job"), prefix=True)
    assert await reader.read("job") is None
