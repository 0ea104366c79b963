"""Changes of primaries, and how they are reported: as shards that moved, or as a lost server."""

from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import (
    JobAssignments,
    ShardAssignment,
    exchange_primary,
    promote,
)
from shoal_server.core.shards.moves import changes_between, moved

A, B, C = (Holder(server_id=f"ps-{n}", incarnation=f"i{n}") for n in range(3))
LED_BY_A = ShardAssignment(shard_id=0, epoch=3, primary=A, backups=(B,))
TO_B = ShardAssignment(shard_id=0, epoch=3, primary=A, backups=(B,), successor=B)


def job(shard: ShardAssignment) -> JobAssignments:
    return JobAssignments(job="j", copies=2, shards=(shard,))


def test_a_backup_that_takes_over_means_a_lost_server() -> None:
    before, after = job(LED_BY_A), job(promote(LED_BY_A, A, B))
    for present in ({A, B}, {B}):
        assert changes_between(before, after, present) == [
            (
                "server_lost",
                "lost ps-0: ps-1 leads 1 shard in its place, with every update that was"
                " acknowledged as replicated (as durable, if recovered from a journal)",
            )
        ]
        assert not moved(before, after, present)


def test_a_handover_is_a_move() -> None:
    before, after = job(TO_B), job(exchange_primary(TO_B, A))
    assert changes_between(before, after, {A, B}) == []
    assert moved(before, after, {A, B}) == {("ps-0", "ps-1"): 1}


def test_a_handover_is_a_move_if_the_first_server_keeps_no_copy() -> None:
    """The handover and the removal of the first server's copy may be read as one change."""
    after = ShardAssignment(shard_id=0, epoch=4, primary=B, backups=(C,))
    assert moved(job(TO_B), job(after), {A, B, C}) == {("ps-0", "ps-1"): 1}


def test_a_server_that_ends_before_its_handover_is_lost() -> None:
    after = job(promote(TO_B, A, B))
    assert not moved(job(TO_B), after, {B})
    assert [kind for kind, _ in changes_between(job(TO_B), after, {B})] == ["server_lost"]
