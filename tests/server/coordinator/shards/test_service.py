"""Shard maps: one for each job, the same for all callers."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping

import pytest
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import (
    DeadlineExceeded,
    Fenced,
    InvalidSpec,
    MalformedMessage,
    NoServers,
    ProposalConflict,
    ShapeMismatch,
)
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.shards_pb2 import GetMapRequest, ParameterSpec, PlaceRequest, ShardMap
from shoal_server.coordinator.shards.service import ShardsService
from shoal_server.core.processes import Holder
from shoal_server.etcd import keys
from shoal_server.etcd.records import shard_map
from shoal_server.serving.rpc import Context

TOKEN = Token(job="job", member_id="w0", incarnation="one")
SCHEMA = [
    ParameterSpec(name="weight", shape=[1000, 1000], dtype="float32"),
    ParameterSpec(name="bias", shape=[1000], dtype="float32", group=1),
]


async def only_members(token: Token) -> None:
    if token.incarnation != "one":
        raise Fenced("not a member")


async def all_servers(addresses: Mapping[Holder, str]) -> Mapping[Holder, str]:
    """Choose all servers, without a connection to their addresses."""
    return addresses


# The servicer does not use gRPC's context.
CONTEXT: Context = None  # type: ignore[assignment]


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    store = MemoryStore()
    for name in ("ps-0", "ps-1"):
        await store.put(keys.server(name), json.dumps({"address": f"{name}:7710"}).encode())
    yield store
    await store.close()


async def place(store: MemoryStore, parameters: list[ParameterSpec] = SCHEMA) -> ShardMap:
    service = ShardsService(store, only_members, choose=all_servers)
    return await service.Place(PlaceRequest(token=TOKEN, parameters=parameters), CONTEXT)


async def get_map(store: MemoryStore, wait_s: float = 0.0) -> ShardMap:
    service = ShardsService(store, only_members)
    return await service.GetMap(GetMapRequest(token=TOKEN, wait_s=wait_s), CONTEXT)


async def test_placing_is_idempotent(store: MemoryStore) -> None:
    """The first map stays, even if a server has gone since."""
    first = await place(store)
    assert {(s.server_id, s.address, s.epoch) for s in first.shards} == {
        ("ps-0", "ps-0:7710", 1),
        ("ps-1", "ps-1:7710", 1),
    }
    await store.delete(keys.server("ps-1"))
    assert await place(store, SCHEMA[::-1]) == first
    assert await get_map(store) == first
    first.run = ""
    assert await shard_map.read(store, "job") == first


async def test_the_map_has_the_current_address_of_each_server(store: MemoryStore) -> None:
    """Shards stay with the server of that id."""
    first = await place(store)
    await store.put(keys.server("ps-1"), json.dumps({"address": "ps-1:9999"}).encode())
    moved = await get_map(store)
    assert {(s.server_id, s.address) for s in moved.shards} == {
        ("ps-0", "ps-0:7710"),
        ("ps-1", "ps-1:9999"),
    }
    assert [s.server_id for s in moved.shards] == [s.server_id for s in first.shards]


async def test_racing_calls_get_one_map(store: MemoryStore) -> None:
    """Calls that place at once get one map, although more servers register meanwhile."""

    async def churn() -> None:
        for i in range(2, 6):
            await store.put(keys.server(f"ps-{i}"), json.dumps({"address": f"ps-{i}:1"}).encode())

    *maps, _ = await asyncio.gather(*(place(store) for _ in range(8)), churn())
    assert all(shard_map == maps[0] for shard_map in maps)
    assert await get_map(store) == maps[0]


async def test_another_schema_is_refused(store: MemoryStore) -> None:
    """The refusal names each parameter that differs, as seen and as expected."""
    await place(store)
    narrow = [ParameterSpec(name="weight", shape=[1000, 10], dtype="float32"), SCHEMA[1]]
    with pytest.raises(ShapeMismatch, match="float32 1000x10 in group 0") as shape:
        await place(store, narrow)
    assert set(shape.value.details) == {"weight"}
    regrouped = [SCHEMA[0], ParameterSpec(name="bias", shape=[1000], dtype="float32")]
    with pytest.raises(ProposalConflict, match="in group 1") as group:
        await place(store, regrouped)
    assert set(group.value.details) == {"bias"}
    with pytest.raises(ProposalConflict, match="and 12 more"):
        await place(
            store, [ParameterSpec(name=f"p{i}", shape=[1], dtype="float32") for i in range(18)]
        )


@pytest.mark.parametrize(
    ("parameters", "fragment"),
    [
        ([], "nothing to train"),
        ([SCHEMA[0], SCHEMA[0]], "unique"),
        ([ParameterSpec(name="ids", shape=[3], dtype="int64")], "int64"),
        (
            [
                ParameterSpec(name=f"{'x' * 4200}{i}", shape=[9], dtype="float32")
                for i in range(4000)
            ],
            "too large",
        ),
    ],
)
async def test_bad_schemas_are_refused(
    store: MemoryStore, parameters: list[ParameterSpec], fragment: str
) -> None:
    """Schemas that cannot be placed or stored are refused, and no map is written."""
    with pytest.raises(InvalidSpec, match=fragment):
        await place(store, parameters)
    assert await store.get(keys.shard_map("job")) is None


async def test_without_servers_nothing_is_placed(store: MemoryStore) -> None:
    """The error names the command that starts one."""
    await store.delete(keys.SERVERS, prefix=True)
    with pytest.raises(NoServers, match="shoal ps"):
        await place(store)
    await store.put(keys.server("ps-7"), json.dumps({"address": "a:1"}).encode())
    assert {s.server_id for s in (await place(store)).shards} == {"ps-7"}


async def test_a_call_may_wait_for_the_map(store: MemoryStore) -> None:
    """A caller that waits gets the map when it is made, or an error after its time."""
    with pytest.raises(DeadlineExceeded, match="no shard map"):
        await get_map(store)
    with pytest.raises(DeadlineExceeded):
        await get_map(store, wait_s=0.05)
    waiting = asyncio.create_task(get_map(store, wait_s=30.0))
    placed = await place(store)
    async with asyncio.timeout(10):
        assert await waiting == placed


async def test_only_members_are_served(store: MemoryStore) -> None:
    """A call of another process, or with a bad job name, is refused and places nothing."""
    service = ShardsService(store, only_members)
    for bad, kind in (
        (Token(job="job", member_id="w0", incarnation="zero"), Fenced),
        (Token(job="a/../b", member_id="w0", incarnation="one"), MalformedMessage),
    ):
        with pytest.raises(kind):
            await service.Place(PlaceRequest(token=bad, parameters=SCHEMA), CONTEXT)
        with pytest.raises(kind):
            await service.GetMap(GetMapRequest(token=bad), CONTEXT)
    assert await store.get(keys.shard_map("job")) is None
