"""Suspects: servers that a coordinator gives no shards for a time."""

from dataclasses import replace

from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import (
    JobAssignments,
    ShardAssignment,
    promote,
    without_backup,
)
from shoal_server.core.shards.observed_servers import ObservedServers
from shoal_server.core.shards.rebalance import Servers

A, B, C = Holder("a", "1"), Holder("b", "1"), Holder("c", "1")
ALL = Servers(present=frozenset({A, B, C}))


def job(*shards: ShardAssignment) -> JobAssignments:
    return JobAssignments(job="job", copies=2, shards=shards)


def suspects(sightings: ObservedServers, assignments: JobAssignments, now_s: float) -> set[Holder]:
    return set(sightings.judged(assignments, ALL, asked_s=now_s, now_s=now_s).suspects)


def test_a_server_that_a_backup_replaced_is_a_suspect_despite_a_write() -> None:
    """A dead server is listed until its lease ends. The takeover by its backup may be read together
    with the coordinator's own write."""
    first = ShardAssignment(shard_id=0, epoch=1, primary=A, backups=(B,))
    second = ShardAssignment(shard_id=1, epoch=1, primary=B, backups=(A,))
    sightings = ObservedServers(300.0, 4.0)
    before = job(first, second)
    assert suspects(sightings, before, 0.0) == set()
    wished = job(first, replace(second, joining=C))
    stands = job(promote(first, A, B), replace(second, joining=C))
    sightings.note_written(wished, stands)
    assert suspects(sightings, stands, 0.1) == {A}


def test_a_backup_that_the_coordinator_removed_is_no_suspect() -> None:
    shard = ShardAssignment(shard_id=0, epoch=1, primary=A, backups=(B, C))
    sightings = ObservedServers(300.0, 4.0)
    suspects(sightings, job(shard), 0.0)
    relieved = job(without_backup(shard, A, C))
    sightings.note_written(relieved, relieved)
    assert suspects(sightings, relieved, 0.1) == set()


def test_no_server_is_suspect_after_the_job_was_placed_anew() -> None:
    """The new run has another number of shards, and is read right after a write to the last run."""
    first = ShardAssignment(shard_id=0, epoch=1, primary=A, backups=(B,))
    second = ShardAssignment(shard_id=1, epoch=1, primary=B, backups=(A,))
    sightings = ObservedServers(300.0, 4.0)
    before = replace(job(first, second), placement_id="one")
    suspects(sightings, before, 0.0)
    stands = replace(job(replace(first, primary=C)), placement_id="two")
    sightings.note_written(before, stands)
    assert suspects(sightings, stands, 0.1) == set()
