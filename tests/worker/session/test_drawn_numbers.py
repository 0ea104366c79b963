"""Random numbers of a script under ddp: replicas stay equal, and shares have noise of their own."""

import secrets

import pytest
from support.processes.ranks import Ranks
from support.training import drawing_bodies
from support.training.drawing_bodies import Drawing

from shoal_client.local.cluster import LocalCluster

OWN = {"before the step", "in the step", "after an update"}
"""Points at which members draw for their own samples."""


@pytest.mark.parametrize("has_batches", [True, False], ids=["session.batches", "own batches"])
def test_replicas_stay_equal_if_updates_and_scripts_draw_numbers(
    cluster: LocalCluster, has_batches: bool
) -> None:
    """Members draw the same for updates and between steps, and different numbers for their
    samples. In a loop without `session.batches`, all of the script's own draws are for samples."""
    run = Drawing(
        coordinator=cluster.coordinator,
        job=f"drawing-{secrets.token_hex(4)}",
        member_id="",
        min_members=2,
        desired_members=2,
        batch_size=24,
        has_batches=has_batches,
    )
    with Ranks() as ranks:
        members = [
            ranks.start(drawing_bodies.train, Drawing(**{**vars(run), "member_id": f"m{number}"}))
            for number in range(2)
        ]
        one, other = [each.expect("finished") for each in members]
    assert one["weights"] == other["weights"]
    for point, numbers in one["drawn"].items():
        common = numbers if has_batches and point not in OWN else []
        assert [each for each in numbers if each in other["drawn"][point]] == common, point
        assert len(set(numbers)) == len(numbers), point
