"""Servers, coordinator and etcd fail at random: exactly the acknowledged updates survive."""

import itertools
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from history import faults
from history.campaign import Campaign, campaign, history_of, judge
from history.workers import OPTIMIZERS, Work
from support.clusters.parameter_cluster import ParameterCluster
from support.network.gates import Network
from support.network.namespaces import RoutedHosts, why_unavailable

NUM_SERVERS, NUM_WORKERS = 3, 3
NUM_KILLS = 30
NUM_FIRST_KILLS = 4
"""Kills in `make test`."""
NUM_NIGHTLY_KILLS = 1000
HANG_UP_RATE = 0.3
SEED = 1
KINDS = list(OPTIMIZERS)

_jobs = itertools.count(1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParameterCluster]:
    with ParameterCluster(tmp_path_factory.mktemp("cluster"), NUM_SERVERS) as cluster:
        yield cluster


@pytest.fixture
def wired(tmp_path: Path, network: Network) -> Iterator[ParameterCluster]:
    """Servers that can be cut off from all other processes."""
    with ParameterCluster(tmp_path, NUM_SERVERS, network) as cluster:
        yield cluster


def new_work(cluster: ParameterCluster, kind: str, directory: Path) -> Work:
    return Work(
        coordinators=[cluster.coordinator.grpc],
        job=f"{kind}-{next(_jobs)}",
        optimizer=OPTIMIZERS[kind],
        directory=directory / "journals",
    )


def settled(run: Campaign) -> None:
    """Wait until all servers serve and all shards have their copies. Then, at random, end a
    worker's session in the middle of a push."""
    run.cluster.await_ready()
    run.await_in_step()
    if run.rng.random() < HANG_UP_RATE:
        run.rng.choice(run.workers).hang_up()


def assert_nothing_lost(run: Campaign) -> None:
    assert isinstance(run.work, Work)
    report = judge(run.work)
    context = f"seed {run.seed}, {run.work.directory}: {report}\n{history_of(run, report)}"
    assert not report.faults, context
    assert report.num_acknowledged > 0
    # The comparison of copies may have logged a difference that no worker saw.
    assert not any("copy_differs" in line for line in run.cluster.log_lines_about(run.work.job)), (
        context
    )


def kill_servers(cluster: ParameterCluster, kind: str, directory: Path, num_kills: int) -> None:
    work = new_work(cluster, kind, directory)
    with campaign(cluster, work, SEED, NUM_WORKERS) as run:
        for _ in range(num_kills):
            settled(run)
            run.kill_one()
    assert_nothing_lost(run)


@pytest.mark.long
def test_a_few_killed_servers_lose_no_update(cluster: ParameterCluster, tmp_path: Path) -> None:
    """The campaign has one optimizer and few kills."""
    kill_servers(cluster, KINDS[0], tmp_path, NUM_FIRST_KILLS)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [KINDS[0], *(pytest.param(each, marks=pytest.mark.nightly) for each in KINDS[1:])]
)
def test_killed_servers_lose_no_push(cluster: ParameterCluster, kind: str, tmp_path: Path) -> None:
    """30 kills of primaries under load, divided among the optimizers: each acknowledged push is
    applied exactly once, and the values are equal to the last bit."""
    kill_servers(cluster, kind, tmp_path, NUM_KILLS // len(KINDS))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_kills_lose_no_update(
    cluster: ParameterCluster, kind: str, tmp_path: Path
) -> None:
    """The campaign has every optimizer, and a thousand kills in all."""
    kill_servers(cluster, kind, tmp_path, NUM_NIGHTLY_KILLS // len(KINDS))


@contextmanager
def _halted(run: Campaign) -> Iterator[None]:
    """Halt a primary for a time."""
    victim = run.victim()
    victim.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        victim.send_signal(signal.SIGCONT)


@contextmanager
def _cut_off(run: Campaign) -> Iterator[None]:
    """Cut a primary off from all other processes, etcd included."""
    victim = run.victim()
    victim.cut_off()
    try:
        yield
    finally:
        victim.restore()


@contextmanager
def _coordinator_killed(run: Campaign) -> Iterator[None]:
    run.cluster.kill_coordinator()
    yield
    run.cluster.coordinator.ready()


@contextmanager
def _etcd_killed(run: Campaign) -> Iterator[None]:
    run.cluster.kill_etcd()
    yield


@contextmanager
def _killed_without_etcd(run: Campaign) -> Iterator[None]:
    """Kill a primary while etcd cannot record a successor."""
    victim = run.victim()
    run.cluster.signal_etcd(signal.SIGSTOP)
    try:
        victim.kill()
        run.cluster.start(victim.server_id)
    finally:
        run.cluster.signal_etcd(signal.SIGCONT)
    yield


FAULTS: list[Callable[[Campaign], AbstractContextManager[None]]] = [
    _halted,
    _cut_off,
    _coordinator_killed,
    _etcd_killed,
    _killed_without_etcd,
]


def strike(cluster: ParameterCluster, kind: str, directory: Path, seed: int) -> None:
    """Apply each fault once, in an order drawn by the seed, until a push of every worker
    succeeds."""
    work = new_work(cluster, kind, directory)
    with campaign(cluster, work, seed, NUM_WORKERS) as run:
        for fault in run.rng.sample(FAULTS, len(FAULTS)):
            settled(run)
            with fault(run):
                run.await_all_succeed()
    assert_nothing_lost(run)


@pytest.mark.long
def test_moves_lose_no_update(cluster: ParameterCluster, tmp_path: Path) -> None:
    """A new server gets shards; one that gets SIGTERM hands its own over first."""
    work = new_work(cluster, "adam", tmp_path)
    with campaign(cluster, work, SEED, NUM_WORKERS) as run:
        run.await_spread()
        cluster.start(f"ps-{len(cluster.servers)}")
        cluster.await_ready()
        run.await_spread()
        cluster.dismiss(run.victim())
        run.await_spread()
    assert_nothing_lost(run)


@pytest.mark.long
def test_no_other_fault_loses_an_update(wired: ParameterCluster, tmp_path: Path) -> None:
    """Servers that were halted or cut off are deposed, and change nothing when they are back."""
    strike(wired, "adam", tmp_path, SEED)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_no_order_of_faults_loses_an_update(
    wired: ParameterCluster, kind: str, seed: int, tmp_path: Path
) -> None:
    strike(wired, kind, tmp_path, seed)


@pytest.fixture
def hosts() -> Iterator[RoutedHosts]:
    if why := why_unavailable():
        pytest.skip(why)
    with RoutedHosts() as hosts:
        yield hosts


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(4))
def test_no_partition_pause_or_outage_loses_an_update(
    hosts: RoutedHosts, seed: int, tmp_path: Path
) -> None:
    """The campaign has each kind of fault once, its length and the order drawn by the seed: servers
    cut off from etcd, from each other or from workers, several servers halted, etcd down."""
    with ParameterCluster(tmp_path, NUM_SERVERS, hosts=hosts) as cluster:
        work = new_work(cluster, KINDS[seed % len(KINDS)], tmp_path)
        with campaign(cluster, work, seed, NUM_WORKERS) as run:
            run.await_spread()
            for fault in faults.plan(list(faults.Kind), len(faults.Kind), run.rng):
                faults.strike(run, hosts, fault)
        assert_nothing_lost(run)
