"""Shard assignments converge: enough copies, even loads, and no shard on a leaving server."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import (
    JobAssignments,
    ShardAssignment,
    ShardContent,
    exchange_primary,
    in_step,
    promote,
    promote_from_disk,
    without_backup,
)
from shoal_server.core.shards.rebalance import MAX_MOVES, Servers, dropped_holders, rebalance

A, B, C = (Holder(name, "one") for name in "abc")
ROUNDS = 2000


def assignments(*shards: ShardAssignment, copies: int = 2) -> JobAssignments:
    return JobAssignments(job="job", copies=copies, shards=shards)


def carried_out(record: JobAssignments) -> JobAssignments:
    """Return the record after the servers acted: joining ones in step, successors primary."""

    def after(h: ShardAssignment) -> ShardAssignment:
        if h.joining is not None:
            return in_step(h, h.primary, h.joining)
        return exchange_primary(h, h.primary) if h.successor is not None else h

    return replace(record, shards=tuple(map(after, record.shards)))


def converged(record: JobAssignments, servers: Servers, weights: dict[int, int]) -> JobAssignments:
    """Return the record once rebalancing changes nothing any more."""
    for _ in range(ROUNDS):
        wished = rebalance(record, servers, weights)
        moving = sum(h.successor is not None for h in wished.shards)
        if wished == record:
            return record
        for before, after in zip(record.shards, wished.shards, strict=True):
            kept = set(before.backups) | {before.primary}
            assert kept & {after.primary, *after.backups}, "the last copy was removed"
        assert moving <= max(MAX_MOVES, len(servers.leaving) * len(record.shards) + MAX_MOVES)
        record = carried_out(wished)
    raise AssertionError(f"not converged after {ROUNDS} rounds")


def a_record(num_shards: int, primaries: list[Holder], copies: int) -> JobAssignments:
    chosen = [primaries[i % len(primaries)] for i in range(num_shards)]
    return assignments(
        *(ShardAssignment(shard_id=i, epoch=1, primary=p) for i, p in enumerate(chosen)),
        copies=copies,
    )


@pytest.mark.long
@given(
    num_servers=st.integers(1, 6),
    num_leaving=st.integers(0, 3),
    num_first=st.integers(1, 6),
    copies=st.integers(1, 3),
    weights=st.lists(st.integers(1, 50), min_size=1, max_size=60),
)
def test_any_record_converges(
    num_servers: int, num_leaving: int, num_first: int, copies: int, weights: list[int]
) -> None:
    """Rebalancing ends. Each shard then has its copies on servers that stay, and no primary's load
    is above 1.05 times the mean plus the largest shard."""
    present = [Holder(f"ps-{i}", "one") for i in range(num_servers)]
    leaving = frozenset(present[: min(num_leaving, num_servers - 1)])
    servers = Servers(present=frozenset(present), leaving=leaving)
    by_shard = dict(enumerate(weights))
    record = converged(a_record(len(weights), present[:num_first], copies), servers, by_shard)
    staying = servers.staying
    loads: Counter[Holder] = Counter()
    for h in record.shards:
        assert {h.primary, *h.backups} <= staying
        assert 1 + len(h.backups) == min(copies, len(staying))
        assert len({h.primary, *h.backups}) == 1 + len(h.backups)
        loads[h.primary] += by_shard[h.shard_id]
    mean = sum(loads.values()) / len(staying)
    assert max(loads.values()) <= 1.05 * mean + max(weights)


def test_many_small_shards_are_spread_evenly() -> None:
    """The load of each of four servers exceeds the mean by at most 5 %. Then two servers leave, and
    lead no shard."""
    four = [Holder(f"ps-{i}", "one") for i in range(4)]
    weights = dict.fromkeys(range(200), 7)
    record = converged(a_record(200, four[:1], copies=2), Servers(present=frozenset(four)), weights)
    loads = Counter(h.primary for h in record.shards)
    assert max(loads.values()) <= 1.05 * 50
    leaving = frozenset(four[:2])
    record = converged(record, Servers(present=frozenset(four), leaving=leaving), weights)
    assert set(Counter(h.primary for h in record.shards)) == set(four[2:])


def test_a_primary_that_is_gone_is_replaced_by_its_backup() -> None:
    """The coordinator does this if the backup has not made itself primary."""
    record = assignments(ShardAssignment(shard_id=0, epoch=3, primary=A, backups=(B,)))
    (shard,) = rebalance(record, Servers(present=frozenset({B, C})), {}).shards
    assert (shard.primary, shard.epoch, shard.backups) == (B, 4, ())
    assert shard.joining == C


def test_the_only_copy_is_waited_for() -> None:
    """The server of the only copy may be cut off from etcd, and is not known to be dead."""
    record = assignments(ShardAssignment(shard_id=0, epoch=1, primary=A))
    (shard,) = rebalance(record, Servers(present=frozenset({B, C})), {}).shards
    assert (shard.primary, shard.epoch, shard.joining) == (A, 1, B)


def test_a_shard_whose_holders_are_dead_gets_a_new_primary() -> None:
    """Another server leads the shard, and restores or creates it."""
    record = assignments(ShardAssignment(shard_id=0, epoch=1, primary=A, backups=(B,)))
    servers = Servers(present=frozenset({C}), dead=frozenset({A, B}))
    (shard,) = rebalance(record, servers, {}).shards
    assert (shard.primary, shard.epoch, shard.backups) == (C, 2, ())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ShardContent.NONE, ShardContent.NONE),
        (ShardContent.LOADING, ShardContent.LOST),
        (ShardContent.PRESENT, ShardContent.LOST),
        (ShardContent.LOST, ShardContent.LOST),
    ],
)
def test_a_shard_that_had_values_is_lost_and_gets_no_copies(
    before: ShardContent, after: ShardContent
) -> None:
    """A shard that was never created stays without content."""
    record = assignments(ShardAssignment(shard_id=0, epoch=1, primary=A, content=before))
    servers = Servers(present=frozenset({B, C}), dead=frozenset({A}))
    rebalanced = rebalance(record, servers, {})
    assert rebalanced.shards[0].content is after
    if after is ShardContent.LOST:
        assert rebalance(rebalanced, servers, {}) == rebalanced


def test_a_lost_shard_keeps_the_name_of_its_disk() -> None:
    """The server of that disk leads the shard again if it returns."""
    trained = ShardAssignment(
        shard_id=0, epoch=1, primary=A, on_disk="a", content=ShardContent.PRESENT
    )
    servers = Servers(present=frozenset({C}), dead=frozenset({A}))
    (lost,) = rebalance(assignments(trained), servers, {}).shards
    assert (lost.primary, lost.on_disk) == (C, "a")
    again = Holder("a", "again")
    found = promote_from_disk(lost, again, dead=frozenset())
    assert (found.primary, found.epoch, found.content) == (again, 3, ShardContent.PRESENT)


def test_a_disk_that_may_return_is_waited_for() -> None:
    """The servers that held the shard in memory are dead, and one disk has it."""
    record = assignments(ShardAssignment(shard_id=0, epoch=1, primary=A, backups=(B,), on_disk="a"))
    servers = Servers(present=frozenset({C}), dead=frozenset({A, B}), disks=frozenset({"a"}))
    assert rebalance(record, servers, {}).shards[0].primary == A
    (shard,) = rebalance(record, replace(servers, disks=frozenset()), {}).shards
    assert (shard.primary, shard.epoch, shard.on_disk) == (C, 2, "")


def test_a_server_that_its_primary_dropped_gets_no_shards() -> None:
    """A dropped server may be dead without being known to be: another server joins."""
    before = assignments(ShardAssignment(shard_id=0, epoch=1, primary=A, backups=(B,)))
    after = assignments(ShardAssignment(shard_id=0, epoch=1, primary=A))
    suspects = dropped_holders(before, after)
    assert suspects == {B}
    servers = Servers(present=frozenset({A, B, C}), suspects=suspects)
    (shard,) = rebalance(after, servers, {}).shards
    assert shard.joining == C


def test_no_shard_moves_if_all_servers_leave() -> None:
    """The record stays as it is: no server is left to take a shard."""
    record = assignments(ShardAssignment(shard_id=0, epoch=1, primary=A, backups=(B,)))
    everybody = frozenset({A, B})
    assert rebalance(record, Servers(present=everybody, leaving=everybody), {}) == record


def test_changes_of_another_record_change_nothing() -> None:
    """Each change names the holders that it is based on."""
    shard = ShardAssignment(shard_id=0, epoch=5, primary=A, backups=(B,), joining=C)
    assert promote(shard, lost=B, backup=C) == shard
    assert promote(shard, lost=A, backup=C) == shard
    assert in_step(shard, primary=B, joined=C) == shard
    assert in_step(shard, primary=A, joined=B) == shard
    assert without_backup(shard, primary=B, lost=C) == shard
    assert exchange_primary(shard, primary=A) == shard


def test_a_handover_leaves_the_old_primary_as_backup() -> None:
    """The old primary has every update, and stays as backup until the coordinator removes it."""
    shard = ShardAssignment(shard_id=0, epoch=5, primary=A, backups=(B,), successor=B)
    assert exchange_primary(shard, primary=A) == ShardAssignment(
        shard_id=0, epoch=6, primary=B, backups=(A,)
    )
