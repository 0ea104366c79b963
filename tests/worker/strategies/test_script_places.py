"""Members whose scripts wait for each other in different places find out, and nobody else does."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from shoal.strategies.synchronous.script_places import LOOK_AFTER_S, Place, ScriptPlaces
from shoal_proto.errors import InvalidSpec

MEMBERS = ["a", "b", "c"]
GENERATION = 4
STEP = Place(step=7, num_calls=0, what="session.step() behind 7 steps")
CALL = Place(step=7, num_calls=0, what="session.evaluate", is_call=True)
LONG_S = tuple(LOOK_AFTER_S * 2**number for number in range(5))


def crew(store: dist.Store) -> list[ScriptPlaces]:
    ranks = range(len(MEMBERS))
    return [ScriptPlaces(store, GENERATION, rank, MEMBERS, heard_within_s=0.0) for rank in ranks]


def waited(members: list[ScriptPlaces], *places: Place) -> list[bool]:
    """Who finds its wait in vain, while each waits at its place for longer and longer."""
    found = [False] * len(members)
    for waited_s in LONG_S:
        for rank, (each, place) in enumerate(zip(members, places, strict=True)):
            found[rank] |= each.look(place, waited_s)
    assert found == [each.refusal(GENERATION) is not None for each in members]
    return found


def test_a_call_that_one_member_makes_alone_is_found_by_all() -> None:
    members = crew(dist.HashStore())
    assert waited(members, STEP, CALL, STEP) == [True] * 3
    for each in members:
        refusal = each.refusal(GENERATION)
        assert isinstance(refusal, InvalidSpec)
        assert f"a: {STEP.what}; b: {CALL.what}; c: {STEP.what}" in str(refusal)
        assert each.refusal(GENERATION + 1) is None


@pytest.mark.parametrize(
    "places",
    [
        pytest.param([CALL, CALL, CALL], id="the same call"),
        pytest.param([STEP, STEP, STEP], id="the same step"),
        pytest.param([STEP, CALL, replace(STEP, what="")], id="one that may still come"),
        pytest.param([STEP, CALL, replace(STEP, step=6)], id="one that did not commit the step"),
        pytest.param([STEP, replace(CALL, num_calls=1), STEP], id="another call"),
    ],
)
def test_members_that_may_still_meet_wait_on(places: list[Place]) -> None:
    assert waited(crew(dist.HashStore()), *places) == [False] * 3


def test_a_short_wait_writes_nothing() -> None:
    store = dist.HashStore()
    for each in crew(store):
        assert not each.look(STEP, LOOK_AFTER_S / 2)
    assert store.num_keys() == 0


def test_who_has_gone_on_is_not_held_to_where_it_was() -> None:
    """A wait that ended well leaves nothing behind for the next one to be compared with."""
    store = dist.HashStore()
    members = crew(store)
    assert not members[0].look(STEP, LOOK_AFTER_S)
    assert store.num_keys() == 1
    assert not members[0].look(replace(CALL, what=""), 0.0)
    assert store.num_keys() == 0
    assert waited(members, replace(CALL, what=""), CALL, CALL) == [False] * 3
