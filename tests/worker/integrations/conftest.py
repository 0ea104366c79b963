"""Fixtures of a session, and of libraries that keep state in the process."""

from collections.abc import Iterator

import pytest

import shoal
from shoal_client.local.cluster import LocalCluster


@pytest.fixture
def session(cluster: LocalCluster) -> Iterator[shoal.Session]:
    from support.members.thread_members import lone  # noqa: PLC0415 - few files need it

    with lone(cluster) as joined:
        yield joined


@pytest.fixture
def fresh_accelerators() -> Iterator[None]:
    """Reset the state that all Accelerators of a process share."""
    from accelerate.state import AcceleratorState  # noqa: PLC0415 - only two files need it

    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)
