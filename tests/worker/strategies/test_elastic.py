"""Kills, joins and drains under each strategy: the result is that of one process.

Members, coordinator and signals are real; the changes are drawn from a seed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.members.elastic_schedule import Schedule, check_no_trace, elastic
from support.processes.ranks import Ranks

from shoal_client.local.cluster import LocalCluster

TOLERANCE = 1e-5
"""Limit for fp32 after a few hundred steps; only the order of additions differs."""
CASES: list[Any] = [
    ("ddp", {}, "sgd"),
    ("zero1", {}, "adamw"),
    ("zero2", {}, "sgd"),
    ("fsdp", {}, "adamw"),
    ("tensor", {"min_split_bytes": 0}, "adamw"),
    ("pipeline", {}, "sgd"),
    pytest.param(("hybrid", {"min_split_bytes": 0}, "adamw"), marks=pytest.mark.nightly),
]


@pytest.mark.sampled()
@pytest.mark.parametrize("num_more", [0, 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_changes_leave_no_trace_in_the_weights(
    cluster: LocalCluster,
    tmp_path: Path,
    case: tuple[str, Mapping[str, Any], str],
    num_more: int,
) -> None:
    """The changes are a kill, a join and a drain, and `num_more` changes drawn from the seed."""
    strategy, options, optimizer = case
    run = elastic(
        cluster,
        strategy,
        desired_members=3,
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
        schedule.run(num_more, smallest=2, largest=4)
        check_no_trace(schedule, run, TOLERANCE)


@pytest.mark.long
def test_copies_that_are_cut_over_members_leave_no_trace(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """The job has two copies over two members each, then one over three, and again two."""
    run = elastic(
        cluster,
        "copies",
        desired_members=4,
        strategy="hsdp",
        options={"shard": 2},
        optimizer="adamw",
    )
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=5)
        schedule.start(4)
        schedule.kill()
        schedule.join()
        schedule.drain()
        check_no_trace(schedule, run, TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize(
    "more", [{}, pytest.param({"sequence": True}, marks=pytest.mark.long)], ids=str
)
def test_split_layers_that_are_cut_over_members_leave_no_trace(
    cluster: LocalCluster, tmp_path: Path, more: Mapping[str, Any]
) -> None:
    """The job has two rows of two splits, then three rows, and again two. The killed member held a
    part of the rows of a part of the layers, which comes from a copy."""
    run = elastic(
        cluster,
        "split",
        desired_members=4,
        strategy="fsdp-tensor",
        options={"min_split_bytes": 0, "min_group_bytes": 200, **more},
        optimizer="adamw",
        model="gpt",
    )
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=5)
        schedule.start(4)
        schedule.kill()
        schedule.join()
        schedule.drain()
        check_no_trace(schedule, run, TOLERANCE)


@pytest.mark.long
def test_a_mesh_that_changes_its_shape_leaves_no_trace(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """The job has two stages of two splits, then three stages, and again two. No member has all of
    anything, so the killed member's part comes from a copy. The even mesh of copies, with more
    changes, is nightly."""
    run = elastic(
        cluster,
        "mesh",
        desired_members=4,
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
        check_no_trace(schedule, run, TOLERANCE)
