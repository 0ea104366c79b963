"""Servers with tables are killed, started and drained: rows equal the serial replay of the answered
pushes."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from history.campaign import row_campaign
from history.row_replay import check
from history.rows import RowWork
from support.clusters.parameter_cluster import ParameterCluster
from support.models.table_specs import OPTIMIZERS

from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_proto.v1.tables_pb2 import Admission, Initialiser, TableSpec

NUM_SERVERS, NUM_WORKERS = 3, 3
NUM_SHARDS, NUM_IDS, DIM = 6, 80, 5
NUM_KILLS = 4
NUM_NIGHTLY_KILLS = 100
SEED = 1
KINDS = ["adagrad", "adam"]

_jobs = itertools.count(1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParameterCluster]:
    with ParameterCluster(tmp_path_factory.mktemp("cluster"), NUM_SERVERS) as cluster:
        yield cluster


def new_work(
    cluster: ParameterCluster,
    kind: str,
    level: Acknowledgement.ValueType = Acknowledgement.ACKNOWLEDGEMENT_DEFAULT,
) -> RowWork:
    table = TableSpec(
        name="clicks",
        dim=DIM,
        dtype="float32",
        seed=11,
        initialiser=Initialiser(kind="normal", spread=1.0),
        optimizer=OPTIMIZERS[kind],
        # An id gets its row with its third push: the counts before it must not be lost either.
        admission=Admission(kind="count", min_pushes=3),
        num_shards=NUM_SHARDS,
    )
    return RowWork(
        coordinators=[cluster.coordinator.grpc],
        job=f"{kind}-{next(_jobs)}",
        table=table,
        num_ids=NUM_IDS,
        level=level,
    )


def kill_servers(cluster: ParameterCluster, kind: str, num_kills: int) -> None:
    work = new_work(cluster, kind)
    with row_campaign(cluster, work, SEED, NUM_WORKERS) as run:
        for _ in range(num_kills):
            cluster.await_ready()
            run.await_in_step()
            run.kill_one()
    assert check(work) > num_kills


@pytest.mark.sampled()
@pytest.mark.parametrize("kind", KINDS)
def test_killed_primaries_lose_no_row(cluster: ParameterCluster, kind: str) -> None:
    """The answers that each worker got, the rows that it saw and the final rows are those of one
    shard that got the same pushes in turn, although primaries are killed under pushes."""
    kill_servers(cluster, kind, NUM_KILLS // len(KINDS))


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_kills_lose_no_row(cluster: ParameterCluster, kind: str) -> None:
    """A campaign with a hundred kills has the result of one shard as well."""
    kill_servers(cluster, kind, NUM_NIGHTLY_KILLS // len(KINDS))


@pytest.mark.long
def test_moves_lose_no_row(cluster: ParameterCluster) -> None:
    """A new server gets shards; one that gets SIGTERM hands its own over first. The state of each
    row's optimizer moves with the row, as later pushes show."""
    work = new_work(cluster, "adam")
    with row_campaign(cluster, work, SEED, NUM_WORKERS) as run:
        run.await_spread()
        cluster.start(f"ps-{len(cluster.servers)}")
        cluster.await_ready()
        run.await_spread()
        run.await_all_succeed()
        cluster.dismiss(run.victim())
        run.await_spread()
    assert check(work) > 0


@pytest.mark.long
def test_a_job_right_after_a_kill_is_placed_on_living_servers(tmp_path: Path) -> None:
    """The lease of the killed server has not expired yet."""
    with ParameterCluster(tmp_path, 2) as cluster:
        cluster["ps-0"].kill()
        work = new_work(cluster, "adagrad")
        with row_campaign(cluster, work, SEED, NUM_WORKERS) as run:
            run.await_all_succeed()
        assert {server.server_id for server in cluster.primaries(work.job)} == {"ps-1"}
        assert check(work) > 0


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("num_servers", "coming_back"),
    [(1, "at once"), (2, "at once"), (2, "one by one"), (2, "late")],
)
def test_servers_killed_at_once_have_every_durable_row(
    tmp_path: Path, num_servers: int, coming_back: str
) -> None:
    """A push in progress is applied once. Leases end one by one, and a shard may be assigned to a
    dead backup: the server whose journal has the shard is awaited, and the shard does not start
    over."""
    with ParameterCluster(tmp_path, num_servers, with_journals=True) as cluster:
        work = new_work(cluster, "adam", Acknowledgement.ACKNOWLEDGEMENT_DURABLE)
        with row_campaign(cluster, work, SEED, NUM_WORKERS) as run:
            run.await_in_step()
            run.await_all_succeed()
            cluster.kill_all()
            if coming_back == "late":
                cluster.await_unlisted()
            for server_id in cluster.servers:
                cluster.start(server_id)
                if coming_back == "one by one":
                    cluster.await_ready()
            cluster.await_ready()
            run.await_all_succeed()
        assert check(work, all_sightings=False) > 0


@pytest.mark.long
def test_a_leaving_server_leaves_every_durable_row_on_a_disk(tmp_path: Path) -> None:
    """The shards of a leaving server are in the other server's journal before the leaving one ends:
    the other one may be killed at once."""
    with ParameterCluster(tmp_path, 2, with_journals=True) as cluster:
        work = new_work(cluster, "adam", Acknowledgement.ACKNOWLEDGEMENT_DURABLE)
        with row_campaign(cluster, work, SEED, NUM_WORKERS) as run:
            run.await_spread()
            run.await_all_succeed()
            leaver = run.victim()
            (stayer,) = (server for server in cluster.present if server is not leaver)
            cluster.dismiss(leaver)
            stayer.kill()
            cluster.start(stayer.server_id)
            cluster.await_ready()
            run.await_all_succeed()
        assert check(work, all_sightings=False) > 0
