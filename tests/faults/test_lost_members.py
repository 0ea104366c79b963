"""A member is killed or halted while its job is in each phase of the protocol."""

import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack

import pytest
from support.clusters.coordinator_processes import Replicas
from support.members.losable_members import LOSABLE, Losable

from .conftest import NUM_REPLICAS, new_cast

ENDED_S = 20.0


@pytest.fixture(
    scope="module",
    params=[signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)],
    ids=lambda s: str(s.name),
)
def struck(
    request: pytest.FixtureRequest, replica_pool: Replicas
) -> Iterator[Mapping[str, Future[None]]]:
    """Outcomes of the jobs that lost a member in each phase."""
    replicas = replica_pool.full(NUM_REPLICAS)
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(len(LOSABLE)))
        jobs: dict[str, Losable] = {}
        outcomes: dict[str, Future[None]] = {}
        for name, build in LOSABLE.items():
            jobs[name] = job = build(stack.enter_context(new_cast(replicas)))
            # Signal at once: the coordinator's limits bound the time for which a job stays in its
            # phase.
            job.victim.send_signal(request.param)
            outcomes[name] = threads.submit(job.goes_on)
        wait(outcomes.values())
        if request.param == signal.SIGSTOP:
            outcomes = {
                name: threads.submit(_wakes, job, outcomes[name]) for name, job in jobs.items()
            }
            wait(outcomes.values())
        yield outcomes


def _wakes(job: Losable, outcome: Future[None]) -> None:
    """Wake a halted member: its calls are refused. The error is that of a fenced member, or that of
    a missed deadline if it came first."""
    outcome.result()
    before = job.cast.record()
    job.victim.send_signal(signal.SIGCONT)
    assert job.victim.rank.expect("ended", ENDED_S)["error"] in ("Fenced", "DeadlineExceeded")
    assert job.cast.record() == before


@pytest.mark.sampled()
@pytest.mark.parametrize("phase", LOSABLE)
def test_survivors_of_a_loss_continue(struck: Mapping[str, Future[None]], phase: str) -> None:
    """Survivors have one record of each generation, and calls of the lost member are refused."""
    struck[phase].result()
