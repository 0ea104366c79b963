"""A cluster of real processes, shared by the tests of this folder."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes.load import unhurried
from support.training.pause_bodies import LIMITS

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig


@pytest.fixture(autouse=True)
def _sigterm_as_by_default() -> Iterator[None]:
    """A session installs its handler only where the process has none, and one that is not closed
    leaves it behind."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster of etcd, a coordinator and a parameter server."""
    directory: Path = tmp_path_factory.mktemp("cluster")
    # A member is lost after four heartbeat periods: on a busy machine a living one may be silent
    # for seconds.
    limits = {"--heartbeat-s": min(3.0, unhurried(0.5))}
    config = LocalClusterConfig(directory=directory, num_parameter_servers=1, limits=limits)
    with LocalCluster(config) as running:
        yield running


@pytest.fixture(scope="session")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster with short limits: a collective counts as hung after 5 s, a bring-up without
    progress after 9 s."""
    directory = tmp_path_factory.mktemp("quick")
    config = LocalClusterConfig(directory=directory, num_parameter_servers=0, limits=LIMITS)
    with LocalCluster(config) as running:
        yield running
