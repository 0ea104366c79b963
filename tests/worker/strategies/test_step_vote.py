"""Members' votes on a step: differences are reported by member, field and values."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from shoal.layouts.layer_exchanges import LayerExchanges
from shoal.strategies.synchronous.hyperparameters import digest_of, with_norms
from shoal.strategies.synchronous.step_vote import (
    Ballot,
    OptimizerAction,
    StepVote,
    agree,
    check_passes,
    check_votes,
    need_whole_votes,
    weights_of,
)
from shoal_proto.errors import HyperparametersDiffer, InvalidSpec, UnequalPasses

RATES = ({"lr": 0.5},)
VOTE = StepVote(passes=2, is_last=True, hyperparameters=RATES)
PASSES: dict[str, tuple[dict[str, Any], str]] = {
    "passes": ({"passes": 3}, "2 by a; 3 by b"),
    "is_last": ({"is_last": False}, "2 by a; 2 or more by b"),
    "parts": ({"parts": 4}, r"2 by a; 4 \(batch.parts\) by b"),
    "action": ({"action": OptimizerAction.UPDATE, "optimizers": 2}, "2 by a; an update of d by b"),
    "optimizers": (
        {"action": OptimizerAction.CLIP, "optimizers": 3},
        "2 by a; clipping for g and d by b",
    ),
}
"""Votes by the field in which they differ, each with the error's text on the difference."""
APPLIED: dict[str, tuple[dict[str, Any], str]] = {
    "hyperparameters": ({"hyperparameters": ({"lr": 0.25},)}, "step 7; .*0.5 by a; 0.25 by b"),
    "changes": ({"changes": ((3, ({"lr": 0.25},)),)}, "step 10; .*0.5 by a; 0.25 by b"),
    "idle": ({"idle": ("w.0",)}, "without a gradient: none by a; w.0 by b"),
}
MAY_DIFFER: dict[str, Any] = {
    "layers": 0,
    "weight": 3.0,
    "is_faulty": True,
    "stops_before": True,
    "stops_after": True,
    "leaves": True,
    "conflict": "in step 7 lr of group 0 ...",
    "refusal": {"what": "..."},
    "exchanges": None,
}


def ballot(vote: StepVote) -> Ballot:
    return vote.ballot(digest_of(vote.applied) if vote.applied else 0)


def test_each_field_of_a_vote_is_tested_here() -> None:
    assert {each.name for each in fields(StepVote)} == {*PASSES, *APPLIED, *MAY_DIFFER}
    may_differ = {each.name for each in fields(StepVote) if not each.compare}
    assert may_differ == set(MAY_DIFFER)


@pytest.mark.parametrize("name", PASSES)
def test_different_passes_are_found_by_the_ballots_alone(name: str) -> None:
    """Members that make different passes have no common collective in which to send more."""
    changes, text = PASSES[name]
    ballots = {"a": ballot(VOTE), "b": ballot(replace(VOTE, **changes))}
    assert not agree(list(ballots.values()))
    with pytest.raises(UnequalPasses, match=text) as raised:
        check_passes(ballots, 7, ["g", "d"])
    assert set(raised.value.details) == {"a", "b"}


@pytest.mark.parametrize("name", APPLIED)
def test_different_settings_are_found_by_whole_votes(name: str) -> None:
    changes, text = APPLIED[name]
    votes = {"a": VOTE, "b": replace(VOTE, **changes)}
    ballots = {member: ballot(vote) for member, vote in votes.items()}
    assert not agree(list(ballots.values()))
    check_passes(ballots, 7, [])
    assert need_whole_votes(list(ballots.values()))
    with pytest.raises((HyperparametersDiffer, InvalidSpec), match=text):
        check_votes(votes, 7)
    check_votes(votes, 7, is_taken=False)


@pytest.mark.parametrize("name", MAY_DIFFER)
def test_fields_that_may_differ_are_no_difference(name: str) -> None:
    """A conflict or a refusal is the exception: one member reports it to all others."""
    votes = {"a": VOTE, "b": replace(VOTE, **{name: MAY_DIFFER[name]})}
    ballots = [ballot(vote) for vote in votes.values()]
    assert need_whole_votes(ballots) == (name in ("conflict", "refusal"))
    assert agree(ballots) == (ballots[0] == ballots[1])
    if name not in ("conflict", "refusal"):
        check_votes(votes, 7)


def test_a_step_that_is_taken_again_with_other_settings_is_refused_with_its_member() -> None:
    votes = {"a": VOTE, "b": replace(VOTE, conflict="in step 7 lr of group 0 0.5 and 0.25")}
    with pytest.raises(HyperparametersDiffer, match=r"0\.5 and 0\.25 \(on b\)"):
        check_votes(votes, 7)


def test_a_refusal_of_one_member_is_raised_on_all() -> None:
    refusal = InvalidSpec("a state that nobody can carry", seen="this", expected="that")
    votes = {"a": VOTE, "b": replace(VOTE, refusal={**refusal.to_dict(), "of_a_later_release": 1})}
    with pytest.raises(InvalidSpec, match="a state that nobody can carry; saw this"):
        check_votes(votes, 7)


def test_different_layers_are_refused_by_member_and_layer() -> None:
    votes = {}
    for member, numbers in {"a": [0, 1], "b": [1, 0]}.items():
        exchanges = LayerExchanges()
        exchanges.set_peers((0, 1))
        sites = [exchanges.add_site(name) for name in ("up", "down")]
        exchanges.begin_step()
        for number in numbers:
            sites[number].value()
        exchanges.end_passes()
        record = exchanges.record()
        assert record is not None
        sent = {**vars(record), "of_a_later_release": 1}
        votes[member] = replace(VOTE, layers=exchanges.summary(), exchanges=sent)
    assert need_whole_votes([ballot(each) for each in votes.values()])
    with pytest.raises(InvalidSpec, match="a: at the outputs of up; b: at the outputs of down"):
        check_votes(votes, 7)


def test_last_bits_are_no_difference() -> None:
    """Hosts with another libm compute another last bit of a schedule."""
    other = replace(VOTE, hyperparameters=({"lr": 0.5 * (1 + 1e-12)},))
    assert need_whole_votes([ballot(VOTE), ballot(other)])
    check_votes({"a": VOTE, "b": other}, 7)


def test_a_schedule_that_ends_at_0_differs_by_its_last_bits_there() -> None:
    """Near -1 the last bit of a cosine is a large share of what is left of the rate."""

    def rate(cosine: float) -> StepVote:
        return replace(VOTE, hyperparameters=({"lr": 0.1 * (1 + cosine) / 2},))

    num_steps = 100_000
    for step in (num_steps - 1, num_steps):
        cosine = math.cos(math.pi * step / num_steps)
        check_votes({"a": rate(cosine), "b": rate(math.nextafter(cosine, 0.0))}, step)


def test_a_member_that_clips_alone_is_refused() -> None:
    other = replace(VOTE, hyperparameters=with_norms(RATES, [0.5]))
    with pytest.raises(HyperparametersDiffer, match=r"max_norm.*None by a; \[0.5\] by b"):
        check_votes({"a": VOTE, "b": other}, 7)


@pytest.mark.parametrize(
    ("weights", "text"),
    [([3.0, None], "have a weight, others have none"), ([0.0, 0.0], "all have weight 0")],
)
def test_weights_that_give_no_mean_are_refused(weights: list[float | None], text: str) -> None:
    ballots = {str(i): ballot(replace(VOTE, weight=each)) for i, each in enumerate(weights)}
    with pytest.raises(InvalidSpec, match=text):
        weights_of(ballots, 7)


def test_weights_are_those_of_the_members() -> None:
    """Members that share no samples may have none that count."""
    ballots = {str(i): ballot(replace(VOTE, weight=each)) for i, each in enumerate([3.5, 0.0])}
    assert weights_of(ballots, 7) == [3.5, 0.0]
    assert weights_of({"a": ballot(VOTE), "b": ballot(VOTE)}, 7) is None


def test_a_whole_vote_is_read_by_members_of_other_releases() -> None:
    encoded = replace(VOTE, idle=("w",), weight=2.0).encode()
    known = StepVote.decode(encoded)
    assert (known.passes, known.weight, known.hyperparameters) == (2, 2.0, [{"lr": 0.5}])
    later = encoded[:-1] + b', "of_a_later_release": 1}'
    assert StepVote.decode(later) == known
