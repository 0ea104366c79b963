"""Records of lost shards: what is known of each, and how losses are accepted."""

from dataclasses import replace

import pytest

from shoal_server.core.processes import Holder
from shoal_server.core.shards import losses
from shoal_server.core.shards.assignments import (
    AcceptedLoss,
    JobAssignments,
    ShardAssignment,
    ShardContent,
    ShardLoss,
    promote_from_disk,
)
from shoal_server.core.shards.rebalance import Servers, newly_lost, rebalance
from shoal_server.etcd.api import KeyValue
from shoal_server.etcd.keys import shard_assignment
from shoal_server.etcd.records import assignments as records

A, B, C = (Holder(name, "one") for name in "abc")
NEW_A = Holder("a", "two")


def job(*shards: ShardAssignment) -> JobAssignments:
    return JobAssignments(job="job", copies=2, shards=shards, placement_id="r")


TRAINED = ShardAssignment(
    shard_id=3, epoch=4, primary=A, backups=(B,), content=ShardContent.PRESENT
)
LOST = replace(TRAINED, content=ShardContent.LOST, backups=(), loss=ShardLoss(lost_unix_s=1.5))
BOTH_GONE = Servers(present=frozenset({C}), dead=frozenset({A, B}))


def lost_by(shard: ShardAssignment, servers: Servers, version: int = 0) -> ShardAssignment:
    """Return the shard's record after the coordinator has seen these servers."""
    before, known = job(shard), {shard.shard_id: version} if version else {}
    after = losses.with_losses(before, rebalance(before, servers, {}), known, "No snapshot.", 9.0)
    (found,) = losses.lost(after)
    return found


def test_the_record_of_a_loss_has_version_servers_and_snapshot() -> None:
    """The error describes the version as a lower bound, and what to do."""
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


def test_a_loss_without_a_known_version_has_none() -> None:
    why = losses.explained("job", lost_by(TRAINED, BOTH_GONE))
    assert "no version known" in why.seen
    assert "at_least_version" not in why.details


def test_a_loss_stays_recorded_when_the_new_primary_is_lost_too() -> None:
    """The next primary has the same loss, which is not counted a second time."""
    first = lost_by(TRAINED, BOTH_GONE, version=7)
    servers = Servers(present=frozenset({NEW_A}))
    again = lost_by(first, servers)
    assert (again.primary, again.epoch, again.loss) == (NEW_A, first.epoch + 1, first.loss)
    assert newly_lost(job(first), servers) == frozenset()


def test_the_coordinator_completes_the_record_of_a_loss_that_a_server_found() -> None:
    """The server was to lead the shard from its disk, which does not have it."""
    found = replace(LOST, loss=None, on_disk="a", disk_version=7)
    servers = Servers(present=frozenset({A}))
    assert newly_lost(job(found), servers) == {3}
    noted = lost_by(found, servers, version=5)
    known = ShardLoss(lost_unix_s=9.0, version=7, servers=("a",), snapshot="No snapshot.")
    assert noted == replace(found, loss=known)
    assert newly_lost(job(noted), servers) == frozenset()
    assert lost_by(noted, servers) == noted


def test_a_shard_that_is_being_restored_is_not_lost_with_its_server() -> None:
    """The restore gives the shard to another server. Without a restore it is lost."""
    loading = job(replace(TRAINED, content=ShardContent.LOADING, restored_version=7))
    restoring = replace(BOTH_GONE, are_loading=True)
    assert newly_lost(loading, restoring) == frozenset()
    assert rebalance(loading, restoring, {}) == loading
    assert newly_lost(loading, BOTH_GONE) == {3}
    lost = lost_by(loading.shards[0], BOTH_GONE)
    assert lost.loss is not None and lost.loss.version == 7


@pytest.mark.parametrize(
    ("now", "still"),
    [
        (TRAINED, True),
        (replace(TRAINED, found_version=2), True),
        (LOST, True),
        (replace(LOST, epoch=9), True),
        (promote_from_disk(replace(LOST, on_disk="a"), NEW_A, frozenset()), False),
        (losses.give_up_shard(LOST, "ann", 2.0), False),
        (replace(TRAINED, epoch=5), False),
    ],
    ids=["unchanged", "older copy", "declared", "again", "recovered", "given up", "backup leads"],
)
def test_a_lost_shard_is_still_lost_until_it_is_recovered_or_given_up(
    now: ShardAssignment, still: bool
) -> None:
    other = replace(TRAINED, shard_id=4)
    assert losses.is_still_lost(job(now, other), [TRAINED]) is still
    assert losses.is_still_lost(None, [TRAINED]) is False


def test_a_shard_that_was_never_created_is_not_lost() -> None:
    """Another server becomes its primary."""
    empty = job(replace(TRAINED, content=ShardContent.NONE))
    assert newly_lost(empty, BOTH_GONE) == frozenset()
    assert losses.lost(rebalance(empty, BOTH_GONE, {})) == []


def test_an_accepted_loss_starts_over_and_is_not_led_from_a_disk() -> None:
    """The epoch rises. The record keeps the operator who accepted the loss, also under later
    primaries. A shard that is not lost stays as it is."""
    anew = losses.give_up_shard(replace(LOST, on_disk="a"), "ann", 2.0)
    assert (anew.content, anew.epoch, anew.on_disk) == (ShardContent.NONE, 5, "")
    assert LOST.loss is not None
    assert anew.accepted_loss == AcceptedLoss(loss=LOST.loss, by="ann", accepted_unix_s=2.0)
    assert promote_from_disk(anew, NEW_A, frozenset({A, B})) == anew
    moved = rebalance(job(anew), Servers(present=frozenset({C}), dead=frozenset({A})), {})
    assert moved.shards[0].accepted_loss == anew.accepted_loss
    assert losses.give_up_shard(TRAINED, "ann", 2.0) == TRAINED


NOT_CREATED = replace(TRAINED, shard_id=5, content=ShardContent.NONE)
OTHER_LOST = replace(LOST, shard_id=4)


@pytest.mark.parametrize(
    ("shards", "left"),
    [
        ([LOST], []),
        ([LOST, NOT_CREATED], []),
        ([LOST, losses.give_up_shard(OTHER_LOST, "ann", 2.0)], []),
        ([LOST, replace(TRAINED, shard_id=4)], [4]),
        ([LOST, replace(TRAINED, shard_id=4, content=ShardContent.LOADING)], [4]),
        ([LOST, OTHER_LOST], [4]),
    ],
    ids=["all", "all created", "the last", "a part", "a part that is loaded", "one of two"],
)
def test_samples_start_over_if_no_trained_shard_is_left(
    shards: list[ShardAssignment], left: list[int]
) -> None:
    """The default is to start over if no trained shard is left. If one is left, or may be found on
    a disk, there is no default: the operator has to choose. Any choice is followed."""
    given_up = {LOST.shard_id}
    assert [s.shard_id for s in losses.still_trained(job(*shards), given_up)] == left
    expected = None if left else losses.SamplesAfterLoss.ANEW
    assert losses.samples_after(job(*shards), given_up, None) is expected
    for wish in losses.SamplesAfterLoss:
        assert losses.samples_after(job(*shards), given_up, wish) is wish


@pytest.mark.parametrize(
    "shard",
    [
        TRAINED,
        LOST,
        losses.give_up_shard(LOST, "ann", 2.5),
        losses.give_up_shard(LOST, "ann", 2.5, samples_anew=True),
    ],
    ids=["present", "lost", "accepted", "accepted with the samples"],
)
def test_a_shards_record_is_read_back_whole(shard: ShardAssignment) -> None:
    """An earlier loss in the record is replaced."""
    other = replace(LOST, loss=ShardLoss(lost_unix_s=3.0, version=8, servers=("a",)))
    value = records.encode_shard("r", shard, records.encode_shard("r", other))
    key = shard_assignment("job", "r", shard.shard_id)
    read = records.parse_shard(KeyValue(key, value, create_revision=1, mod_revision=1, version=1))
    assert read.assignment == shard


def test_shards_lost_for_the_same_reason_share_one_paragraph() -> None:
    """The paragraph has what to do once; another paragraph describes the other shard."""
    gone = [
        replace(LOST, shard_id=i, loss=ShardLoss(lost_unix_s=1.5, version=7, servers=("a", "b")))
        for i in range(64)
    ]
    elsewhere = replace(LOST, shard_id=64, on_disk="c")
    together, alone = losses.losses_in_words("job", [*gone, elsewhere])
    assert together.startswith(
        "64 shards of job job were lost with every server that had them (a, b):"
        " shard 0 (at least version 7), shard 1"
    )
    assert "and 56 more" in together
    assert together.count("shoal restore") == 1
    assert alone.startswith(
        "shard 64 of job job was lost with every server that had it: no version"
    )
    assert "start server c again" in alone
