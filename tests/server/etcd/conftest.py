"""Stores to test: in memory, with a prefix, and a real etcd for each module."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest
from support.clusters.etcd_fixture import ask_etcd, running_etcd
from support.clusters.memory_store import MemoryStore

from shoal_server.etcd.api import KeyValueStore, Revision
from shoal_server.etcd.prefixed import PrefixedStore
from shoal_server.etcd.remote.client import EtcdClient
from shoal_server.etcd.remote.config import EtcdConfig

_numbers = itertools.count()


@dataclass(frozen=True)
class Bench:
    """A store, a prefix that no other test uses, and a function that compacts the store."""

    store: KeyValueStore
    prefix: str
    compact: Callable[[Revision], Awaitable[None]]


@pytest.fixture(scope="module")
def etcd_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as endpoint:
        yield endpoint


@pytest.fixture(params=["memory", "prefixed", "etcd"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    prefix = f"/shoal/test/{next(_numbers)}/"
    if request.param in ("memory", "prefixed"):
        memory = MemoryStore()
        store = PrefixedStore(memory, "/team-a") if request.param == "prefixed" else memory

        async def compact_memory(revision: Revision) -> None:
            memory.compact(revision)

        yield Bench(store, prefix, compact_memory)
        await memory.close()
        return
    endpoint: str = request.getfixturevalue("etcd_endpoint")

    async def compact(revision: Revision) -> None:
        await compact_etcd(endpoint, revision)

    async with EtcdClient(EtcdConfig(endpoints=(endpoint,))) as client:
        yield Bench(client, prefix, compact)


async def compact_etcd(endpoint: str, revision: Revision) -> None:
    request = {"revision": revision, "physical": True}
    await asyncio.to_thread(ask_etcd, endpoint, "kv/compaction", **request)
