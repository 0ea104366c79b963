"""Shards whose restore from a snapshot was abandoned become lost."""

from dataclasses import replace

from shoal_server.core.processes import Holder
from shoal_server.core.shards import losses
from shoal_server.core.shards.abandoned_loads import GIVEN_UP_AFTER_S, AbandonedLoads
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment, ShardContent

A = Holder("a", "1")
LOADING = ShardAssignment(shard_id=1, epoch=5, primary=A, content=ShardContent.LOADING)
LOADED = replace(LOADING, shard_id=0, content=ShardContent.PRESENT)
JOB = JobAssignments(job="job", copies=2, shards=(LOADED, LOADING), placement_id="r")


def test_shards_that_another_coordinator_was_restoring_become_lost_after_a_time() -> None:
    """A shard stays as it is while a load may be in progress. Shards that are loaded stay for
    good."""
    loads = AbandonedLoads()
    assert loads.mark_lost(JOB, is_restoring=False, now_s=0.0) == JOB
    assert loads.is_due_soon
    assert loads.mark_lost(JOB, is_restoring=False, now_s=GIVEN_UP_AFTER_S - 0.1) == JOB
    after = loads.mark_lost(JOB, is_restoring=False, now_s=GIVEN_UP_AFTER_S)
    assert losses.lost(after) == [replace(LOADING, epoch=6, content=ShardContent.LOST)]
    assert after.shards[0] == LOADED


def test_shards_that_this_coordinator_restores_do_not_become_lost() -> None:
    loads = AbandonedLoads()
    for now_s in (0.0, 100.0):
        assert loads.mark_lost(JOB, is_restoring=True, now_s=now_s) == JOB
    # The time counts from the end of the restore.
    assert loads.mark_lost(JOB, is_restoring=False, now_s=101.0) == JOB
    assert losses.lost(loads.mark_lost(JOB, is_restoring=False, now_s=111.0))


def test_each_shard_that_is_loaded_begins_the_time_anew() -> None:
    loads = AbandonedLoads()
    both = replace(JOB, shards=(replace(LOADED, content=ShardContent.LOADING), LOADING))
    assert loads.mark_lost(both, is_restoring=False, now_s=0.0) == both
    assert loads.mark_lost(JOB, is_restoring=False, now_s=9.0) == JOB
    assert loads.mark_lost(JOB, is_restoring=False, now_s=18.0) == JOB
    done = replace(JOB, shards=(LOADED,))
    assert loads.mark_lost(done, is_restoring=False, now_s=30.0) == done
    assert not loads.is_due_soon
