"""The listener for bulk connections: what it reserves for a client is released."""

import asyncio
import errno
import socket
from typing import cast

import pytest
from support.clusters.memory_store import MemoryStore

from shoal_proto.bulk_opening import present_key
from shoal_proto.tls.bulk_offers import BulkOffers, Purpose
from shoal_server.core.processes import Holder
from shoal_server.parameters.bulk.arena import SharedArena
from shoal_server.parameters.service import bulk_listener
from shoal_server.parameters.service.bulk_connection import BulkServices
from shoal_server.parameters.service.bulk_listener import BulkListener
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.chunk_assembler import Budget
from shoal_server.parameters.shard.memory import Memory

LIMIT_S = 30.0


async def test_memory_that_cannot_be_allocated_is_not_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client continues without shared memory, and no memory is counted for it."""

    def refuse(num_bytes: int) -> SharedArena:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(bulk_listener, "SharedArena", refuse)
    memory = Memory(1 << 30, Catalog(MemoryStore(), Holder("ps-0", "one")), Budget(1 << 20))
    offers, services = BulkOffers(), cast(BulkServices, None)
    listener = BulkListener(services, offers, memory)
    async with listener.listening("127.0.0.1", 0), asyncio.timeout(LIMIT_S):
        offer = offers.make(Purpose.CALLS)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(f"\0{offer.local_name}")
            assert await asyncio.to_thread(present_key, client, offer.key, 4096) is None
            assert memory.held_bytes == 0
