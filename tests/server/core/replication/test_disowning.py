"""Shards that a server disowns: records place them on its disk, and they are not there."""

from shoal_server.core.processes import Holder
from shoal_server.core.replication.backing.disowning import Disowning
from shoal_server.core.replication.protocol.limits import ReplicationLimits
from shoal_server.core.shards.assignments import ShardAssignment

ME, LAST, OTHER = Holder("a", "2"), Holder("a", "1"), Holder("b", "1")
LIMITS = ReplicationLimits(dead_after_s=10.0, longest_gap_s=2.0)
NOBODY: frozenset[Holder] = frozenset()


def missing(primary: Holder) -> ShardAssignment:
    return ShardAssignment(shard_id=0, epoch=3, primary=primary, on_disk="a", disk_version=7)


def is_disowned(
    primary: Holder,
    *,
    ended: frozenset[Holder] = NOBODY,
    present: frozenset[Holder] = NOBODY,
    for_s: float = 0.0,
    each_s: float = 1.0,
) -> bool:
    """True if the server disowns the shard after looking at the servers for so long."""
    disowning = Disowning(ME, LIMITS)
    record = missing(primary)
    now_s = 0.0
    while now_s <= for_s:
        disowning.seen([record], present, ended, asked_s=now_s, now_s=now_s)
        now_s += each_s
    return disowning.revised(record).on_disk == ""


def test_what_another_server_leads_is_disowned_at_once() -> None:
    assert is_disowned(OTHER)


def test_what_this_very_process_leads_it_does_not_disown() -> None:
    """The process is about to write the shard to its disk, or it fails."""
    assert not is_disowned(ME, for_s=3 * LIMITS.dead_after_s)


def test_what_the_last_process_leads_is_its_own_while_it_may_live() -> None:
    assert not is_disowned(LAST)
    assert not is_disowned(LAST, for_s=LIMITS.dead_after_s - 1.0)
    assert not is_disowned(LAST, for_s=3 * LIMITS.dead_after_s, present=frozenset({LAST}))


def test_what_the_last_process_leads_is_disowned_once_that_is_known_to_have_ended() -> None:
    assert is_disowned(LAST, ended=frozenset({LAST}))


def test_what_the_last_process_leads_is_disowned_once_that_is_gone_for_long() -> None:
    """The process ended on another machine, and nobody reported its end."""
    assert is_disowned(LAST, for_s=LIMITS.dead_after_s)


def test_an_absence_does_not_go_on_while_nobody_looks() -> None:
    assert not is_disowned(LAST, for_s=3 * LIMITS.dead_after_s, each_s=LIMITS.longest_gap_s + 1.0)
