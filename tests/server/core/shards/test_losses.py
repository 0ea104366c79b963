"""What is kept of a shard that nobody has any more, and how it is given up."""

from dataclasses import replace

import pytest

from shoal_server.core.shards import losses
from shoal_server.core.shards.assignments import (
    AcceptedLoss,
    Holder,
    JobAssignments,
    ShardAssignment,
    ShardContent,
    ShardLoss,
    led_from_disk,
)
from shoal_server.core.shards.rebalance import Servers, num_lost, rebalance
from shoal_server.etcd.api import KeyValue
from shoal_server.etcd.keys import shard_assignment
from shoal_server.etcd.records import assignments as records

A, B, C = (Holder(name, "one") for name in "abc")
NEW_A = Holder("a", "two")


def job(*shards: ShardAssignment) -> JobAssignments:
    return JobAssignments(job="job", copies=2, shards=shards, run="r")


TRAINED = ShardAssignment(
    shard_id=3, epoch=4, primary=A, backups=(B,), content=ShardContent.PRESENT
)
LOST = replace(TRAINED, content=ShardContent.LOST, backups=(), loss=ShardLoss(lost_unix_s=1.5))
BOTH_GONE = Servers(present=frozenset({C}), dead=frozenset({A, B}))


def lost_by(shard: ShardAssignment, servers: Servers, version: int = 0) -> ShardAssignment:
    """The record of a shard once the coordinator has seen which servers there are."""
    before, known = job(shard), {shard.shard_id: version} if version else {}
    after = losses.with_losses(before, rebalance(before, servers, {}), known, "No snapshot.", 9.0)
    (found,) = losses.lost(after)
    return found


def test_what_is_known_is_kept_when_the_last_copy_is_gone() -> None:
    """The version is a lower bound, and is told as one."""
    shard = lost_by(TRAINED, BOTH_GONE, version=812)
    assert shard.loss == ShardLoss(
        lost_unix_s=9.0, version=812, servers=("a", "b"), snapshot="No snapshot."
    )
    why = losses.explained("job", shard)
    assert "at least version 812 on a, b" in why.seen
    assert "shoal restore job --from URL" in why.fix
    assert "shoal accept-loss job`" in why.fix
    assert why.fix.endswith("No snapshot.")
    assert why.details["at_least_version"] == "812"


def test_a_version_that_nobody_told_is_not_made_up() -> None:
    why = losses.explained("job", lost_by(TRAINED, BOTH_GONE))
    assert "no version known" in why.seen
    assert "at_least_version" not in why.details


def test_what_is_known_stays_while_nobody_has_the_shard() -> None:
    """Who was to lead it goes as well, for however short: the next one is told at once, and nothing
    is found out, or restored, a second time."""
    first = lost_by(TRAINED, BOTH_GONE, version=7)
    servers = Servers(present=frozenset({NEW_A}))
    again = lost_by(first, servers)
    assert (again.primary, again.epoch, again.loss) == (NEW_A, first.epoch + 1, first.loss)
    assert num_lost(job(first), servers) == 0


def test_only_what_had_values_is_lost() -> None:
    """A shard that nobody created moves on, and no snapshot is asked for."""
    empty = job(replace(TRAINED, content=ShardContent.NONE))
    assert num_lost(empty, BOTH_GONE) == 0
    assert losses.lost(rebalance(empty, BOTH_GONE, {})) == []


def test_what_is_given_up_begins_anew_and_no_disk_brings_the_old_one_back() -> None:
    """Its epoch rises; who said so is remembered, whoever leads it later. A shard that is not lost
    is left alone."""
    anew = losses.given_up(replace(LOST, on_disk="a"), "ann", 2.0)
    assert (anew.content, anew.epoch, anew.on_disk) == (ShardContent.NONE, 5, "")
    assert LOST.loss is not None
    assert anew.accepted_loss == AcceptedLoss(loss=LOST.loss, by="ann", accepted_unix_s=2.0)
    assert led_from_disk(anew, NEW_A, frozenset({A, B})) == anew
    moved = rebalance(job(anew), Servers(present=frozenset({C}), dead=frozenset({A})), {})
    assert moved.shards[0].accepted_loss == anew.accepted_loss
    assert losses.given_up(TRAINED, "ann", 2.0) == TRAINED


@pytest.mark.parametrize(
    "shard",
    [TRAINED, LOST, losses.given_up(LOST, "ann", 2.5)],
    ids=["there", "lost", "given up"],
)
def test_the_record_has_all_of_it(shard: ShardAssignment) -> None:
    """Also where it takes the place of one of the shard when it was lost."""
    other = replace(LOST, loss=ShardLoss(lost_unix_s=3.0, version=8, servers=("a",)))
    value = records.encode_shard("r", shard, records.encode_shard("r", other))
    key = shard_assignment("job", "r", shard.shard_id)
    read = records.parse_shard(KeyValue(key, value, create_revision=1, mod_revision=1, version=1))
    assert read.assignment == shard
