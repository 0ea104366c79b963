"""Jobs that shrink to a single member at once, and grow again."""

import signal
from pathlib import Path

import pytest
from support.members.elastic_schedule import Schedule, check_no_trace, elastic
from support.processes.ranks import Ranks

from shoal.checkpoint.directory import complete
from shoal_client.local.cluster import LocalCluster

TOLERANCE = 1e-5
NUM_MEMBERS = {"ddp": 7, "fsdp": 7, "zero2": 7, "pipeline": 4}
"""Number of members; for a pipeline, as many as there are layers."""
CASES = [
    pytest.param(
        strategy,
        how,
        marks=pytest.mark.long if (strategy, how) == ("fsdp", "drained") else pytest.mark.nightly,
    )
    for strategy in NUM_MEMBERS
    for how in ("drained", "killed")
]


@pytest.mark.parametrize(("strategy", "how"), CASES)
def test_all_but_one_leave_at_once_and_as_many_join_again(
    cluster: LocalCluster, tmp_path: Path, strategy: str, how: str
) -> None:
    """The members are drained at the same moment, and hand over their state to the one that stays.
    Or they are killed, and a checkpoint has their parts of a cut model. Regression: each drained
    member handed its part to one that left, too."""
    killed, num_members = how == "killed", NUM_MEMBERS[strategy]
    run = elastic(
        cluster,
        "shrinks",
        desired_members=num_members,
        strategy=strategy,
        batch_size=28,
        checkpoints=str(tmp_path / "checkpoints") if killed else "",
    )
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=5)
        schedule.start(num_members)
        while killed and not complete(tmp_path / "checkpoints"):
            schedule.alive[0].expect("committed")
        gone, schedule.alive = schedule.alive[:-1], schedule.alive[-1:]
        for rank in gone:
            rank.send_signal(signal.SIGKILL if killed else signal.SIGTERM)
        for rank in gone:
            if killed:
                assert rank.join() == -signal.SIGKILL
            else:
                assert rank.expect("exits")["code"] == 143
        schedule.await_change()
        before = schedule.generation()
        for rank in [schedule.add() for _ in gone]:
            rank.expect("committed")
        schedule.await_change(before)
        check_no_trace(schedule, run, TOLERANCE)
