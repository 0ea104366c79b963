"""Snapshots contain a step that pushes to parameters and to a table as a whole, or not at all."""

import threading
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from history.events import Gradients
from history.joint_steps import LR, PARAMETERS, StepClient, StepWork, compare_parameters, cut
from history.row_replay import compare, everything
from history.rows import RowWorker
from support.clusters.parameter_servers import ParameterServers
from support.clusters.snapshot_cluster import start
from support.models.table_specs import OPTIMIZERS
from support.processes.served_process import awaited

from shoal_client.shards.layouts import of_tables
from shoal_proto.errors import SnapshotFailed, Unavailable
from shoal_proto.incarnation import public_id
from shoal_proto.v1.shards_pb2 import ShardMap
from shoal_proto.v1.tables_pb2 import Initialiser, TableSpec
from shoal_server.etcd.records import assignments
from shoal_server.snapshots.manifest import Manifest

TABLE = TableSpec(
    name="users",
    dim=3,
    dtype="float32",
    seed=5,
    initialiser=Initialiser(kind="normal", spread=1.0),
    optimizer=OPTIMIZERS["adam"],
    num_shards=6,
)
NUM_IDS, NUM_WORKERS, NUM_SNAPSHOTS, LIMIT_S = 40, 3, 4, 60.0


def work_on(servers: ParameterServers) -> StepWork:
    return StepWork(
        coordinators=[servers.coordinator],
        job="job",
        table=TABLE,
        num_ids=NUM_IDS,
        parameters=PARAMETERS,
    )


def client(servers: ParameterServers, work: StepWork, name: str) -> StepClient:
    token = servers.admit(name)
    return StepClient(work, name, lambda: token)


class Crew:
    """Members that take one step after another, each on a thread of its own."""

    def __init__(self, servers: ParameterServers, work: StepWork, prefix: str) -> None:
        names = [f"{prefix}-{number}" for number in range(NUM_WORKERS)]
        self._workers = [
            RowWorker(work, name, seed=1, connect=partial(client, servers, work, name))
            for name in names
        ]

    def __enter__(self) -> "Crew":
        for worker in self._workers:
            worker.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._workers:
            worker.stop()

    def wait_for_more(self, num_steps: int) -> None:
        """Wait until each member has taken so many more steps. Raises a failed member's error."""
        for worker in self._workers:
            wanted = len(worker.successes) + num_steps

            def is_there(worker: RowWorker = worker, wanted: int = wanted) -> bool:
                return len(worker.successes) >= wanted or not worker.runs

            awaited(is_there, LIMIT_S, f"{worker.name} takes steps")
            if not worker.runs:
                worker.stop()


def cut_of(work: StepWork, manifest: Manifest) -> tuple[StepWork, int]:
    assert manifest.partial_steps == []
    layout = ShardMap.FromString(manifest.layout)
    return cut(work, layout, {part.shard_id: part.version for part in manifest.parts})


@pytest.mark.long
def test_steps_of_parameters_and_rows_are_restored_whole_on_other_servers(
    opened: ExitStack, tmp_path: Path
) -> None:
    """Values and rows are a serial replay of whole steps, and remain so when steps continue."""
    servers, snapshots = start(opened, tmp_path, num_servers=2)
    work = work_on(servers)
    with Crew(servers, work, "before") as crew:
        for _ in range(NUM_SNAPSHOTS):
            crew.wait_for_more(1)
            snapshots.take()
        crew.wait_for_more(1)
    taken = [cut_of(work, manifest) for manifest in snapshots.library.list()]
    assert len(taken) == NUM_SNAPSHOTS and taken[-1][1] >= NUM_SNAPSHOTS * NUM_WORKERS
    others, other_snapshots = start(opened, tmp_path, num_servers=3)
    other_snapshots.restore()
    kept, _ = taken[-1]
    restored = StepWork(**{**vars(kept), "coordinators": [others.coordinator]})
    reader = client(others, restored, "reader")
    opened.callback(reader.close)
    compare_all(restored, reader)
    with Crew(others, restored, "after") as crew:
        crew.wait_for_more(2)
    compare_all(restored, reader)


def compare_all(work: StepWork, reader: StepClient) -> None:
    compare(work, everything(reader, work))
    dense = [shard for shard in reader.layout.shards if not shard.table]
    compare_parameters(work, dense, reader.parameters())


@pytest.mark.long
def test_snapshots_have_whole_steps_while_servers_change(opened: ExitStack, tmp_path: Path) -> None:
    """A snapshot may fail meanwhile, but one that is listed is whole."""
    servers, snapshots = start(opened, tmp_path, num_servers=3)
    work = work_on(servers)
    with Crew(servers, work, "m") as crew:
        crew.wait_for_more(1)
        for change in (lambda: servers.stop("ps-1"), lambda: servers.add("ps-3"), lambda: None):
            changing = threading.Thread(target=change)
            changing.start()
            with suppress(SnapshotFailed, Unavailable):
                snapshots.take()
            changing.join()
            crew.wait_for_more(2)
            with suppress(SnapshotFailed, Unavailable):
                snapshots.take()
        crew.wait_for_more(1)
    manifests = snapshots.library.list()
    assert manifests
    for manifest in manifests:
        cut_of(work, manifest)


@pytest.mark.sampled()
@pytest.mark.parametrize("begins_with", ["rows", "parameters"])
def test_a_step_made_in_part_is_known_to_later_holders_of_its_shards(
    opened: ExitStack, tmp_path: Path, begins_with: str
) -> None:
    """The servers that received the first half are gone, and so is the member. The server that now
    has their shards knows that the other half is missing."""
    servers, snapshots = start(opened, tmp_path, num_servers=2)
    work = work_on(servers)
    member = client(servers, work, "m")
    opened.callback(member.close)
    where = next(
        where
        for where, shard in sorted(of_tables(member.layout).items())
        if shard.server_id == "ps-1"
    )
    parts = member.drawn(range(NUM_IDS), np.random.default_rng(0))
    rows = {where: parts[where]}
    ids = [of_tables(member.layout)[where].shard_id]
    step = member.joint_step(ids)
    if begins_with == "rows":
        member.push_rows(rows, step)
    else:
        member.push_parameters(Gradients(seed=1, lr=LR), step)
    servers.stop("ps-1")
    servers.add("ps-2")
    await_everything_on(servers, "ps-2", with_copies=True)
    servers.stop("ps-0")
    await_everything_on(servers, "ps-2")
    servers.expel("m")
    manifest = snapshots.take().manifest
    assert manifest.partial_steps == [
        f"push 1 of /shoal/v1/members/job/m#{public_id('one')} lacks parts at ps-2"
    ]


def await_everything_on(
    servers: ParameterServers, server_id: str, *, with_copies: bool = False
) -> None:
    """Wait until the server is primary of every shard; with `with_copies`, primary or backup."""

    def is_there() -> bool:
        entry = servers.run(assignments.read(servers.store, "job"))
        assert entry is not None
        return all(
            server_id
            in [h.server_id for h in (each.primary, *(each.backups if with_copies else ()))]
            for each in entry.assignments.shards
        )

    awaited(is_there, LIMIT_S, f"{server_id} has every shard")
