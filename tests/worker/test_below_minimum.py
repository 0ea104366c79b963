"""Jobs whose members fall below the minimum: those that hold the state wait, for any time."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.members.elastic_schedule import Schedule, check_no_trace, elastic
from support.network import http
from support.processes.load import unhurried
from support.processes.ranks import Ranks

from shoal_client.cli import main
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.local.keeper import RestartPolicy

JOIN_S = 10.0
LIMITS = {"--heartbeat-s": 0.4, "--collective-s": 4.0, "--join-s": JOIN_S}
TOLERANCE = 1e-5
AT_ONCE_S = 10.0
"""Limit that leaves a newcomer time for its imports and the bring-up."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    config = LocalClusterConfig(
        directory=tmp_path / "cluster",
        num_parameter_servers=0,
        limits=LIMITS,
        restart=RestartPolicy(),
    )
    with LocalCluster(config) as running:
        yield running


def begun(cluster: LocalCluster, ranks: Ranks, directory: Path, strategy: str) -> Schedule:
    """Start a job that needs both of its two members; return once they train."""
    run = elastic(cluster, f"few-{strategy}", strategy=strategy, min_members=2, desired_members=2)
    schedule = Schedule(ranks, run, directory, seed=1)
    schedule.start(2)
    return schedule


def members_of(url: str) -> list[dict[str, Any]]:
    """Return the page's members of a job; none while the coordinator restarts."""
    try:
        answer = http.get(f"{url}/members")
    except httpx.ConnectError:
        return []
    return [each["member"] for each in answer.json()] if answer.status_code == 200 else []


def await_waiting(cluster: LocalCluster, schedule: Schedule, for_s: float) -> None:
    """Wait until the job's only member has waited for `for_s`, as the page says."""
    url = f"{cluster.http_url}/api/v1/jobs/{schedule.job}"
    give_up_s = time.monotonic() + for_s + unhurried(60.0)
    while True:
        assert not schedule.alive[0].kinds().count("raised"), schedule.alive[0].seen[-1]
        schedule.alive[0].catch_up()
        members = members_of(url)
        if len(members) == 1 and members[0]["waiting_for"] == "1 more member, no limit":
            why = http.get(f"{url}/members/{members[0]['member_id']}/why").json()
            if why["waiting_s"] >= for_s:
                assert why["state"] == "standby"
                return
        assert time.monotonic() < give_up_s, members
        time.sleep(0.1)


@pytest.mark.long
def test_a_survivor_goes_on_with_its_state_after_many_join_limits(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Jobs of several strategies do so at the same time: the weights are those of one process."""
    with Ranks() as ranks:
        jobs = [begun(cluster, ranks, tmp_path, name) for name in ("ddp", "fsdp", "pipeline")]
        for job in jobs:
            job.lose()
        for job in jobs:
            await_waiting(cluster, job, 2.5 * JOIN_S)
        for job in jobs:
            began_s = time.monotonic()
            job.join()
            assert time.monotonic() - began_s < unhurried(AT_ONCE_S)
        for job in jobs:
            check_no_trace(job, job.run_of_all, TOLERANCE)


@pytest.mark.long
def test_a_survivor_waits_on_when_the_coordinator_is_started_again(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with Ranks() as ranks:
        job = begun(cluster, ranks, tmp_path, "ddp")
        job.lose()
        await_waiting(cluster, job, 0.0)
        killed = cluster.processes["coordinator"]
        killed.send_signal(signal.SIGKILL)
        killed.wait(30.0)
        await_waiting(cluster, job, 1.5 * JOIN_S)
        job.join()
        check_no_trace(job, job.run_of_all, TOLERANCE)


@pytest.mark.sampled()
@pytest.mark.parametrize("how", ["SIGTERM", "stop"])
def test_a_survivor_that_waits_ends_on_sigterm_and_on_stop(
    cluster: LocalCluster, tmp_path: Path, how: str
) -> None:
    """The survivor ends at once, with the exit code of a drain."""
    with Ranks() as ranks:
        job = begun(cluster, ranks, tmp_path, "ddp")
        survivor = job.lose()
        await_waiting(cluster, job, 0.0)
        began_s = time.monotonic()
        if how == "SIGTERM":
            survivor.send_signal(signal.SIGTERM)
        else:
            assert main(["stop", job.job, "--coordinator", cluster.coordinator]) == 0
        assert survivor.expect("exits")["code"] == 143
        assert time.monotonic() - began_s < unhurried(AT_ONCE_S)
