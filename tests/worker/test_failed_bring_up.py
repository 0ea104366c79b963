"""A member whose bring-up fails: real members, and the cost to the others."""

import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.network import http
from support.processes.load import unhurried
from support.processes.ranks import Rank, Ranks
from support.training import state_lost_bodies
from support.training.state_lost_bodies import Run

from shoal_client.local.cluster import LocalCluster

LONGEST_GAP_S = 5.0
"""Longest time between two steps of the training members; on an idle machine it is a tenth."""


def start(ranks: Ranks, run: Run, names: str) -> list[Rank]:
    return [ranks.start(state_lost_bodies.train, replace(run, member_id=name)) for name in names]


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_others_train_on_and_the_member_gets_its_own_error(
    cluster: LocalCluster, strategy: str
) -> None:
    """The member has three tries, reported under its own name. No other member is blamed, and no
    step is rolled back."""
    run = Run(coordinator=cluster.coordinator, job=f"clumsy-{strategy}", strategy=strategy)
    with Ranks() as ranks:
        a, b = start(ranks, run, "ab")
        for rank in (a, b):
            rank.expect("stepped")
        (c,) = start(ranks, replace(run, num_failures=99), "c")
        last_s, gap_s, step = time.monotonic(), 0.0, 0
        while not c.seen:
            step = a.expect("stepped")["step"]
            gap_s, last_s = max(gap_s, time.monotonic() - last_s), time.monotonic()
            c.catch_up()
        kind, data = c.seen[0]
        assert (kind, data["error"]) == ("raised", "BringUpFailed"), data
        assert "OutOfMemoryError: CUDA out of memory" in data["text"]
        assert gap_s < unhurried(LONGEST_GAP_S)
        after = a.expect("stepped")
        assert after["step"] > step
        assert "raised" not in [*a.kinds(), *b.kinds()]
    shown = http.get(f"{cluster.http_url}/api/v1/jobs/{run.job}/events?limit=1000").json()
    events = [each for each in shown["events"] if each["kind"] == "bring_up_failed"]
    assert [each["member_id"] for each in events] == ["c"] * 3
    assert "try 3 of 3" in events[-1]["reason"]


def failures_of(cluster: LocalCluster, run: Run) -> list[str]:
    """Return the reasons of failed bring-ups; only member a may have caused them."""
    shown = http.get(f"{cluster.http_url}/api/v1/jobs/{run.job}/events?limit=1000").json()
    events = [each for each in shown["events"] if each["kind"] == "bring_up_failed"]
    assert {each["member_id"] for each in events} <= {"a"}
    return [each["reason"] for each in events]


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("low", [1, 2])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_member_that_cannot_hand_on_its_state_goes_on_with_it(
    cluster: LocalCluster, tmp_path: Path, strategy: str, low: int
) -> None:
    """Newcomers are rejected with the reason, however often they come, even if the job needs
    them."""
    run = Run(
        coordinator=cluster.coordinator,
        job=f"keeps-{strategy}-{low}",
        strategy=strategy,
        low=low,
        desired=low,
        gives_nothing=str(tmp_path / "fails"),
    )
    with Ranks() as ranks:
        a, *rest = start(ranks, run, "ab"[:low])
        while a.expect("stepped")["step"] < 40:
            pass
        for rank in rest:
            rank.send_signal(signal.SIGKILL)
            rank.join()
        (tmp_path / "fails").touch()
        (c,) = start(ranks, run, "c")
        give_up_s = time.monotonic() + unhurried(60.0)
        while len(failures := failures_of(cluster, run)) < 3:
            assert time.monotonic() < give_up_s, (failures, a.seen[-1], c.seen)
            a.catch_up()
            time.sleep(0.1)
        assert all(
            "UnsupportedOptimizer: the state of Hist cannot be handed" in e for e in failures
        )
        why = http.get(f"{cluster.http_url}/api/v1/jobs/{run.job}/members/c/why").json()
        assert "a could not bring it up: UnsupportedOptimizer" in why["waiting_for"]
        if low == 1:
            a.expect("stepped")
        (tmp_path / "fails").unlink()
        # With a killed member, steps since the newest copy may be lost, but no others.
        assert c.expect("stepped", timeout_s=unhurried(60.0))["step"] > 2
        a.catch_up()
        assert "raised" not in a.kinds()


def test_a_member_whose_second_bring_up_succeeds_trains_with_the_others(
    cluster: LocalCluster,
) -> None:
    """The second try runs in the same process."""
    run = Run(coordinator=cluster.coordinator, job="second-try")
    with Ranks() as ranks:
        (a,) = start(ranks, replace(run, desired=1), "a")
        a.expect("stepped")
        (c,) = start(ranks, replace(run, desired=1, num_failures=1), "c")
        assert c.expect("stepped")["step"] > 1


@pytest.mark.long
def test_a_member_that_stops_during_the_exchange_of_state_delays_no_other(
    cluster: LocalCluster,
) -> None:
    """The others wait in shared memory, where no connection of the group ends; they continue
    without the stopped member."""
    run = Run(coordinator=cluster.coordinator, job="stops-amid", strategy="fsdp", exchange="shared")
    with Ranks() as ranks:
        a, b = start(ranks, run, "ab")
        for rank in (a, b):
            rank.expect("stepped")
        start(ranks, replace(run, exchange="stops"), "c")
        for rank in (a, b):
            while rank.expect("stepped")["generation"] < 3:
                pass
