"""Processes that a script forks while it is a member of a job are not members of it."""

import secrets

import pytest
from support.members import forking_members
from support.processes.ranks import Ranks
from support.training.rank_bodies import NUM_STEPS, Run

from shoal_client.local.cluster import LocalCluster


@pytest.mark.parametrize("way", ["fork", pytest.param("pool", marks=pytest.mark.long)])
def test_a_script_may_have_processes_of_its_own(cluster: LocalCluster, way: str) -> None:
    """Forked processes end on SIGTERM. Their end does not make a member leave, and
    breaks nothing. Regression: a pool waited forever for processes that took SIGTERM as a request
    to drain."""
    job = f"forks-{secrets.token_hex(4)}"
    with Ranks() as ranks:
        members = [
            ranks.start(
                forking_members.train,
                Run(coordinator=cluster.coordinator, job=job, member_id=name, desired_members=2),
                way,
            )
            for name in "ab"
        ]
        for member in members:
            finished = member.expect("finished")
            assert (finished["step"], finished["generation"]) == (NUM_STEPS, 1)
            assert member.join() == 0
