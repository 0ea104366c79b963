from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI
from support.clusters import status_world

from shoal_server.status.app import build_app
from shoal_server.status.serve import StatusServer


@pytest.fixture(scope="session")
def shown() -> tuple[status_world.World, FastAPI]:
    """A world and the application that shows it, which takes much longer to build than to ask."""
    world = status_world.World()
    return world, build_app(world, world.board)


@pytest.fixture
def world(shown: tuple[status_world.World, FastAPI]) -> status_world.World:
    """A coordinator that runs one job, `digits`, with members w0, w1 and w2."""
    world, _ = shown
    world.renew()
    world.put(status_world.job())
    return world


@pytest_asyncio.fixture
async def server(
    world: status_world.World, shown: tuple[status_world.World, FastAPI]
) -> AsyncIterator[StatusServer]:
    async with StatusServer(shown[1], "127.0.0.1", 0) as server:
        yield server


@pytest_asyncio.fixture
async def http(server: StatusServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        yield client
