"""The simulation runs the production member core, and finds faults planted in it."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
from support.sim.errors import fails
from support.sim.failover import simulate_failover, simulate_outage
from support.sim.schedule import simulate

from shoal_client.membership import member_events as ev
from shoal_client.membership.generation_track import GenerationTrack, PlannedChange
from shoal_client.membership.member_core import MemberCore
from shoal_client.membership.wait_clock import WaitClock
from shoal_proto.errors import ShoalError
from shoal_proto.v1 import membership_pb2 as pb

MAX_SEEDS = 150
RARE = 550
"""First seed of the search for a fault that only a rare schedule shows."""

Patch = pytest.MonkeyPatch


def a_step_is_begun_past_the_offer(patch: Patch) -> None:
    """A step is begun before all members have agreed on the boundary."""
    boundary = property(lambda change: 1_000_000 if change.stop_at is None else change.stop_at)
    patch.setattr(PlannedChange, "boundary", boundary)


def the_own_offer_is_taken_for_the_boundary(patch: Patch) -> None:
    """The boundary should be the highest offer, not the member's own."""
    boundary = property(lambda change: change.offer)
    patch.setattr(PlannedChange, "boundary", boundary)


def an_offer_is_not_made(patch: Patch) -> None:
    patch.setattr(GenerationTrack, "_offer_request", lambda *arguments: None)


def a_new_leader_is_not_told_who_stands_still(patch: Patch) -> None:
    patch.setattr(GenerationTrack, "report_to_repeat", lambda track: None)


def a_new_leader_is_not_told_of_a_failed_collective(patch: Patch) -> None:
    real = GenerationTrack.report_to_repeat

    def standing(track: GenerationTrack) -> object:
        track._reported = None
        return real(track)

    patch.setattr(GenerationTrack, "report_to_repeat", standing)


def a_new_leader_is_not_asked_to_drain(patch: Patch) -> None:
    real = MemberCore._take_admitted

    def take(core: MemberCore, admitted: pb.Admitted, now_s: float) -> Sequence[ev.Effect]:
        effects = real(core, admitted, now_s)
        return [effect for effect in effects if not isinstance(effect, ev.AskForDrain)]

    patch.setattr(MemberCore, "_take_admitted", take)


def a_break_of_an_older_generation_is_ignored(patch: Patch) -> None:
    real = GenerationTrack.record_break

    def take(track: GenerationTrack, generation: int, reason: str) -> bool:
        return generation > track.generation and real(track, generation, reason)

    patch.setattr(GenerationTrack, "record_break", take)


def time_runs_while_nobody_leads(patch: Patch) -> None:
    """Members' limits for messages from a coordinator include the time without one."""

    def give_up_s(clock: WaitClock, since_s: float, limit_s: float, now_s: float) -> float:
        return max(since_s, clock.paused_until_s(now_s)) + limit_s

    patch.setattr(WaitClock, "give_up_s", give_up_s)


def a_call_outlasts_the_stream_that_gave_rise_to_it(patch: Patch) -> None:
    """A call lasts longer than members wait for others."""

    def with_stream(core: MemberCore, request: ev.Request, now_s: float) -> ev.CallLeader:
        return core._calls.new(request, ev.Persistence.WITH_STREAM, core.limits.join_s, now_s)

    patch.setattr(MemberCore, "_with_stream", with_stream)


def a_later_step_is_offered_than_need_be(patch: Patch) -> None:
    """The old generation trains on for longer than the agreement takes."""
    real = GenerationTrack._offer_request

    def offer(track: GenerationTrack, own: int, generation: int, step: int) -> pb.OfferRequest:
        return real(track, own, generation, step + 1)

    patch.setattr(GenerationTrack, "_offer_request", offer)


def a_fenced_member_goes_on(patch: Patch) -> None:
    def fail(core: MemberCore, error: ShoalError) -> Sequence[ev.Effect]:
        return []

    patch.setattr(MemberCore, "_fail", fail)


FAULTS: Sequence[tuple[Callable[[Patch], None], Callable[[int], None]]] = (
    (a_step_is_begun_past_the_offer, simulate),
    (the_own_offer_is_taken_for_the_boundary, simulate),
    (an_offer_is_not_made, simulate),
    (a_new_leader_is_not_told_who_stands_still, simulate_failover),
    (a_new_leader_is_not_told_of_a_failed_collective, simulate_failover),
    (a_new_leader_is_not_asked_to_drain, simulate),
    (a_break_of_an_older_generation_is_ignored, simulate),
    (time_runs_while_nobody_leads, simulate_outage),
    (a_call_outlasts_the_stream_that_gave_rise_to_it, simulate_outage),
    (a_later_step_is_offered_than_need_be, simulate),
    (a_fenced_member_goes_on, simulate),
)


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("fault", "run"), FAULTS, ids=lambda fault: getattr(fault, "__name__", None)
)
def test_the_simulation_finds(
    fault: Callable[[Patch], None], run: Callable[[int], None], monkeypatch: Patch
) -> None:
    """Invariants fail with some seed; the same seed passes without the fault."""
    with monkeypatch.context() as patch:
        fault(patch)
        first = RARE if fault is a_new_leader_is_not_told_of_a_failed_collective else 0
        found = next(
            (seed for seed in range(first, first + MAX_SEEDS) if fails(partial(run, seed))), None
        )
    assert found is not None, f"not found in {MAX_SEEDS} seeds"
    run(found)
