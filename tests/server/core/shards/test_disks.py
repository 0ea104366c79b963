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
NOBODY: frozenset[Holder] = frozenset()


def led_by(primary: Holder, *backups: Holder) -> ShardAssignment:
    return ShardAssignment(shard_id=0, epoch=4, primary=primary, backups=backups, on_disk="a")


def test_only_the_primary_says_that_it_has_the_shard_on_disk() -> None:
    shard = ShardAssignment(shard_id=0, epoch=1, primary=B, backups=(C,))
    assert put_on_disk(shard, B).on_disk == "b"
    assert put_on_disk(shard, C) == shard


@pytest.mark.parametrize("primary", [OLD, B], ids=["it led itself", "another led, and is dead"])
def test_the_next_process_leads_from_the_disk(primary: Holder) -> None:
    """Its backups are out of sight: none of them can have written itself down."""
    found = led_from_disk(led_by(primary, C), NEW, present=NOBODY, dead=frozenset({B}))
    assert (found.primary, found.epoch, found.backups, found.on_disk) == (NEW, 5, (), "a")


@pytest.mark.parametrize(
    ("shard", "present", "dead"),
    [
        (led_by(OLD, C), {C}, ()),
        (led_by(B), {B}, ()),
        (led_by(B), (), ()),
        (led_by(B, C), {C}, {B}),
        (ShardAssignment(shard_id=0, epoch=4, primary=OLD, on_disk="b"), (), ()),
        (ShardAssignment(shard_id=0, epoch=4, primary=OLD), (), ()),
        (led_by(NEW), (), ()),
    ],
    ids=[
        "a backup lives",
        "another leads",
        "another leads, out of sight",
        "a backup of a dead one lives",
        "on another disk",
        "on no disk",
        "led already",
    ],
)
def test_whoever_has_more_is_not_robbed(
    shard: ShardAssignment, present: set[Holder], dead: set[Holder]
) -> None:
    assert led_from_disk(shard, NEW, frozenset(present), frozenset(dead)) == shard


def test_a_disk_that_is_gone_is_waited_for_by_nobody() -> None:
    assert off_disk(led_by(B), NEW).on_disk == ""
    assert off_disk(led_by(B), C) == led_by(B)
