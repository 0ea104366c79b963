"""Calls to etcd end properly for their callers, however gRPC ends them."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from shoal_server.etcd.remote.config import EtcdConfig
from shoal_server.etcd.remote.connection import Attempt, Connections


@pytest.fixture
async def connections() -> AsyncIterator[Connections]:
    """Connections to an address without a server."""
    connections = Connections(EtcdConfig(endpoints=("127.0.0.1:1",)))
    yield connections
    await connections.close()


async def test_a_call_that_grpc_gives_up_is_made_again(connections: Connections) -> None:
    """Regression: gRPC gives a call up with CancelledError, which ended a parameter server that
    kept its registration, though no task was cancelled."""
    attempts: list[Attempt] = []

    async def given_up_once(to: Attempt) -> int:
        attempts.append(to)
        if len(attempts) == 1:
            raise asyncio.CancelledError
        return 5

    assert await connections.call(given_up_once) == 5
    assert len(attempts) == 2


async def test_who_is_cancelled_in_a_call_ends(connections: Connections) -> None:
    begun = asyncio.Event()

    async def never_answered(to: Attempt) -> None:
        begun.set()
        await asyncio.Event().wait()

    calling = asyncio.create_task(connections.call(never_answered))
    await begun.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
