"""A member whose code raises: it leaves with its error, and the others train on, exactly."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.members.elastic_schedule import Schedule, check_same_weights, elastic
from support.oracles.local_sgd_twin import EPOCHS
from support.processes.ranks import Rank, Ranks
from support.training import local_sgd_bodies
from support.training.elastic_bodies import Elastic
from support.training.local_sgd_bodies import LocalRun, twin_of

from shoal_client.local.cluster import LocalCluster

TOLERANCE = 1e-5
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "tensor", "fsdp-tensor", "pipeline", "hybrid")
SPLITTING = ("tensor", "fsdp-tensor", "hybrid")
PLACES = ("forward", "backward", "optimizer", "hook")


def run_of(cluster: LocalCluster, strategy: str, num_members: int) -> Elastic:
    return elastic(
        cluster,
        "raises",
        desired_members=num_members,
        strategy=strategy,
        options={"min_split_bytes": 0} if strategy in SPLITTING else {},
    )


def lose_all_but_one(schedule: Schedule) -> None:
    """Lose one member after the other, by an error in forward, in backward and in the optimizer;
    then one more member joins and raises in a hook."""
    *early, late = PLACES
    faulty = [
        schedule.add(fault=place, at_step=12 * (number + 1)) for number, place in enumerate(early)
    ]
    sound = schedule.add()
    for place, rank in zip(early, faulty, strict=True):
        expect_planted(schedule, rank, place)
    assert schedule.alive == [sound]
    expect_planted(schedule, schedule.add(fault=late, at_step=0), late)
    sound.expect("committed")


def expect_planted(schedule: Schedule, rank: Rank, place: str) -> None:
    data = rank.expect("raised")
    assert (data["error"], data["text"]) == ("Planted", place)
    schedule.alive.remove(rank)


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_members_that_raise_leave_and_the_others_train_on(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    run = run_of(cluster, strategy, len(PLACES))
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=1)
        lose_all_but_one(schedule)
        check_same_weights(schedule.finish(), run, TOLERANCE)


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
def test_members_that_raise_in_a_round_leave_and_the_others_repeat_it(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    run = LocalRun(
        coordinator=cluster.coordinator,
        job=f"raises-{secrets.token_hex(4)}",
        member_id="",
        desired_members=len(PLACES),
        strategy=strategy,
        optimizer="sgd",
        every_steps=4,
        epochs=EPOCHS,
        dtype=torch.float64,
    )
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=1, body=local_sgd_bodies.train)
        lose_all_but_one(schedule)
        finished = schedule.finish()
        for rank in schedule.all:
            rank.drain()
        expected = twin_of(schedule.all, run, finished["step"]).weights()
        for name, tensor in expected.items():
            own = torch.tensor(finished["weights"][name], dtype=tensor.dtype)
            assert torch.allclose(own, tensor, rtol=0, atol=TOLERANCE), name


def fate(rank: Rank, before: int) -> Mapping[str, Any]:
    """Follow a member until it raises, or commits in a later generation than `before`; return that
    report."""
    while True:
        kind, data = rank.expect_any("raised", "committed")
        if kind == "raised" or data["generation"] > before:
            return {"kind": kind, **data}


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_that_is_not_finite_stops_the_step_of_all(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    """The loss is finite, and only some members' parts of the gradient are hit: no member commits
    the step. The member at fault gets the error, as does every member that computed with its
    values; all others train on."""
    num_members = 4 if strategy == "fsdp-tensor" else 3
    run = run_of(cluster, strategy, num_members)
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=1)
        others = [schedule.add() for _ in range(num_members - 1)]
        faulty = schedule.add(fault="gradient", at_step=15)
        assert faulty.expect("raised")["error"] == "NonFiniteGradient"
        at = faulty.seen[-2][1]
        fates = [fate(rank, before=at["generation"]) for rank in others]
        for rank in others:
            committed = [data for kind, data in rank.seen if kind == "committed"]
            by_then = [data for data in committed if data["generation"] <= at["generation"]]
            assert max(data["step"] for data in by_then) == at["step"] - 1
        errors = [each["error"] for each in fates if each["kind"] == "raised"]
        assert set(errors) <= {"NonFiniteGradient"}, fates
        if strategy == "fsdp-tensor":
            # The error is that of the other member of its tensor group, with the same samples.
            assert len(errors) == 1
            (peer,) = [rank for rank, each in zip(others, fates, strict=True) if "error" in each]
            schedule.alive.remove(peer)
            errors = []
        if strategy not in ("tensor", "pipeline"):
            assert not errors, "the fault is one member's own"
            schedule.alive.remove(faulty)
            check_same_weights(schedule.finish(), run, TOLERANCE)
