"""A model whose output shares the embedding's weight, under every strategy.

It stays one parameter: its gradient is the sum of both uses, the optimizer steps it once, and the
model's state has it under each of its names.
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
"""fp32; only the order of additions differs."""
CASES: list[Any] = [
    ("fsdp", {"min_group_bytes": 0}, "adamw"),
    ("tensor", {"min_split_bytes": 0}, "sgd"),
    pytest.param("zero2", {}, "adamw", marks=pytest.mark.nightly),
    pytest.param("zero3", {}, "sgd", marks=pytest.mark.nightly),
    pytest.param("zero1", {}, "adamw", marks=pytest.mark.nightly),
    pytest.param("ddp", {}, "adamw", marks=pytest.mark.nightly),
    pytest.param("pipeline", {}, "adamw", marks=pytest.mark.nightly),
    pytest.param("hybrid", {"min_split_bytes": 0}, "sgd", marks=pytest.mark.nightly),
]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("strategy", "options", "optimizer"), CASES, ids=str)
def test_a_tied_gpt_survives_kills_joins_and_a_drain(
    cluster: LocalCluster,
    tmp_path: Path,
    strategy: str,
    options: Mapping[str, Any],
    optimizer: str,
) -> None:
    run = Elastic(
        coordinator=cluster.coordinator,
        job=f"tied-{strategy}-{secrets.token_hex(4)}",
        member_id="",
        min_members=1,
        desired_members=3,
        batch_size=24,
        strategy=strategy,
        options=options,
        optimizer=optimizer,
        model="gpt",
    )
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=5)
        schedule.start(3)
        schedule.kill()
        schedule.join()
        schedule.kill()
        schedule.join()
        schedule.drain()
        schedule.join()
        schedule.kill()
        finished = schedule.finish()
        assert finished["weights"]["lm_head.weight"] == finished["weights"]["wte.weight"]
        check_same_weights(finished, run, TOLERANCE)
        for rank in schedule.all:
            rank.drain()
        check_each_sample_once(schedule.all, finished["step"], order(run.batch_size))
