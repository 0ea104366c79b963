"""Faults planted into the shipped code: the simulation runs this code, and must find them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from support.sim.errors import fails
from support.sim.failover import simulate_pause, simulate_slow_start, simulate_state_lost
from support.sim.schedule import simulate

from shoal_client.membership.generation_track import GenerationTrack
from shoal_client.membership.member_core import Effects, MemberCore
from shoal_client.membership.wait_clock import WaitClock
from shoal_proto.v1 import membership_pb2 as pb
from shoal_server.coordinator.persistence.durable import DurableJobs
from shoal_server.core.driver.effect_queue import Carried, EffectQueue
from shoal_server.core.driver.job_driver import JobDriver
from shoal_server.core.driver.job_write import PendingWrite
from shoal_server.core.generations.agreement import Agreement
from shoal_server.core.job import arrivals
from shoal_server.core.job.job_state import JobState
from shoal_server.core.membership.events import (
    Effect,
    EventRefused,
    MemberEvent,
    MemberLost,
    SendNotice,
    WriteGeneration,
)
from shoal_server.core.membership.member import MemberState
from shoal_server.core.membership.pauses import Pauses
from shoal_server.etcd.api import Operation

MAX_SEEDS = 150

Fault = Callable[[pytest.MonkeyPatch], None]


def notified_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    """Notices are sent before the record is durable: members know what no later leader knows."""
    real = EffectQueue._carry_out

    def carry_out(queue: EffectQueue[object], effect: Effect) -> Iterator[Carried]:
        has_notices = any(isinstance(each, SendNotice) for each in queue._effects)
        if isinstance(effect, WriteGeneration) and has_notices:
            queue._effects.append(effect)
            return
        yield from real(queue, effect)

    patch.setattr(EffectQueue, "_carry_out", carry_out)


def admitted_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    """A member's key is written with the next write, and its join is answered before that."""
    real = PendingWrite.admit

    def admit(pending: PendingWrite, member: MemberState) -> None:
        changed = pending._state_changed
        real(pending, member)
        pending._members.pop(member.member_id)
        pending._state_changed = changed

    patch.setattr(PendingWrite, "admit", admit)


def a_deposed_leader_writes(patch: pytest.MonkeyPatch) -> None:
    """Writes go out without the fences on the leader's key and on the job's own record."""

    async def apply_to(jobs: DurableJobs, job: str, operations: Sequence[Operation]) -> None:
        await jobs._store._store.transact((), operations)

    patch.setattr(DurableJobs, "apply_to", apply_to)


def fields_of_a_later_release_are_lost(patch: pytest.MonkeyPatch) -> None:
    """The job's record keeps only the fields that this release knows."""
    patch.setattr(DurableJobs, "_with_more", lambda jobs, write: write)


def a_refused_event_changes_the_state(patch: pytest.MonkeyPatch) -> None:
    """A call of a replaced process is refused, but marks its successor as failed."""
    real = arrivals.require_member

    def known(job: JobState, event: MemberEvent) -> MemberState:
        try:
            return real(job, event)
        except EventRefused:
            if member := job.members.get(event.member_id):
                member.failed_in = job.last_generation
            raise

    patch.setattr(arrivals, "require_member", known)


def calls_of_a_lost_member_are_accepted(patch: pytest.MonkeyPatch) -> None:
    """Events are accepted by a member's name, whatever the incarnation."""
    real = arrivals.require_member

    def known(job: JobState, event: MemberEvent) -> MemberState:
        return job.members.get(event.member_id) or real(job, event)

    patch.setattr(arrivals, "require_member", known)


def a_deadline_runs_while_etcd_is_away(patch: pytest.MonkeyPatch) -> None:
    """Members miss a deadline for a request that no coordinator could send."""

    patch.setattr(EffectQueue, "postpone", lambda queue, now_s: None)


def silence_counts_while_etcd_is_away(patch: pytest.MonkeyPatch) -> None:
    """A member whose join is not durable yet cannot send heartbeats, but counts as silent."""
    real = JobDriver._silent

    def silent(driver: JobDriver[object, object], now_s: float) -> list[MemberLost]:
        queue, driver._queue = driver._queue, SimpleNamespace(begun_s=math.inf)
        try:
            return real(driver, now_s)
        finally:
            driver._queue = queue

    patch.setattr(JobDriver, "_silent", silent)


def a_commit_without_all_answers(patch: pytest.MonkeyPatch) -> None:
    """The first member that accepts decides for all."""
    real = Agreement.accept

    def accept(agreement: Agreement, *args: object) -> bool:
        real(agreement, *args)
        return True

    patch.setattr(Agreement, "accept", accept)


def progress_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A later leader does not know that the job has trained beyond its initial values."""
    patch.setattr(PendingWrite, "save", lambda pending: None)


def a_step_that_broke_stays_begun(patch: pytest.MonkeyPatch) -> None:
    """The boundary of a planned change is computed from steps that no member has taken."""
    real = GenerationTrack.record_stop

    def stand_still(track: GenerationTrack, step: int, **stand: Any) -> pb.SettleRequest:
        begun = track._begun
        request = real(track, step, **stand)
        track._begun = begun
        return request

    patch.setattr(GenerationTrack, "record_stop", stand_still)


def a_proposal_begins_at_no_step(patch: pytest.MonkeyPatch) -> None:
    """A member that proposes a checkpoint's step does not count its steps from that one."""
    real = GenerationTrack.propose

    def propose(track: GenerationTrack, proposal: pb.Proposal) -> pb.ProposeRequest:
        request = real(track, proposal)
        track._begun = -1
        return request

    patch.setattr(GenerationTrack, "propose", propose)


def a_limit_runs_while_a_member_is_paused(patch: pytest.MonkeyPatch) -> None:
    """Members miss a deadline because they wait for the paused member."""
    patch.setattr(Pauses, "hold", lambda pauses, now_s, held: 0.0)


def a_pause_is_not_reported_to_a_new_leader(patch: pytest.MonkeyPatch) -> None:
    """The new leader declares the paused member hung."""
    real = MemberCore._take_admitted

    def take_admitted(core: MemberCore, admitted: pb.Admitted, now_s: float) -> Effects:
        pause, core._own_pause = core._own_pause, None
        effects = real(core, admitted, now_s)
        core._own_pause = pause
        return effects

    patch.setattr(MemberCore, "_take_admitted", take_admitted)


def a_standby_has_the_limit_of_other_members(patch: pytest.MonkeyPatch) -> None:
    """A standby member waits no longer than other members."""
    patch.setattr(WaitClock, "set_standby", lambda clock, now_s, is_standby: None)


FAULTS: Mapping[Fault, Callable[[int], None]] = {
    notified_before_it_is_durable: simulate,
    admitted_before_it_is_durable: simulate,
    a_deposed_leader_writes: simulate,
    fields_of_a_later_release_are_lost: simulate,
    a_refused_event_changes_the_state: simulate,
    calls_of_a_lost_member_are_accepted: simulate,
    a_deadline_runs_while_etcd_is_away: simulate,
    silence_counts_while_etcd_is_away: simulate,
    a_commit_without_all_answers: simulate,
    progress_is_forgotten: simulate_state_lost,
    a_step_that_broke_stays_begun: simulate_slow_start,
    a_proposal_begins_at_no_step: simulate_slow_start,
    a_limit_runs_while_a_member_is_paused: simulate,
    a_pause_is_not_reported_to_a_new_leader: simulate_pause,
    a_standby_has_the_limit_of_other_members: simulate,
}
"""Fault -> the simulation that finds it."""

FIRST_SEEDS = {
    a_deposed_leader_writes: 150,
    a_refused_event_changes_the_state: 205,
    calls_of_a_lost_member_are_accepted: 205,
    a_deadline_runs_while_etcd_is_away: 120,
    a_standby_has_the_limit_of_other_members: 1025,
}
"""First seeds to try for faults that few schedules show, to save time."""


@pytest.mark.sampled()
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_simulation_finds_the_fault(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invariant fails within `MAX_SEEDS` seeds; without the fault the same seed passes."""
    simulated, first = FAULTS[fault], FIRST_SEEDS.get(fault, 0)
    with monkeypatch.context() as patch:
        fault(patch)
        seeds = range(first, first + MAX_SEEDS)
        found = next((seed for seed in seeds if fails(partial(simulated, seed))), None)
    assert found is not None, f"not found in {MAX_SEEDS} seeds"
    simulated(found)
