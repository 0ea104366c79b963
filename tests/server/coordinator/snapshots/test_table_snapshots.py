"""Snapshots of tables under load: they have whole pushes, and are restored on other servers."""

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from history.row_replay import compare, everything
from history.rows import RowClient, RowHistory, RowWork, RowWorker
from support.clusters.parameter_servers import ParameterServers
from support.clusters.snapshot_cluster import start
from support.models.table_specs import OPTIMIZERS
from support.processes.served_process import awaited

from shoal_proto.v1.tables_pb2 import Admission, Initialiser, TableSpec

TABLE = TableSpec(
    name="users",
    dim=3,
    dtype="float32",
    seed=5,
    initialiser=Initialiser(kind="normal", spread=1.0),
    optimizer=OPTIMIZERS["adam"],
    admission=Admission(kind="count", min_pushes=2),
    num_shards=6,
)
NUM_IDS, NUM_WORKERS, LIMIT_S = 60, 3, 30.0


def client(servers: ParameterServers, work: RowWork, name: str) -> RowClient:
    token = servers.admit(name)
    return RowClient(work, name, lambda: token)


def workers(servers: ParameterServers, work: RowWork, prefix: str) -> list[RowWorker]:
    names = [f"{prefix}-{number}" for number in range(NUM_WORKERS)]
    return [
        RowWorker(work, name, seed=1, connect=partial(client, servers, work, name)).start()
        for name in names
    ]


def wait_for_more(crew: list[RowWorker], num_pushes: int) -> None:
    """Wait until each worker has made so many more pushes. Raises the error of a failed worker."""
    for worker in crew:
        wanted = len(worker.successes) + num_pushes

        def is_there(worker: RowWorker = worker, wanted: int = wanted) -> bool:
            return len(worker.successes) >= wanted or not worker.runs

        awaited(is_there, LIMIT_S, f"{worker.name} pushes")
        if not worker.runs:
            worker.stop()


def cut(history: RowHistory, versions: dict[tuple[str, int], int]) -> RowHistory:
    """Return the pushes up to these versions. Raises AssertionError if some shards lack one."""
    found: dict[tuple[str, int], set[bool]] = defaultdict(set)
    kept = RowHistory()
    for where, pushes in history.pushed.items():
        for pushed in pushes:
            is_in = pushed.version <= versions[where]
            found[pushed.session, pushed.sequence].add(is_in)
            if is_in:
                kept.pushed.setdefault(where, []).append(pushed)
    torn = [push for push, sides in found.items() if len(sides) > 1]
    assert not torn, f"{torn} are in the snapshot in part"
    assert set(map(frozenset, found.values())) == {frozenset({True}), frozenset({False})}
    return kept


@pytest.mark.sampled()
@pytest.mark.parametrize("num_servers", [1, 3])
def test_a_table_under_load_is_restored_on_other_servers(
    opened: ExitStack, tmp_path: Path, num_servers: int
) -> None:
    """The snapshot has each push on all of its shards or on none, and the restored table is the
    serial replay of these pushes. It remains so when pushes continue, which needs the optimizer's
    state and the counts of ids that are not admitted yet."""
    servers, snapshots = start(opened, tmp_path, num_servers=2)
    work = RowWork(coordinators=[servers.coordinator], job="job", table=TABLE, num_ids=NUM_IDS)
    crew = workers(servers, work, "before")
    try:
        wait_for_more(crew, 4)
        snapshots.take()
        wait_for_more(crew, 4)
    finally:
        for worker in crew:
            worker.stop()
    others, other_snapshots = start(opened, tmp_path, num_servers)
    other_snapshots.restore()
    restored = replace(work, coordinators=[others.coordinator], history=RowHistory())
    reader = client(others, restored, "reader")
    opened.callback(reader.close)
    back = everything(reader, restored)
    versions = {where: found.version for where, found in back.items()}
    restored.history.pushed.update(cut(work.history, versions).pushed)
    num_before = compare(restored, back)
    crew = workers(others, restored, "after")
    try:
        wait_for_more(crew, 4)
    finally:
        for worker in crew:
            worker.stop()
    assert compare(restored, everything(reader, restored)) > num_before > 0
