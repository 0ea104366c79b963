"""On whose disk a shard is, and who may lead it from there."""

import pytest

from shoal_server.core.shards.assignments import (
    Holder,
    ShardAssignment,
    led_from_disk,
    off_disk,
    put_on_disk,
)

OLD, NEW = Holder("a", "one"), Holder("a", "two")
B, C = Holder("b", "one"), Holder("c", "one")


def led_by(primary: Holder, *backups: Holder) -> ShardAssignment:
    return ShardAssignment(shard_id=0, epoch=4, primary=primary, backups=backups, on_disk="a")


def test_only_the_primary_says_that_it_has_the_shard_on_disk() -> None:
    shard = ShardAssignment(shard_id=0, epoch=1, primary=B, backups=(C,))
    assert put_on_disk(shard, B).on_disk == "b"
    assert put_on_disk(shard, C) == shard


@pytest.mark.parametrize("primary", [OLD, B], ids=["it led itself", "another led, and is dead"])
def test_the_next_process_leads_from_the_disk(primary: Holder) -> None:
    """Every process that had it in memory is known to be gone."""
    found = led_from_disk(led_by(primary, C), NEW, dead=frozenset({primary, C}))
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
def test_whoever_has_more_is_not_robbed(shard: ShardAssignment, dead: set[Holder]) -> None:
    assert led_from_disk(shard, NEW, frozenset(dead)) == shard


def test_a_disk_that_is_gone_is_waited_for_by_nobody() -> None:
    assert off_disk(led_by(B), NEW).on_disk == ""
    assert off_disk(led_by(B), C) == led_by(B)
