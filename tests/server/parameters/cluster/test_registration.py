"""Registration of parameter servers: each is in etcd while it serves, and no two have one id."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from support.clusters.memory_store import MemoryStore
from support.clusters.parameter_servers import config
from support.network.ports import free_port

from shoal_proto.errors import AddressInUse, InvalidSpec
from shoal_server.core.processes import Holder
from shoal_server.etcd import keys
from shoal_server.etcd.api import EventKind, KeyValue, Revision
from shoal_server.parameters.cluster.registration import Registration, ServerIdentity
from shoal_server.parameters.config import ParameterServerConfig, WorkLimits
from shoal_server.parameters.journal.config import JournalConfig
from shoal_server.parameters.journal.log import Journal
from shoal_server.parameters.process import running

KEY = keys.server("ps-0")


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    store = MemoryStore(min_ttl_s=0.01)
    yield store
    await store.close()


def identity(address: str = "127.0.0.1:1") -> ServerIdentity:
    return ServerIdentity(holder=Holder("ps-0", "one"), address=address, started_unix_s=1.0)


def registration(store: MemoryStore, who: ServerIdentity, lease_ttl_s: float) -> Registration:
    """Return a registration whose callbacks do nothing."""
    return Registration(
        store, who, lease_ttl_s, on_renewed=lambda sent_s: None, on_end=lambda: None
    )


async def registered(store: MemoryStore, start: Revision) -> bytes:
    """Return the first record that is put at this revision or later."""
    async with asyncio.timeout(10), aclosing(store.watch(KEY, start)) as batches:  # type: ignore[type-var]
        async for batch in batches:
            for event in batch.events:
                if event.kind is EventKind.PUT:
                    return event.value
    raise AssertionError("the watch ended")


async def registration_record(store: MemoryStore) -> KeyValue:
    found = await store.get(KEY)
    assert found is not None
    return found


async def test_a_server_is_registered_while_it_serves(store: MemoryStore) -> None:
    """The record has the advertised address, and is deleted when the server stops."""
    async with running(config("ps-0", advertise="127.0.0.7"), store) as server:
        record = json.loads((await registration_record(store)).value)
        assert record["address"] == server.address == f"127.0.0.7:{server.port}"
        assert record["started_unix_s"] > 0
    assert await store.get(KEY) is None


async def test_the_port_is_open_while_the_journal_is_read(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe that connects counts a server as started however long it reads its journal."""
    is_reading, may_end, recover = threading.Event(), threading.Event(), Journal.recover

    def slow(journal: Journal, make: Any) -> Any:
        is_reading.set()
        assert may_end.wait(30)
        return recover(journal, make)

    monkeypatch.setattr(Journal, "recover", slow)
    port = free_port()
    given = config("ps-0", listen=f"127.0.0.1:{port}", journal=JournalConfig(directory=tmp_path))

    async def serve() -> None:
        async with running(given, store):
            await registration_record(store)

    starting = asyncio.create_task(serve())
    try:
        assert await asyncio.to_thread(is_reading.wait, 30)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        assert await store.get(KEY) is None
    finally:
        may_end.set()
        await starting


async def test_a_server_registers_again_after_its_lease_was_lost(store: MemoryStore) -> None:
    """A lease may expire while etcd is unreachable."""
    async with registration(store, identity(), 0.3):
        first = await registration_record(store)
        await store.revoke(first.lease)
        value = await registered(store, Revision(first.mod_revision + 1))
        assert value == first.value
        assert (await registration_record(store)).lease != first.lease


class SlowStore(MemoryStore):
    """Store that answers no transaction while it is cut off."""

    def __init__(self) -> None:
        super().__init__(min_ttl_s=0.01)
        self.is_reached = asyncio.Event()
        self.is_reached.set()
        self.num_waiting = asyncio.Semaphore(0)

    async def transact(self, *what: Any, **how: Any) -> Any:
        if not self.is_reached.is_set():
            self.num_waiting.release()
        await self.is_reached.wait()
        return await super().transact(*what, **how)


async def test_a_server_continues_if_etcd_answers_late() -> None:
    """Regression: the server ended as if another server had its id."""
    store = SlowStore()
    async with registration(store, identity(), 0.1):
        first = await registration_record(store)
        store.is_reached.clear()
        await store.revoke(first.lease)
        try:
            async with asyncio.timeout(10):
                for _ in range(2):
                    await store.num_waiting.acquire()
        finally:
            store.is_reached.set()
        assert await registered(store, Revision(first.mod_revision + 1)) == first.value
    await store.close()


async def test_a_registration_outlasts_its_first_lease(store: MemoryStore) -> None:
    """The lease is renewed, and the record is not written again."""
    async with registration(store, identity(), 0.2):
        first = await registration_record(store)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.7):
                await registered(store, Revision(first.mod_revision + 1))
        assert (await registration_record(store)).mod_revision == first.mod_revision


async def test_a_second_server_of_that_id_is_refused(store: MemoryStore) -> None:
    """The first server keeps the id; the error for the second names the first."""
    async with registration(store, identity(), 0.2):
        with pytest.raises(AddressInUse, match=r"127\.0\.0\.1:1"):
            async with registration(store, identity("127.0.0.1:2"), 0.2):
                pass
        assert json.loads((await registration_record(store)).value)["address"] == "127.0.0.1:1"


async def test_a_second_server_of_an_id_waits_for_the_lease_of_a_dead_one(
    store: MemoryStore,
) -> None:
    """The second server registers once that lease has expired."""
    lease = await store.grant(0.3)
    await store.put(KEY, identity().record(), lease)
    async with registration(store, identity("127.0.0.1:2"), 1.0):
        assert json.loads((await registration_record(store)).value)["address"] == "127.0.0.1:2"


async def test_a_port_in_use_is_refused(store: MemoryStore) -> None:
    """The error has the address, and the server is not registered."""
    async with running(config("ps-0"), store) as server:
        address = f"127.0.0.1:{server.port}"
        with pytest.raises(AddressInUse, match=address):
            async with running(config("ps-1", listen=address), store):
                pass
        assert await store.get(keys.server("ps-1")) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"listen": "no-port"},
        {"listen": "host:99999"},
        {"server_id": "a/b"},
        {"lease_ttl_s": 0.0},
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object]) -> None:
    """Bad settings are refused at construction."""
    good = config("ps-0")
    with pytest.raises(InvalidSpec):
        ParameterServerConfig(**({"etcd": good.etcd} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["num_threads", "max_unfinished_bytes", "max_bulk_connections"])
def test_bounds_of_zero_are_refused(name: str) -> None:
    with pytest.raises(InvalidSpec, match=name.replace("_", "-")):
        WorkLimits(**{name: 0})
