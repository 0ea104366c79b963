"""Local SGD over losses, joins and drains: real members, a real coordinator, real signals."""

import secrets
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.members.elastic_schedule import Schedule, check_each_sample_once
from support.members.held_members import HeldMembers
from support.oracles.local_sgd_twin import EPOCHS, order
from support.processes.ranks import Rank, Ranks
from support.training import local_sgd_bodies
from support.training.local_sgd_bodies import LocalRun, num_steps_of, twin_of

from shoal_client.local.cluster import LocalCluster

TOLERANCE = 1e-5
"""Limit for fp32 after some dozens of steps; only the order of additions differs."""


def run_of(cluster: LocalCluster, **changes: Any) -> LocalRun:
    settings: dict[str, Any] = {
        "coordinator": cluster.coordinator,
        "job": f"local-{secrets.token_hex(4)}",
        "member_id": "",
        "desired_members": 3,
        "strategy": "diloco",
        "every_steps": 5,
    }
    return LocalRun(**(settings | changes))


def start(ranks: Ranks, run: LocalRun, names: str) -> list[Rank]:
    return [ranks.start(local_sgd_bodies.train, replace(run, member_id=name)) for name in names]


def check_equal_to_the_twin(
    crew: Sequence[Rank],
    finished: Sequence[Mapping[str, Any]],
    run: LocalRun,
    num_steps: int | None = None,
) -> None:
    num_steps = num_steps_of(run) if num_steps is None else num_steps
    expected = twin_of(crew, run, num_steps).weights()
    for each in finished:
        assert each["step"] == num_steps
        for name, tensor in expected.items():
            own = torch.tensor(each["weights"][name], dtype=tensor.dtype)
            assert torch.allclose(own, tensor, rtol=0, atol=TOLERANCE), name


@pytest.mark.sampled()
@pytest.mark.parametrize("num_more", [0, 2])
@pytest.mark.parametrize(("strategy", "optimizer"), [("local-sgd", "sgd"), ("diloco", "adamw")])
def test_changes_affect_only_which_members_train_each_round(
    cluster: LocalCluster, tmp_path: Path, strategy: str, optimizer: str, num_more: int
) -> None:
    """Kills, joins and drains are drawn from a seed. The twin knows only the members of each round.

    Numbers are in double precision: there are thousands of rounds, and in each of them fp32 would
    round differently.
    """
    with Ranks() as ranks:
        run = run_of(
            cluster,
            strategy=strategy,
            optimizer=optimizer,
            every_steps=3,
            epochs=EPOCHS,
            dtype=torch.float64,
        )
        schedule = Schedule(ranks, run, tmp_path, seed=5, body=local_sgd_bodies.train)
        schedule.start(3)
        schedule.kill()
        schedule.join()
        schedule.drain()
        schedule.run(num_more, smallest=2, largest=4)
        finished = schedule.finish()
        for rank in schedule.all:
            rank.drain()
        check_equal_to_the_twin(schedule.all, [finished], run, finished["step"])
        check_each_sample_once(schedule.all, finished["step"], order(run.batch_size))


@pytest.mark.parametrize(
    ("strategy", "fault", "at_step"),
    [
        ("diloco", "kill in forward", 7),
        ("local-sgd", "kill in backward", 11),
        ("diloco", "kill in optimizer", 9),
        pytest.param("local-sgd", "stop in backward", 8, marks=pytest.mark.long),
    ],
)
def test_survivors_go_back_to_the_start_of_the_round_and_train_it_again(
    cluster: LocalCluster, strategy: str, fault: str, at_step: int
) -> None:
    """The loss may come anywhere in a round; at step 9 the others wait at its end."""
    with Ranks() as ranks:
        run = run_of(cluster, strategy=strategy)
        crew = [
            *start(ranks, run, "ab"),
            *start(ranks, replace(run, fault=fault, at_step=at_step), "c"),
        ]
        finished = [rank.expect("finished") for rank in crew[:2]]
        assert [rank.join() for rank in crew[:2]] == [0, 0]
        if fault.startswith("stop"):
            crew[2].send_signal(signal.SIGKILL)
        assert crew[2].join() == -signal.SIGKILL
        crew[2].drain()
        check_equal_to_the_twin(crew, finished, run)
        for rank in crew[:2]:
            generations = {data["generation"] for kind, data in rank.seen if kind == "tried"}
            assert len(generations) == 2


@pytest.mark.long
def test_a_planned_change_ends_the_round_where_the_generation_stops(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """A member joins and another drains within one long round: no step is trained twice."""
    with Ranks() as ranks:
        run = run_of(cluster, desired_members=2, every_steps=10_000, epochs=400)
        held = HeldMembers(ranks, local_sgd_bodies.train, run, tmp_path, at_step=7)
        crew = [*held.crew, *start(ranks, run, "c")]
        crew[2].expect("entering")
        held.release()
        for _ in range(5):
            crew[2].expect("committed")
        crew[0].send_signal(signal.SIGTERM)
        assert crew[0].expect("exits")["code"] == 143
        finished = [rank.expect("finished") for rank in crew[1:]]
        check_equal_to_the_twin(crew, finished, run)
        assert len({data["generation"] for kind, data in crew[1].seen if kind == "tried"}) == 3
    for rank in crew:
        tried = [data["step"] for kind, data in rank.seen if kind == "tried"]
        assert tried == list(range(tried[0], tried[0] + len(tried)))
