"""A member is killed or halted while its job is in every phase of the protocol."""

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
    """How jobs went on that lost a member in each phase."""
    replicas = replica_pool.full(NUM_REPLICAS)
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(len(LOSABLE)))
        jobs: dict[str, Losable] = {}
        outcomes: dict[str, Future[None]] = {}
        for name, build in LOSABLE.items():
            jobs[name] = job = build(stack.enter_context(new_cast(replicas)))
            # At once: a job is held in its phase for no longer than the coordinator's limits say.
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
    """What it had to say is refused, and it is told so: as one that was lost, or, where that came
    first, as one that was too late to answer."""
    outcome.result()
    before = job.cast.record()
    job.victim.send_signal(signal.SIGCONT)
    assert job.victim.rank.expect("ended", ENDED_S)["error"] in ("Fenced", "DeadlineExceeded")
    assert job.cast.record() == before


@pytest.mark.parametrize("phase", LOSABLE)
def test_the_others_go_on_without_it(struck: Mapping[str, Future[None]], phase: str) -> None:
    """All of them have one record of each generation, and the lost one's calls are refused."""
    struck[phase].result()
