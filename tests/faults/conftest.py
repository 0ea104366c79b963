"""A three-node etcd and three coordinators, shared by the tests of this folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest
from support.clusters.coordinator_processes import Replicas
from support.clusters.etcd_fixture import etcd_processes
from support.clusters.fault_world import Cast, Etcd
from support.network.gates import Network
from support.processes.ranks import Ranks

from shoal_client.local.process import Supervisor

NUM_REPLICAS = 3

_numbers = count(1)


@pytest.fixture(scope="package")
def network() -> Iterator[Network]:
    with Network() as network:
        yield network


@pytest.fixture(scope="package")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with etcd_processes(tmp_path_factory.mktemp("etcd"), num_members=3) as (supervisor, members):
        yield Etcd(supervisor, members)


@pytest.fixture(scope="package")
def replica_pool(
    etcd: Etcd, network: Network, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replicas]:
    with Supervisor(grace_s=1.0) as supervisor:
        directory = tmp_path_factory.mktemp("coordinators")
        yield Replicas(supervisor, directory, network, etcd.endpoints)


@pytest.fixture
def replicas(replica_pool: Replicas) -> Replicas:
    """Three coordinators, one of which leads."""
    return replica_pool.full(NUM_REPLICAS)


@contextmanager
def new_cast(replicas: Replicas) -> Iterator[Cast]:
    """Members of a new job."""
    with Ranks() as ranks, Cast(f"job-{next(_numbers)}", replicas, ranks) as cast:
        yield cast


@pytest.fixture
def cast(replicas: Replicas) -> Iterator[Cast]:
    """Members of a job of the test's own."""
    with new_cast(replicas) as cast:
        yield cast
