"""A member whose code raises: it leaves with its error, and the others train on, exactly."""

import secrets
from pathlib import Path

import pytest
from elastic_bodies import Elastic
from elastic_schedule import Schedule, check_same_weights
from ranks import Ranks

from shoal_client.local.cluster import LocalCluster

TOLERANCE = 1e-5
CASES = [
    ("ddp", ("forward", "backward", "hook")),
    ("zero1", ("backward", "optimizer", "hook")),
    ("fsdp", ("forward", "backward", "optimizer")),
    ("tensor", ("forward", "backward", "hook")),
    ("pipeline", ("forward", "backward", "optimizer")),
]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("strategy", "places"), CASES, ids=str)
def test_whoever_raises_leaves_and_the_others_train_on(
    cluster: LocalCluster, tmp_path: Path, strategy: str, places: tuple[str, ...]
) -> None:
    """One member after the other raises: in forward, in backward, in the optimizer or behind it."""
    run = Elastic(
        coordinator=cluster.coordinator,
        job=f"raises-{secrets.token_hex(4)}",
        member_id="",
        desired_members=len(places) + 1,
        batch_size=24,
        strategy=strategy,
    )
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=1)
        faulty = [
            schedule.add(fault=place, at_step=15 * (number + 1))
            for number, place in enumerate(places)
        ]
        sound = schedule.add()
        for place, rank in zip(places, faulty, strict=True):
            data = rank.expect("raised")
            assert (data["error"], data["text"]) == ("Planted", place)
            schedule.alive.remove(rank)
        assert schedule.alive == [sound]
        sound.expect("committed")
        check_same_weights(schedule.finish(), run, TOLERANCE)
