"""A step that one member has committed is committed by all, also where that one leaves at once."""

import secrets
from typing import Any

import pytest
from support.members import late_hearing
from support.processes.ranks import Rank, Ranks
from support.training.rank_bodies import Run

from shoal_client.local.cluster import LocalCluster


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.long)])
@pytest.mark.parametrize("then", ["leaves", pytest.param("kill", marks=pytest.mark.long)])
def test_a_member_that_has_not_heard_of_a_step_yet_takes_it_with_one_that_is_gone(
    cluster: LocalCluster, transport: str, then: str
) -> None:
    """Else it would take the step once more, alone: the same up to rounding, but not to the last
    bit. `transport`: whether members on one machine tell each other in memory."""
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
        body = late_hearing.train
        first = ranks.start(body, run("a", "" if then == "leaves" else then), transport)
        late = ranks.start(body, run("b", "hears late"), transport)
        ended = late.expect("finished")
        assert late.join() == 0
        if then == "leaves":
            assert first.expect("finished") == ended
    assert ended["step"] == 4
    assert tried(late) == [(step, 2) for step in range(4)]


def tried(rank: Rank) -> list[tuple[Any, Any]]:
    """Its steps, and how many took each of them with it."""
    return [(data["step"], data["world_size"]) for kind, data in rank.seen if kind == "tried"]
