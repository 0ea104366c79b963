"""Servers that a coordinator gives no shards for a while."""

from dataclasses import replace

from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import (
    JobAssignments,
    ShardAssignment,
    promoted,
    without_backup,
)
from shoal_server.core.shards.rebalance import Servers
from shoal_server.core.shards.sightings import Sightings

A, B, C = Holder("a", "1"), Holder("b", "1"), Holder("c", "1")
ALL = Servers(present=frozenset({A, B, C}))


def job(*shards: ShardAssignment) -> JobAssignments:
    return JobAssignments(job="job", copies=2, shards=shards)


def suspects(sightings: Sightings, assignments: JobAssignments, now_s: float) -> set[Holder]:
    return set(sightings.judged(assignments, ALL, asked_s=now_s, now_s=now_s).suspects)


def test_who_was_gone_on_without_is_given_nothing_while_the_coordinator_writes() -> None:
    """A server that died is listed until its lease ends; the change by which others dropped it may
    be read together with the coordinator's own write."""
    first = ShardAssignment(shard_id=0, epoch=1, primary=A, backups=(B,))
    second = ShardAssignment(shard_id=1, epoch=1, primary=B, backups=(A,))
    sightings = Sightings(300.0, 4.0)
    before = job(first, second)
    assert suspects(sightings, before, 0.0) == set()
    wished = job(first, replace(second, joining=C))
    stands = job(promoted(first, A, B), replace(second, joining=C))
    sightings.wrote(wished, stands)
    assert suspects(sightings, stands, 0.1) == {A}


def test_whom_the_coordinator_let_go_of_is_no_suspect() -> None:
    shard = ShardAssignment(shard_id=0, epoch=1, primary=A, backups=(B, C))
    sightings = Sightings(300.0, 4.0)
    suspects(sightings, job(shard), 0.0)
    relieved = job(without_backup(shard, A, C))
    sightings.wrote(relieved, relieved)
    assert suspects(sightings, relieved, 0.1) == set()
