"""A status endpoint with one job, for commands that read it."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from support.clusters import status_world
from support.clusters.status_world import World

from shoal_server.status.app import build_app
from shoal_server.status.serve import StatusServer


@pytest.fixture
def world() -> World:
    world = World()
    world.put(status_world.job())
    return world


@pytest.fixture
def url(world: World) -> Iterator[str]:
    """The endpoint's URL; it runs on an event loop of its own thread."""
    started, stop = threading.Event(), asyncio.Event()
    found: list[str] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with StatusServer(build_app(world, world.board), "127.0.0.1", 0) as server:
            found.append(server.url)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(10)
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()
