"""Calls to etcd that gRPC cancels, and calls whose task is cancelled."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from shoal_server.etcd.remote.config import EtcdConfig
from shoal_server.etcd.remote.connection import Attempt, Connections


@pytest.fixture
async def connections() -> AsyncIterator[Connections]:
    """Return connections to an address without a server."""
    connections = Connections(EtcdConfig(endpoints=("127.0.0.1:1",)))
    yield connections
    await connections.close()


async def test_a_call_that_grpc_cancels_is_made_again(connections: Connections) -> None:
    """Regression: gRPC may end a call with CancelledError although no task was cancelled. This
    ended parameter servers that renewed their registration."""
    attempts: list[Attempt] = []

    async def given_up_once(to: Attempt) -> int:
        attempts.append(to)
        if len(attempts) == 1:
            raise asyncio.CancelledError
        return 5

    assert await connections.call(given_up_once) == 5
    assert len(attempts) == 2


async def test_a_task_that_is_cancelled_in_a_call_ends(connections: Connections) -> None:
    begun = asyncio.Event()

    async def never_answered(to: Attempt) -> None:
        begun.set()
        await asyncio.Event().wait()

    calling = asyncio.create_task(connections.call(never_answered))
    await begun.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
