"""Disks that have a shard, and servers that may lead the shard from there."""

from dataclasses import replace

import pytest

from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import (
    ShardAssignment,
    ShardContent,
    is_older,
    mark_empty,
    promote_from_disk,
    record_disk,
    record_older_copy,
    remove_disk,
)

OLD, NEW = Holder("a", "one"), Holder("a", "two")
B, C = Holder("b", "one"), Holder("c", "one")


def led_by(primary: Holder, *backups: Holder) -> ShardAssignment:
    return ShardAssignment(shard_id=0, epoch=4, primary=primary, backups=backups, on_disk="a")


def test_only_the_primary_can_record_its_disk() -> None:
    shard = ShardAssignment(shard_id=0, epoch=1, primary=B, backups=(C,))
    assert record_disk(shard, B, 7).on_disk == "b"
    assert record_disk(shard, C, 7) == shard


def test_the_version_on_one_disk_never_falls_within_an_epoch() -> None:
    """The recorded version may be lower on another disk or in a later epoch."""
    shard = record_disk(ShardAssignment(shard_id=0, epoch=2, primary=B), B, 7)
    assert (shard.disk_epoch, shard.disk_version) == (2, 7)
    assert record_disk(shard, B, 5) == shard
    later = record_disk(replace(shard, epoch=4), B, 5)
    assert (later.disk_epoch, later.disk_version) == (4, 5)
    other = record_disk(replace(shard, primary=C), C, 3)
    assert (other.on_disk, other.disk_version) == ("c", 3)
    assert remove_disk(shard, B).disk_version == 0
    assert mark_empty(replace(shard, content=ShardContent.PRESENT), B).disk_version == 0


@pytest.mark.parametrize(
    ("epoch", "version", "older"),
    [(4, 9, True), (3, 20, True), (4, 10, False), (5, 1, False)],
    ids=["fewer updates", "an earlier epoch", "all known updates", "a later epoch"],
)
def test_an_older_copy_on_disk_is_recognised(epoch: int, version: int, older: bool) -> None:
    shard = replace(led_by(B), disk_epoch=4, disk_version=10)
    assert is_older(shard, epoch, version) == older


def test_a_server_records_that_it_found_an_older_copy() -> None:
    """A server records nothing while its earlier process may be alive and have the right disk."""
    shard = replace(led_by(B), disk_epoch=4, disk_version=10)
    assert record_older_copy(shard, NEW, 3, frozenset()).found_version == 3
    assert record_older_copy(shard, C, 3, frozenset()) == shard
    assert not record_older_copy(shard, NEW, 3, frozenset()).found_foreign
    assert record_older_copy(shard, NEW, 0, frozenset()).found_foreign
    led = replace(led_by(OLD), disk_epoch=4, disk_version=10)
    assert record_older_copy(led, NEW, 3, frozenset()) == led
    assert record_older_copy(led, NEW, 3, frozenset({OLD})).found_version == 3
    assert record_disk(replace(shard, found_version=3), B, 11).found_version == 0


@pytest.mark.parametrize("primary", [OLD, B], ids=["its earlier process", "another server"])
def test_a_new_process_leads_the_shard_from_its_disk(primary: Holder) -> None:
    """The processes that held the shard in memory are known to be dead."""
    found = promote_from_disk(led_by(primary, C), NEW, dead=frozenset({primary, C}))
    assert (found.primary, found.epoch, found.backups, found.on_disk) == (NEW, 5, (), "a")


@pytest.mark.parametrize(
    ("shard", "dead"),
    [
        (led_by(OLD, C), {OLD}),
        (led_by(OLD), ()),
        (led_by(B), ()),
        (led_by(B, C), {B}),
        (ShardAssignment(shard_id=0, epoch=4, primary=OLD, on_disk="b"), {OLD}),
        (ShardAssignment(shard_id=0, epoch=4, primary=OLD), {OLD}),
        (led_by(NEW), ()),
    ],
    ids=[
        "a backup may live",
        "its last process may live",
        "another may lead",
        "a backup of a dead one may live",
        "on another disk",
        "on no disk",
        "led already",
    ],
)
def test_a_shard_is_not_led_from_disk_while_others_may_have_more(
    shard: ShardAssignment, dead: set[Holder]
) -> None:
    assert promote_from_disk(shard, NEW, frozenset(dead)) == shard


def test_a_server_removes_its_own_disk_from_the_record() -> None:
    assert remove_disk(led_by(B), NEW).on_disk == ""
    assert remove_disk(led_by(B), C) == led_by(B)
