"""Shards that a server disowns: their records place them on its disk, which does not have them."""

from shoal_server.core.processes import Holder
from shoal_server.core.replication.backing.missing_shards import DiskRemoval
from shoal_server.core.replication.protocol.limits import ReplicationLimits
from shoal_server.core.shards.assignments import ShardAssignment

ME, LAST, OTHER = Holder("a", "2"), Holder("a", "1"), Holder("b", "1")
LIMITS = ReplicationLimits(dead_after_s=10.0, longest_gap_s=2.0)
NONE: frozenset[Holder] = frozenset()


def missing(primary: Holder) -> ShardAssignment:
    return ShardAssignment(shard_id=0, epoch=3, primary=primary, on_disk="a", disk_version=7)


def is_disowned(
    primary: Holder,
    *,
    ended: frozenset[Holder] = NONE,
    present: frozenset[Holder] = NONE,
    for_s: float = 0.0,
    each_s: float = 1.0,
) -> bool:
    """True if the server disowns the shard after it has listed the servers for this long."""
    disowning = DiskRemoval(ME, LIMITS)
    record = missing(primary)
    now_s = 0.0
    while now_s <= for_s:
        disowning.note_servers([record], present, ended, asked_s=now_s, now_s=now_s)
        now_s += each_s
    return disowning.wanted_record(record).on_disk == ""


def test_a_shard_with_another_server_as_primary_is_disowned_at_once() -> None:
    assert is_disowned(OTHER)


def test_a_shard_with_this_process_as_primary_is_not_disowned() -> None:
    """The process has yet to write the shard to its disk."""
    assert not is_disowned(ME, for_s=3 * LIMITS.dead_after_s)


def test_a_shard_of_the_last_process_is_not_disowned_while_that_may_live() -> None:
    assert not is_disowned(LAST)
    assert not is_disowned(LAST, for_s=LIMITS.dead_after_s - 1.0)
    assert not is_disowned(LAST, for_s=3 * LIMITS.dead_after_s, present=frozenset({LAST}))


def test_a_shard_of_the_last_process_is_disowned_once_that_has_ended() -> None:
    assert is_disowned(LAST, ended=frozenset({LAST}))


def test_a_shard_of_the_last_process_is_disowned_after_a_long_absence() -> None:
    """The last process may have ended on another machine, without a report: it counts as ended once
    it was absent for `dead_after_s`."""
    assert is_disowned(LAST, for_s=LIMITS.dead_after_s)


def test_an_absence_is_not_counted_over_gaps_between_listings() -> None:
    assert not is_disowned(LAST, for_s=3 * LIMITS.dead_after_s, each_s=LIMITS.longest_gap_s + 1.0)
