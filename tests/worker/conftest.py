"""A cluster of real processes, shared by the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """etcd, a coordinator and a parameter server."""
    directory: Path = tmp_path_factory.mktemp("cluster")
    config = LocalClusterConfig(directory=directory, num_parameter_servers=1)
    with LocalCluster(config) as running:
        yield running
