"""Members whose scripts wait for each other at different points find out, and no others do."""

from dataclasses import dataclass, replace

import pytest
import torch.distributed as dist

from shoal.layouts.layer_exchanges import ExchangeRecord, LayerExchanges
from shoal.strategies.synchronous.script_points import LOOK_AFTER_S, ScriptPoint, ScriptPoints
from shoal_proto.errors import InvalidSpec

MEMBERS = ["a", "b", "c"]
GENERATION = 4
STEP = ScriptPoint(step=7, num_calls=0, what="session.step() after 7 steps")
CALL = ScriptPoint(step=7, num_calls=0, what="session.evaluate", is_call=True)
LONG_S = tuple(LOOK_AFTER_S * 2**number for number in range(5))


def crew(store: dist.Store) -> list[ScriptPoints]:
    ranks = range(len(MEMBERS))
    return [ScriptPoints(store, GENERATION, rank, MEMBERS, read_within_s=0.0) for rank in ranks]


def waited(members: list[ScriptPoints], *places: ScriptPoint) -> list[bool]:
    """Let each member wait at its place for longer and longer. True for a member that finds its
    wait to be in vain."""
    found = [False] * len(members)
    for waited_s in LONG_S:
        for rank, (each, place) in enumerate(zip(members, places, strict=True)):
            found[rank] |= each.check(place, waited_s)
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


@dataclass(frozen=True, kw_only=True)
class LaterPoint(ScriptPoint):
    """A point as a later release sends it."""

    of_a_later_release: int = 1


def test_points_of_a_later_release_are_compared() -> None:
    """Members change their release one after the other."""
    later = LaterPoint(step=CALL.step, num_calls=CALL.num_calls, what=CALL.what, is_call=True)
    assert waited(crew(dist.HashStore()), STEP, later, STEP) == [True] * 3


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
def test_members_that_may_still_meet_wait_on(places: list[ScriptPoint]) -> None:
    assert waited(crew(dist.HashStore()), *places) == [False] * 3


def test_a_short_wait_writes_nothing() -> None:
    store = dist.HashStore()
    for each in crew(store):
        assert not each.check(STEP, LOOK_AFTER_S / 2)
    assert store.num_keys() == 0


def test_a_wait_that_has_ended_is_not_compared_with_the_next() -> None:
    """A wait that ended well leaves nothing with which the next one could be compared."""
    store = dist.HashStore()
    members = crew(store)
    assert not members[0].check(STEP, LOOK_AFTER_S)
    assert store.num_keys() == 1
    assert not members[0].check(replace(CALL, what=""), 0.0)
    assert store.num_keys() == 0
    assert waited(members, replace(CALL, what=""), CALL, CALL) == [False] * 3


def splitting(
    store: dist.Store, layers: list[list[int]], kind: type[LayerExchanges] = LayerExchanges
) -> list[ScriptPoints]:
    """Return members that split layers and have met for these in one step; -1 ends their passes."""
    found = []
    for rank, own in enumerate(layers):
        exchanges = kind()
        exchanges.set_peers(range(len(layers)))
        sites = [exchanges.add_site(name) for name in ("first", "second", "third")]
        exchanges.begin_step()
        for layer in own:
            sites[layer].value() if layer >= 0 else exchanges.end_passes()
        found.append(
            ScriptPoints(store, GENERATION, rank, MEMBERS, exchanges=exchanges, read_within_s=0.0)
        )
    return found


def stood(members: list[ScriptPoints]) -> list[bool]:
    """Let members wait while no limit runs, as in a pause. True for a member that finds its wait to
    be in vain."""
    found = [False] * len(members)
    for stood_s in LONG_S:
        for rank, each in enumerate(members):
            found[rank] |= each.check(STEP, 0.0, stood_s)
    assert found == [each.refusal(GENERATION) is not None for each in members]
    return found


def test_a_layer_that_one_member_leaves_out_is_found_by_all() -> None:
    """Members wait for each other in the same step; the passes of one of them have ended."""
    members = splitting(dist.HashStore(), [[0, 1, 2], [0, 2, -1], [0, 1, 2]])
    assert stood(members) == [True] * 3
    for each in members:
        with pytest.raises(InvalidSpec, match="a: at the outputs of second; b: at the outputs of"):
            raise each.refusal(GENERATION) or AssertionError


@dataclass(frozen=True, kw_only=True)
class LaterRecord(ExchangeRecord):
    """A record as a later release sends it."""

    of_a_later_release: int = 1


class LaterExchanges(LayerExchanges):
    def record(self) -> ExchangeRecord | None:
        own = super().record()
        return LaterRecord(**vars(own)) if own is not None else None


def test_layers_of_a_later_release_are_compared() -> None:
    layers = [[0, 1, 2], [0, 2, -1], [0, 1, 2]]
    assert stood(splitting(dist.HashStore(), layers, LaterExchanges)) == [True] * 3


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param([[0, 1], [0, 1], [0, 1]], id="the same layer"),
        pytest.param([[0, 1, 2], [0], [0, 1]], id="what is sent is lost on the way"),
        pytest.param([[0, 1, 2, -1], [0, 1, 2], [0, 1, 2, -1]], id="lost before the passes end"),
        pytest.param([[], [0, 1], [0]], id="one that did not come to any"),
    ],
)
def test_members_that_a_network_holds_up_are_not_refused(layers: list[list[int]]) -> None:
    """Holds for any length of the delay."""
    assert stood(splitting(dist.HashStore(), layers)) == [False] * 3


def test_a_short_wait_for_a_layer_writes_nothing() -> None:
    store = dist.HashStore()
    for each in splitting(store, [[0], [0, 1], [1]]):
        assert not each.check(STEP, 0.0, LOOK_AFTER_S / 2)
    assert store.num_keys() == 0


def test_a_wait_in_vain_is_found_before_a_short_limit_ends_the_generation() -> None:
    """Regression: with a limit of 4 s some members learned of it, and others started again without
    it."""
    store, limit_s = dist.HashStore(), 4.0
    members = [
        ScriptPoints(store, GENERATION, rank, MEMBERS, limit_s=limit_s, read_within_s=0.0)
        for rank in range(len(MEMBERS))
    ]
    found = [False] * len(members)
    for look in range(1, 11):
        for rank, (each, place) in enumerate(zip(members, (STEP, CALL, STEP), strict=True)):
            # Members check a few times a second, and began to wait at different times.
            found[rank] |= each.check(place, look * limit_s / 20 + rank * 0.1)
    assert found == [True] * 3
