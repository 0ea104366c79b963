"""The compose file trains the demo's job for real, and goes on when a worker is killed."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from deploy.stack import Stack, brought_up, run

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

JOB = "digits"
UNDER_WAY_STEPS = 20
MIN_ACCURACY = 0.95


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with brought_up(Stack()) as stack:
        yield stack


def job_of(stack: Stack) -> dict[str, Any]:
    detail: dict[str, Any] = stack.get(f"/api/v1/jobs/{JOB}")
    return detail


def under_way(stack: Stack) -> dict[str, Any] | None:
    """The job, once all three workers train and have done some steps."""
    job = job_of(stack)
    summary = job["summary"]
    trains = summary["num_training"] == 3 and summary["step"] >= UNDER_WAY_STEPS
    return job if trains else None


def members_of(generation: dict[str, Any]) -> dict[str, str]:
    return {entry["member_id"]: entry["incarnation"] for entry in generation["members"]}


def committed_without(stack: Stack, incarnation: str, above: int) -> dict[str, Any] | None:
    """The first committed generation above a number, if the dead process is not in it."""
    for generation in reversed(job_of(stack)["generations"]):
        if generation["generation"] > above and generation["verdict"] == "committed":
            assert incarnation not in members_of(generation).values()
            return dict(generation)
    return None


def test_trains_through_the_loss_of_a_worker(stack: Stack) -> None:
    """A worker's container is killed in the middle; the rest agree, go on and finish the job."""
    job = stack.wait_for("training with three workers", lambda: under_way(stack), 180)
    before = job["summary"]
    containers = stack.containers("worker")
    members = {m["member"]["member_id"]: m["member"] for m in job["members"]}
    assert set(members) == set(containers), "a worker's member id is its container's host name"
    victim = min(members, key=lambda member: members[member]["rank"])

    run("docker", "kill", "--signal", "KILL", containers[victim]["Id"])
    generation = stack.wait_for(
        "a generation without the killed worker",
        lambda: committed_without(stack, members[victim]["incarnation"], before["generation"]),
        60,
    )
    survivors = {m: members[m]["incarnation"] for m in members if m != victim}
    assert survivors.items() <= members_of(generation).items(), "survivors keep their processes"
    stack.wait_for(
        "going on",
        lambda: job_of(stack)["summary"]["step"] > generation["step"] or None,
        60,
    )

    # What an operator does who was told of the loss: docker compose up, unless Docker was faster.
    stack.compose("up", "--detach", "--no-build", "--no-recreate")
    job = stack.wait_for(
        "finished",
        lambda: job_of(stack) if job_of(stack)["summary"]["phase"] == "finished" else None,
        300,
    )
    print(os.linesep, job["summary"], victim)
