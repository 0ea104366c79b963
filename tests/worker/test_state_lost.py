"""Kills of all members that hold a job's state: real members, a real coordinator, real signals."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from support.network import http
from support.processes.ranks import Rank, Ranks
from support.training import state_lost_bodies
from support.training.state_lost_bodies import Run

from shoal_client.local.cluster import LocalCluster


def start(ranks: Ranks, run: Run, names: str) -> list[Rank]:
    return [ranks.start(state_lost_bodies.train, replace(run, member_id=name)) for name in names]


def train_until(crew: list[Rank], step: int) -> None:
    for rank in crew:
        while rank.expect("stepped")["step"] < step:
            pass


def kill_all(crew: list[Rank]) -> int:
    """Kill all members; return the highest step that one of them reported."""
    for rank in crew:
        rank.send_signal(signal.SIGKILL)
    for rank in crew:
        assert rank.join() == -signal.SIGKILL
        rank.drain()
    return max(data["step"] for rank in crew for kind, data in rank.seen if kind == "stepped")


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_later_members_get_state_lost(cluster: LocalCluster, strategy: str) -> None:
    """Members do not train from step 0; the page and the metrics report the loss too."""
    run = Run(coordinator=cluster.coordinator, job=f"gone-{strategy}", strategy=strategy)
    with Ranks() as ranks:
        crew = start(ranks, run, "ab")
        train_until(crew, 20)
        kill_all(crew)
        again = start(ranks, run, "ab")
        for rank in again:
            raised = rank.expect("raised")
            assert raised["error"] == "StateLost", raised["trace"]
            assert "--fresh" in raised["text"]
            assert "stepped" not in rank.kinds()
        (late,) = start(ranks, run, "x")
        assert late.expect("raised")["error"] == "StateLost"
    shown = http.get(f"{cluster.http_url}/api/v1/jobs/{run.job}").json()["summary"]
    assert shown["phase"] == "lost"
    assert "generation 1" in shown["reason"]
    metrics = http.get(f"{cluster.http_url}/metrics").text
    assert f'shoal_job_phase_bool{{job="{run.job}",phase="lost"}} 1.0' in metrics
    why = http.get(f"{cluster.http_url}/api/v1/jobs/{run.job}/members/a/why")
    assert why.status_code == 404
    assert "state of job" in why.text


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "local-sgd"])
def test_a_checkpoint_brings_the_job_back(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    """Members take no step before the checkpoint's, and both steps are reported."""
    run = Run(
        coordinator=cluster.coordinator,
        job=f"back-{strategy}",
        strategy=strategy,
        directory=str(tmp_path),
    )
    with Ranks() as ranks:
        crew = start(ranks, run, "ab")
        train_until(crew, 60)
        reached = kill_all(crew)
        again = start(ranks, run, "ab")
        first = min(rank.expect("stepped")["step"] for rank in again)
        assert 5 < first <= reached + 1
        kill_all(again)
    events = http.get(f"{cluster.http_url}/api/v1/jobs/{run.job}/events?limit=1000").json()
    reasons = [each["reason"] for each in events["events"] if each["kind"] == "job_rolled_back"]
    assert len(reasons) <= 1
    if reasons:  # the last reported step may be that of the checkpoint
        assert f"from step {first - 1}" in reasons[0]
