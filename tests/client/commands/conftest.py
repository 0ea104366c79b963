"""Fixtures: a status endpoint with one job, for commands that read it."""

from collections.abc import Iterator

import pytest
from support.clusters import status_world
from support.clusters.status_world import World


@pytest.fixture
def world() -> World:
    world = World()
    world.put(status_world.job())
    return world


@pytest.fixture
def url(world: World) -> Iterator[str]:
    """Serve the endpoint in a thread of its own, and yield its URL."""
    with status_world.endpoint(world) as server:
        yield server.url
