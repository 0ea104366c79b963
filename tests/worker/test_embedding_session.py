"""A factorisation machine on real servers: its rows are pushed in the step, and none is lost."""

import signal

import pytest
from support.processes.ranks import Ranks
from support.training import embedding_bodies
from support.training.embedding_bodies import NUM_CLICKS, NUM_IDS, Training

from shoal_client.local.cluster import LocalCluster


@pytest.mark.long
def test_a_factorisation_machine_learns_on_real_servers(cluster: LocalCluster) -> None:
    """Rows are on the server; the loss falls, and every id that was seen has a row."""
    with Ranks() as ranks:
        run = Training(coordinator=cluster.coordinator, job="clicks", member_id="a")
        member = ranks.start(embedding_bodies.train, run)
        message = member.expect("finished")
    assert message["rows_made"] == NUM_IDS
    assert message["rows_applied"] > NUM_IDS
    assert message["last_loss"] < 0.7 * message["first_loss"]
    assert message["num_samples"] == 2 * NUM_CLICKS


def test_a_killed_member_costs_no_row(cluster: LocalCluster) -> None:
    """The other member trains on with the rows of both."""
    with Ranks() as ranks:
        crew = [
            ranks.start(
                embedding_bodies.train,
                Training(
                    coordinator=cluster.coordinator,
                    job="clicks-killed",
                    member_id=name,
                    desired_members=2,
                    dies_at_step=3 if name == "b" else None,
                ),
            )
            for name in "ab"
        ]
        message = crew[0].expect("finished")
        assert crew[1].join() == -signal.SIGKILL
    assert message["num_rows_known"] == NUM_IDS
    assert message["last_loss"] < 0.8 * message["first_loss"]
