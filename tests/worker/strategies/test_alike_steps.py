"""Members that would take a step in different ways are all refused, by name, before any member
commits it."""

import secrets
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.members.elastic_schedule import Schedule
from support.processes.ranks import Rank, Ranks
from support.training import step_bodies
from support.training.step_bodies import Steps

from shoal_client.local.cluster import LocalCluster

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "tensor", "pipeline", "hybrid")
TOLERANCE = 1e-5


def steps(cluster: LocalCluster, strategy: str, **changes: Any) -> Steps:
    options = {"min_split_bytes": 0} if strategy in ("tensor", "hybrid", "fsdp-tensor") else {}
    if strategy in ("local-sgd", "diloco"):
        options = {"every_steps": 4}
    return Steps(
        coordinator=cluster.coordinator,
        job=f"alike-{secrets.token_hex(4)}",
        member_id="",
        strategy=strategy,
        options=options,
        **{"desired_members": 3, "batch_size": 100, **changes},
    )


def reported(schedule: Schedule, error: str) -> list[str]:
    """Check that all members raise `error` with one text; return the texts."""
    found = []
    for rank in schedule.alive:
        _, data = rank.expect_any("raised")
        assert data["error"] == error, data["trace"]
        found.append(data["text"])
    assert len(set(found)) == 1, "not the same on all"
    return found


def all_refused(run: Steps, directory: Path, error: str) -> tuple[str, set[int]]:
    """Return the error's text, the same on all members, and the steps that any of them committed
    before."""
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, directory, seed=1, body=step_bodies.train)
        for _ in range(run.desired_members):
            schedule.add()
        text, *_ = reported(schedule, error)
        return text, committed(schedule.all)


def committed(ranks: list[Rank]) -> set[int]:
    return {data["step"] for rank in ranks for kind, data in rank.seen if kind == "committed"}


def check_weights(finished: Mapping[str, Any], run: Steps, *, scheduled: bool) -> None:
    expected = step_bodies.one_process(run.batch_size, finished["step"], scheduled=scheduled)
    for name, tensor in expected.items():
        own = torch.tensor(finished["weights"][name])
        assert torch.allclose(own, tensor, rtol=0, atol=TOLERANCE), name


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unequal_numbers_of_passes_are_refused_by_name(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    """The error has each member's number of passes. No member commits the step: without the
    additional passes of one member its gradients would be wrong."""
    run = steps(cluster, strategy, parts="more on the first")
    text, steps_before = all_refused(run, tmp_path, "UnequalPasses")
    assert "4 or more by" in text
    assert "3 by" in text
    assert "tensor_split" in text
    assert not steps_before


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_parts_of_a_fixed_size_are_refused_if_shares_differ(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    """Shares of 100 samples on 3 members have 4, 3 and 3 passes with 11 samples in each part."""
    run = steps(cluster, strategy, parts="fixed size", in_one_call=False)
    text, steps_before = all_refused(run, tmp_path, "UnequalPasses")
    assert "4 or more by" in text
    assert not steps_before


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", [*STRATEGIES, "local-sgd"])
def test_equal_numbers_of_passes_add_up_to_the_gradient_of_the_batch(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    """Parts are weighted by their samples: the result is that of one process."""
    options = {"options": {"every_steps": 1}} if strategy == "local-sgd" else {}
    run = steps(cluster, strategy, parts="fixed number", batch_size=34)
    run = replace(run, **options)
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=1, body=step_bodies.train)
        schedule.start(3)
        if strategy != "local-sgd":
            check_weights(schedule.finish(), run, scheduled=False)
        else:
            schedule.alive[0].expect("committed")


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero2", "tensor", "hybrid"])
def test_a_step_is_taken_again_if_a_member_is_lost_between_two_parts(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    """The others take the whole step again, cut for the members that are left."""
    run = steps(cluster, strategy, parts="by the session", batch_size=34, in_one_call=False)
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=1, body=step_bodies.train)
        schedule.add(dies_at=3)
        schedule.start(2)
        victim = schedule.alive.pop(0)
        assert victim.join() == -signal.SIGKILL
        schedule.join()
        check_weights(schedule.finish(), run, scheduled=False)


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "zero1", "tensor"])
def test_a_scaler_is_rolled_back_with_a_step_and_given_to_joiners(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    """The scale is that of as many committed steps, and scaling changes no weight."""
    run = steps(cluster, strategy, scales=True, batch_size=34, in_one_call=False)
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=1, body=step_bodies.train)
        schedule.start(3)
        schedule.kill()
        schedule.join()
        finished = schedule.finish()
        assert finished["scale"] == 8.0 * 2.0 ** (finished["step"] // 20)
        check_weights(finished, run, scheduled=False)


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", [*STRATEGIES, "local-sgd", "diloco"])
def test_hyperparameters_that_differ_are_refused_by_field_and_member(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    """The refusal comes in the first step (under local SGD: round) in which they differ; no member
    commits it."""
    run = steps(cluster, strategy, rates="own")
    text, steps_before = all_refused(run, tmp_path, "HyperparametersDiffer")
    assert "in step 5;" in text
    assert "lr of group 0: 0.02 by" in text
    assert "0.0125 by" in text
    assert "batch.step" in text
    round_ends = 7 if strategy == "local-sgd" else 99
    assert max(steps_before) <= (4 if strategy in STRATEGIES else round_ends)


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("strategy", "clips"),
    [
        *((strategy, clips) for strategy in STRATEGIES for clips in ("own", "but one")),
        *((strategy, "own by torch") for strategy in ("ddp", "zero1", "zero2", "fsdp")),
    ],
)
def test_members_that_clip_to_different_norms_are_refused_by_member(
    cluster: LocalCluster, tmp_path: Path, strategy: str, clips: str
) -> None:
    """The same holds if one member does not clip at all: each would apply other gradients."""
    run = steps(cluster, strategy, clips=clips)
    text, steps_before = all_refused(run, tmp_path, "HyperparametersDiffer")
    assert "in step 5;" in text
    assert "max_norm of clip_grad_norm: [0.5] by" in text
    assert ("None by" if clips == "but one" else "[0.25] by") in text
    assert max(steps_before) <= 4


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_one_member_may_ask_for_the_norm_alone(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    """A member that logs may ask for it: clipping to infinity changes nothing."""
    run = steps(cluster, strategy, clips="asks for the norm")
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=1, body=step_bodies.train)
        schedule.start(3)
        check_weights(schedule.finish(), run, scheduled=False)


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("strategy", "num_members"), [("ddp", 3), ("zero2", 3), ("fsdp", 3), ("fsdp-tensor", 4)]
)
def test_a_member_that_drops_a_gradient_alone_is_named(
    cluster: LocalCluster, tmp_path: Path, strategy: str, num_members: int
) -> None:
    """A script may drop gradients to skip a step in which its own loss is large."""
    run = steps(cluster, strategy, clips="drops", desired_members=num_members)
    text, steps_before = all_refused(run, tmp_path, "InvalidSpec")
    assert "different parameters in step 5;" in text
    assert "parameter.grad = None" in text
    assert max(steps_before) <= 4


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "local-sgd"])
def test_a_schedule_that_a_joiner_began_anew_is_refused(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    """The joiner's first step is right, because it has the others' groups. Its own schedule is
    not."""
    run = steps(
        cluster,
        strategy,
        rates="schedule by its own count, if committed",
        desired_members=2,
    )
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=1, body=step_bodies.train)
        schedule.start(2)
        while max(committed(schedule.all)) < 12:
            schedule.alive[0].expect("committed")
        joiner = schedule.add()
        assert "lr of group 0" in reported(schedule, "HyperparametersDiffer")[0]
        first = next(data for kind, data in joiner.seen if kind == "tried")
        others = [
            data["lr"]
            for rank in schedule.all
            for kind, data in rank.seen
            if kind == "tried" and data["step"] == first["step"]
        ]
        assert len(others) >= 3
        assert set(others) == {first["lr"]} != {0.02}


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_a_rate_that_follows_from_the_step_is_exact_over_changes(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    run = steps(cluster, strategy, rates="step", batch_size=24)
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=2, body=step_bodies.train)
        schedule.start(3)
        schedule.kill()
        schedule.join()
        schedule.drain()
        check_weights(schedule.finish(), run, scheduled=True)


def test_a_schedule_that_counts_committed_steps_is_exact_over_a_drain(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    run = steps(cluster, "ddp", rates="schedule if committed", batch_size=24, desired_members=2)
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=3, body=step_bodies.train)
        schedule.start(2)
        schedule.drain()
        check_weights(schedule.finish(), run, scheduled=True)


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_step_that_is_taken_again_with_another_rate_is_refused(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    """A schedule that is stepped even if the step did not happen has counted it twice."""
    run = steps(cluster, strategy, rates="schedule", batch_size=24, desired_members=2)
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=4, body=step_bodies.train)
        schedule.start(2)
        schedule.add(fault="never").expect("committed")
        victim = schedule.alive.pop()
        victim.process.kill()
        victim.join()
        for rank in schedule.alive:
            _, data = rank.expect_any("raised")
            assert data["error"] == "HyperparametersDiffer", data["trace"]
