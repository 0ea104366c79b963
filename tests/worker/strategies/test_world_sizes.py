"""A roster that a strategy cannot train with is refused before any member acts on it."""

from pathlib import Path

from support.members.elastic_schedule import Schedule, check_same_weights, elastic
from support.processes.ranks import Ranks

from shoal_client.local.cluster import LocalCluster

TOLERANCE = 1e-5


def test_a_member_too_many_for_the_mesh_does_not_disturb_the_others(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Two members form two stages. A third fits no such mesh, and its error says which world sizes
    would."""
    run = elastic(
        cluster,
        "mesh",
        desired_members=2,
        strategy="hybrid",
        options={"pipeline": 2, "data": 1, "tensor": 1},
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
