"""The simulation steps the code that ships: a fault that is put into it is found."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace

import pytest
from support.sim.schedule import simulate

from shoal_server.coordinator.persistence.durable import DurableJobs
from shoal_server.core.driver.effect_queue import Carried, EffectQueue
from shoal_server.core.driver.job_driver import JobDriver
from shoal_server.core.driver.job_write import PendingWrite
from shoal_server.core.generations.agreement import Agreement
from shoal_server.core.job.arrivals import Arrivals
from shoal_server.core.membership.events import Effect, Event, Lost, Refused, Tell, Write
from shoal_server.core.membership.member import Member
from shoal_server.etcd.api import Operation

MAX_SEEDS = 150
RARE = 400
"""Where the search for a fault begins that only a rare schedule shows."""

Fault = Callable[[pytest.MonkeyPatch], None]


def told_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    """Who is told of a record may know what no later leader does."""
    real = EffectQueue._carry_out

    def carry_out(queue: EffectQueue[object], effect: Effect) -> Iterator[Carried]:
        told = any(isinstance(each, Tell) for each in queue._effects)
        if isinstance(effect, Write) and told:
            queue._effects.append(effect)
            return
        yield from real(queue, effect)

    patch.setattr(EffectQueue, "_carry_out", carry_out)


def admitted_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    """Its key is written with whatever is written next, and its call does not wait for that."""
    real = PendingWrite.admit

    def admit(pending: PendingWrite, member: Member) -> None:
        changed = pending._state_changed
        real(pending, member)
        pending._members.pop(member.member_id)
        pending._state_changed = changed

    patch.setattr(PendingWrite, "admit", admit)


def a_deposed_leader_writes(patch: pytest.MonkeyPatch) -> None:
    """The fence on the leader's key is left out."""
    real = DurableJobs.apply

    async def apply(jobs: DurableJobs, operations: Sequence[Operation]) -> None:
        await real(DurableJobs(jobs._store, lambda: ()), operations)

    patch.setattr(DurableJobs, "apply", apply)


def a_refused_event_changes_the_state(patch: pytest.MonkeyPatch) -> None:
    """The word of a process that was replaced is refused, and yet shows its successor alive."""
    real = Arrivals.known

    def known(arrivals: Arrivals, event: Event) -> Member:
        try:
            return real(arrivals, event)
        except Refused:
            if member := arrivals._state.members.get(event.member_id):
                member.failed_in = arrivals._state.last_generation
            raise

    patch.setattr(Arrivals, "known", known)


def a_lost_member_is_heard(patch: pytest.MonkeyPatch) -> None:
    """Names count, and not the processes that have them."""
    real = Arrivals.known

    def known(arrivals: Arrivals, event: Event) -> Member:
        return arrivals._state.members.get(event.member_id) or real(arrivals, event)

    patch.setattr(Arrivals, "known", known)


def a_deadline_runs_while_etcd_is_away(patch: pytest.MonkeyPatch) -> None:
    """Members are late for not doing what nobody could tell them."""

    patch.setattr(EffectQueue, "postpone", lambda queue, now_s: None)


def silence_counts_while_etcd_is_away(patch: pytest.MonkeyPatch) -> None:
    """Who waits to be admitted cannot beat yet."""
    real = JobDriver._silent

    def silent(driver: JobDriver[object, object], now_s: float) -> list[Lost]:
        queue, driver._queue = driver._queue, SimpleNamespace(begun_s=math.inf)
        try:
            return real(driver, now_s)
        finally:
            driver._queue = queue

    patch.setattr(JobDriver, "_silent", silent)


def a_commit_without_all_answers(patch: pytest.MonkeyPatch) -> None:
    """The first that accepts decides for all."""
    real = Agreement.accept

    def accept(agreement: Agreement, *args: object) -> bool:
        real(agreement, *args)
        return True

    patch.setattr(Agreement, "accept", accept)


def that_it_has_trained_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """No leader knows that another's job has come further than its initial values."""
    patch.setattr(PendingWrite, "save", lambda pending: None)


FAULTS: Iterable[Fault] = (
    told_before_it_is_durable,
    admitted_before_it_is_durable,
    a_deposed_leader_writes,
    a_refused_event_changes_the_state,
    a_lost_member_is_heard,
    a_deadline_runs_while_etcd_is_away,
    silence_counts_while_etcd_is_away,
    a_commit_without_all_answers,
    that_it_has_trained_is_forgotten,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_simulation_finds(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within some seeds an invariant does not hold; without the fault the same seed is passed."""
    with monkeypatch.context() as patch:
        fault(patch)
        first = RARE if fault is that_it_has_trained_is_forgotten else 0
        found = next((seed for seed in range(first, first + MAX_SEEDS) if _fails(seed)), None)
    assert found is not None, f"not found in {MAX_SEEDS} seeds"
    simulate(found)


def _fails(seed: int) -> bool:
    try:
        simulate(seed)
    except AssertionError:
        return True
    return False
