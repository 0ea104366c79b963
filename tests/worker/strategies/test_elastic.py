"""Each strategy over kills, joins and drains: the result is that of one process.

Real members, a real coordinator, real signals; the changes are drawn from a seed.
"""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.members.elastic_schedule import Schedule, check_each_sample_once, check_same_weights
from support.processes.ranks import Ranks
from support.training.elastic_bodies import Elastic, order

from shoal_client.local.cluster import LocalCluster

TOLERANCE = 1e-5
"""fp32, a few hundred steps; only the order of additions differs."""
CASES: list[Any] = [
    ("ddp", {}, "sgd"),
    ("zero1", {}, "adamw"),
    ("zero2", {}, "sgd"),
    ("fsdp", {}, "adamw"),
    ("tensor", {"min_split_bytes": 0}, "adamw"),
    ("pipeline", {}, "sgd"),
    pytest.param("hybrid", {"min_split_bytes": 0}, "adamw", marks=pytest.mark.nightly),
]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("strategy", "options", "optimizer"), CASES, ids=str)
def test_changes_leave_no_trace_in_the_weights(
    cluster: LocalCluster,
    tmp_path: Path,
    strategy: str,
    options: Mapping[str, Any],
    optimizer: str,
) -> None:
    run = Elastic(
        coordinator=cluster.coordinator,
        job=f"{strategy}-{secrets.token_hex(4)}",
        member_id="",
        min_members=1,
        desired_members=3,
        batch_size=24,
        strategy=strategy,
        options=options,
        optimizer=optimizer,
    )
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=5)
        schedule.start(3)
        schedule.kill()
        schedule.join()
        schedule.drain()
        schedule.run(2, smallest=2, largest=4)
        check_no_trace(schedule, run)


@pytest.mark.timeout(180)
def test_a_mesh_that_changes_its_shape_leaves_no_trace(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Two stages of two splits, then three stages, and again: nobody has all of anything, so what
    the killed one held comes from a copy. The even mesh of copies, with more changes: nightly."""
    run = Elastic(
        coordinator=cluster.coordinator,
        job=f"mesh-{secrets.token_hex(4)}",
        member_id="",
        min_members=1,
        desired_members=4,
        batch_size=24,
        strategy="hybrid",
        options={"min_split_bytes": 0, "max_rank_bytes": 1},
        optimizer="adamw",
    )
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=5)
        schedule.start(4)
        schedule.kill()
        schedule.join()
        schedule.drain()
        check_no_trace(schedule, run)


def check_no_trace(schedule: Schedule, run: Elastic) -> None:
    """Let all stop: the weights are those of one process, and each sample was taken once."""
    finished = schedule.finish()
    check_same_weights(finished, run, TOLERANCE)
    for rank in schedule.all:
        rank.drain()
    check_each_sample_once(schedule.all, finished["step"], order(run.batch_size))
