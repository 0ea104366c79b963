from collections.abc import AsyncIterator

import httpx
import pytest_asyncio
from support.clusters import status_world

from shoal_server.status.app import build_app
from shoal_server.status.serve import StatusServer


@pytest_asyncio.fixture
async def world() -> status_world.World:
    """A coordinator that runs one job, `digits`, with members w0, w1 and w2."""
    world = status_world.World()
    world.put(status_world.job())
    return world


@pytest_asyncio.fixture
async def server(world: status_world.World) -> AsyncIterator[StatusServer]:
    async with StatusServer(build_app(world, world.board), "127.0.0.1", 0) as server:
        yield server


@pytest_asyncio.fixture
async def http(server: StatusServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        yield client
