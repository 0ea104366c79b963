"""A roster that a strategy cannot train with is refused before any member acts on it."""

from pathlib import Path
from typing import Any

import pytest
from support.members.elastic_schedule import Schedule, check_same_weights, elastic
from support.processes.ranks import Ranks

from shoal_client.local.cluster import LocalCluster

TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("strategy", "model", "options"),
    [
        ("hybrid", "layers", {"pipeline": 2, "data": 1, "tensor": 1}),
        pytest.param("tensor", "encoder", {"plan": {"self_attn": "heads"}}, marks=pytest.mark.long),
        pytest.param(
            "fsdp-tensor",
            "encoder",
            {"plan": {"self_attn": "heads"}, "tensor": 3},
            marks=pytest.mark.long,
        ),
    ],
    ids=["mesh", "heads", "heads of groups"],
)
def test_a_member_too_many_does_not_disturb_the_others(
    cluster: LocalCluster, tmp_path: Path, strategy: str, model: str, options: dict[str, Any]
) -> None:
    """Two members form two stages, or each has two of four heads. A third fits neither; its error
    names the world size."""
    run = elastic(
        cluster, "size", desired_members=2, strategy=strategy, model=model, options=options
    )
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=1)
        schedule.start(2)
        surplus = schedule.add()
        schedule.alive.remove(surplus)
        refused = surplus.expect("raised")
        assert refused["error"] == "ProposalConflict", refused["trace"]
        assert "world_size" in refused["text"], refused["text"]
        for rank in schedule.alive:
            assert rank.expect("committed")["generation"] == 1
        check_same_weights(schedule.finish(), run, TOLERANCE)
