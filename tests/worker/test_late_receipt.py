"""A step that one member has committed is committed by all, even if that member leaves at once."""

import secrets
from typing import Any

import pytest
from support.members import late_receipt
from support.processes.ranks import Rank, Ranks
from support.training.rank_bodies import Run

from shoal_client.local.cluster import LocalCluster


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.long)])
@pytest.mark.parametrize("then", ["leaves", pytest.param("kill", marks=pytest.mark.long)])
def test_a_member_that_learns_late_of_a_committed_step_commits_it_too(
    cluster: LocalCluster, transport: str, then: str
) -> None:
    """The late member does not take the step again alone: the result would be equal up to rounding,
    but not to the last bit. `transport`: if members on one machine exchange votes in shared
    memory."""
    job = f"late-{secrets.token_hex(4)}"

    def run(member_id: str, fault: str) -> Run:
        return Run(
            coordinator=cluster.coordinator,
            job=job,
            member_id=member_id,
            desired_members=2,
            fault=fault,
            at_step=3,
        )

    with Ranks() as ranks:
        body = late_receipt.train
        first = ranks.start(body, run("a", "" if then == "leaves" else then), transport)
        late = ranks.start(body, run("b", "receives late"), transport)
        ended = late.expect("finished")
        assert late.join() == 0
        if then == "leaves":
            assert first.expect("finished") == ended
    assert ended["step"] == 4
    assert tried(late) == [(step, 2) for step in range(4)]


def tried(rank: Rank) -> list[tuple[Any, Any]]:
    """Return the member's steps, each with its number of members."""
    return [(data["step"], data["world_size"]) for kind, data in rank.seen if kind == "tried"]
