"""Transfers of state that take longer than the limit for a bring-up without progress."""

import time
from dataclasses import replace

import pytest
from support.processes.ranks import Ranks
from support.training import pause_bodies
from support.training.pause_bodies import LIMITS, Slow

from shoal_client.local.cluster import LocalCluster


def _joins(cluster: LocalCluster, job: str, transfer_s: float) -> None:
    """Let c join a and b, and take over their state in at least `transfer_s`."""
    with Ranks() as ranks:
        run = Slow(
            coordinator=cluster.coordinator,
            job=job,
            member_id="",
            desired_members=2,
            transfer_s=transfer_s,
            stop_file="/nowhere",
        )
        body = pause_bodies.train_slowly
        crew = [ranks.start(body, replace(run, member_id=name)) for name in "ab"]
        for rank in crew:
            assert rank.expect("committed", 120)["world_size"] == 2
        begun_s = time.monotonic()
        crew.append(ranks.start(body, replace(run, member_id="c")))
        first = crew[2].expect("committed", 4 * transfer_s + 60)
        took_s = time.monotonic() - begun_s
        assert took_s > transfer_s
        print(f"c trained {took_s:.1f} s after it was started")
        # in the generation after the one that trained, at the step at which that one stopped
        assert first["world_size"] == 3
        assert first["generation"] == 2
        assert first["step"] > 0
        for rank in crew[:2]:
            while rank.expect("committed")["generation"] == 1:
                pass
            assert rank.seen[-1][1] == first


@pytest.mark.long
def test_a_transfer_of_more_than_twice_the_limit_expels_no_member(quick: LocalCluster) -> None:
    """The newcomer never forms a generation alone, and no generation is tried again."""
    _joins(quick, "slow", 2.2 * LIMITS["--join-s"] / 4)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_transfer_of_more_than_a_minute_expels_no_member(cluster: LocalCluster) -> None:
    """The limits are a cluster's defaults."""
    _joins(cluster, "slow-minute", 66.0)
