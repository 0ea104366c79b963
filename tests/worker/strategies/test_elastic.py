"""Each strategy over kills, joins and drains: the result is that of one process.

Real members, a real coordinator, real signals; the changes are drawn from a seed.
"""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from elastic_bodies import Elastic, order
from elastic_schedule import Schedule, check_each_sample_once, check_same_weights
from ranks import Ranks

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
        finished = schedule.finish()
        check_same_weights(finished, run, TOLERANCE)
        for rank in schedule.all:
            rank.drain()
        check_each_sample_once(schedule.all, finished["step"], order(run.batch_size))
