"""One job's membership: how its members agree on each generation. The heart of Shoal.

`Job.handle(event, now_s)` and `Job.tick(now_s)` return effects, in the order in which they must
happen; a `Write` is durable before anything behind it leaves. `Job.next_deadline_s()` says when
`tick` has something to do. A refused event raises `Refused` and leaves the state as it was.

A generation forms in three moves. COLLECT waits until everybody who is wanted stands ready, then
freezes the roster. PREPARE shows it to each of them; all must accept the same digest. COMMITTED is
one durable record that all receive; they bring the generation up, and it runs when the last of
them is ready. Anything that goes wrong ends in one durable ABORTED record with the same reason for
all.

A planned change (somebody joins) goes through COLLECT and PREPARE while the old generation trains
on, and stops it at one step that all its members share: each member offers the first step that it
has not begun and begins none from there on; the highest offer is where the old generation stops.
Members of a synchronous generation are never more than one step apart, so this takes a step at the
most, and since a member offers while its trainer computes, nobody holds up a collective.

A loss breaks the generation at once. Its survivors settle (come to a stand and say at which step)
and form the next one without waiting for anybody else.

Members of an asynchronous job never stop: they need neither boundary nor settling.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from shoal_server.core import refusals
from shoal_server.core.events import (
    Admit,
    Answered,
    Attended,
    BecameReady,
    BreakNotice,
    Broke,
    Disconnected,
    Effect,
    Event,
    Expel,
    Finish,
    Left,
    Log,
    Lost,
    Notice,
    Offered,
    OutcomeNotice,
    PrepareNotice,
    Proposed,
    Refusal,
    Refused,
    RefusedNotice,
    RunningNotice,
    Settled,
    StandbyNotice,
    StopAtNotice,
    Tell,
    Write,
)
from shoal_server.core.incarnations import is_older
from shoal_server.core.limits import Limits
from shoal_server.core.member import Member
from shoal_server.core.phases import Phase, Trigger, after
from shoal_server.core.roster import (
    NO_GENERATION,
    Conflict,
    Generation,
    JobSpec,
    Proposal,
    Record,
    Roster,
    Step,
    Verdict,
    draw_up,
    find_conflicts,
)

FIRST_BACK_OFF_S = 0.05
MAX_BACK_OFF_S = 5.0
MAX_EXPELLED = 10_000


@dataclass(kw_only=True)
class Job:
    """State of one job. Its fields are read by the edge and changed only in here."""

    spec: JobSpec
    limits: Limits
    digest_of: Callable[[Roster], str]
    phase: Phase = Phase.COLLECT
    reason: str = "the job is new"
    members: dict[str, Member] = field(default_factory=dict)
    last_generation: Generation = NO_GENERATION
    running: Roster | None = None
    """The generation that trains, if one does."""
    previous: Roster | None = None
    """The newest roster that was committed: ranks are kept from it."""
    attempt: Roster | None = None
    """The roster in PREPARE or COMMITTED."""
    record: Record | None = None
    """The newest committed record: of the generation that runs or is brought up."""
    stop_at: Step | None = None
    phase_since_s: float = 0.0
    first_proposal_s: float | None = None
    deadline_s: float | None = None
    broken_since_s: float | None = None
    suspect_since_s: float | None = None
    failures: int = 0
    completing: bool = False
    expelled: dict[str, None] = field(default_factory=dict)
    """Incarnations that were members and are not to come back, the oldest first."""
    _effects: list[Effect] = field(default_factory=list)

    # --- what the edge calls ---

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Take one event in and say what follows from it."""
        if isinstance(event, Attended):
            self._attended(event, now_s)
        else:
            self._heard(self._known(event), event, now_s)
        self._advance(now_s)
        return self._take_effects()

    def tick(self, now_s: float) -> list[Effect]:
        """Act on the deadlines that have passed."""
        for member in list(self.members.values()):
            since = member.disconnected_s
            if since is not None and now_s >= since + self.limits.reconnect_s:
                self._remove(member, "its stream broke and did not come back", now_s)
        if self._passed(self.suspect_since_s, self.limits.reconnect_s, now_s):
            self._break((), f"{self.reason}; all members still answer", now_s)
        if self._passed(self.broken_since_s, self.limits.collective_s, now_s):
            self._drop_unsettled(now_s)
        self._drop_overdue(now_s)
        self._advance(now_s)
        return self._take_effects()

    def next_deadline_s(self) -> float | None:
        """When `tick` should be called next, if no event comes before."""
        return min(self._deadlines(), default=None)

    # --- who is there ---

    def _known(self, event: Event) -> Member:
        member = self.members.get(event.member_id)
        if member is None:
            raise Refused(refusals.not_a_member(self.spec.job, event, self.last_generation))
        if member.incarnation != event.incarnation:
            raise Refused(refusals.replaced(event, member.incarnation, self.last_generation))
        return member

    def _heard(self, member: Member, event: Event, now_s: float) -> None:
        match event:
            case Proposed():
                self._proposed(member, event.proposal, now_s)
            case Answered():
                self._answered(member, event, now_s)
            case Settled():
                self._settled(member, event, now_s)
            case Offered():
                self._offered(member, event)
            case BecameReady():
                self._became_ready(member, event, now_s)
            case Broke():
                self._broke(member, event, now_s)
            case Disconnected():
                self._disconnected(member, now_s)
            case Lost():
                self._remove(member, event.reason, now_s)
            case Left():
                self._left(member, event, now_s)
            case _:
                raise AssertionError(f"no handler for {event}")

    def _attended(self, event: Attended, now_s: float) -> None:
        if self.phase is Phase.FINISHED or self.completing:
            raise Refused(refusals.finished(self.spec.job, self.reason))
        if problem := event.spec.problem():
            raise Refused(refusals.bad_spec(self.spec.job, problem))
        known = self.members.get(event.member_id)
        if known is not None and known.incarnation == event.incarnation:
            self._reattended(known)
            return
        if event.incarnation in self.expelled:
            raise Refused(refusals.not_a_member(self.spec.job, event, self.last_generation))
        if known is not None and is_older(event.incarnation, known.incarnation):
            raise Refused(refusals.replaced(event, known.incarnation, self.last_generation))
        if event.spec != self.spec and self.members:
            raise Refused(refusals.other_bounds(event.spec, self.spec))
        self.spec = event.spec
        if known is not None:
            self._remove(known, "a new process took its place", now_s)
        member = Member(
            member_id=event.member_id,
            incarnation=event.incarnation,
            info=event.info,
            attended_s=now_s,
            waiting_since_s=now_s,
        )
        self.members[event.member_id] = member
        self._do(Admit(member_id=member.member_id, incarnation=member.incarnation))
        self._log("member_attended", f"{member.member_id} attends from {event.info.host}", member)

    def _reattended(self, member: Member) -> None:
        """Its stream came back, here or at a new leader: tell it again what it has to act on."""
        member.disconnected_s = None
        if member.is_in(self.attempt) and self.attempt is not None:
            if self.phase is Phase.PREPARE:
                self._tell(member, self._prepare_notice(self.attempt))
            else:
                assert self.record is not None
                self._tell(member, OutcomeNotice(reason=self.record.reason, record=self.record))
            if self.stop_at is not None:
                self._tell(member, self._stop_notice(self.attempt, self.stop_at))
        elif member.is_in(self.running) and self.running is not None:
            generation = self.running.generation
            self._tell(member, RunningNotice(reason=self.reason, generation=generation))
        elif not member.settled:
            # It missed the break of the last generation it was part of.
            generation = self.last_generation
            self._tell(
                member,
                BreakNotice(reason=self.reason, generation=generation, lost_member_ids=()),
            )

    def _disconnected(self, member: Member, now_s: float) -> None:
        member.disconnected_s = now_s
        if self.suspect_since_s is not None and member.is_in(self.running):
            self._remove(member, "its stream broke, and so did a collective", now_s)

    def _left(self, member: Member, event: Left, now_s: float) -> None:
        if event.completed and not self.completing:
            self._complete(member, now_s)
        self._remove(member, f"left: {event.reason}", now_s, completed=event.completed)

    def _remove(
        self, member: Member, reason: str, now_s: float, *, completed: bool = False
    ) -> None:
        """Take a member out, and with it whatever it was needed for."""
        trained, attempted = member.is_in(self.running), member.is_in(self.attempt)
        reason = f"{member.member_id}: {reason}"
        del self.members[member.member_id]
        self.expelled[member.incarnation] = None
        if len(self.expelled) > MAX_EXPELLED:
            del self.expelled[next(iter(self.expelled))]
        self._do(Expel(member_id=member.member_id, incarnation=member.incarnation, reason=reason))
        self._log("member_completed" if completed else "member_removed", reason, member)
        if all(m.proposal is None for m in self.members.values()):
            self.first_proposal_s = None
        if self.completing:
            roster = self.running or self.attempt
            if (trained or attempted) and not completed and roster is not None:
                self._tell_broken(roster, (member.member_id,), reason, now_s)
            if not self.members:
                self._finish(now_s)
            return
        if attempted:
            self._abort(reason, now_s)
        if trained and self.running is not None:
            self._break((member.member_id,), reason, now_s)

    def _refuse(self, member: Member, refusal: Refusal, now_s: float) -> None:
        self._tell(member, RefusedNotice(reason=refusal.what, refusal=refusal))
        self._remove(member, f"refused: {refusal.what}", now_s)

    # --- COLLECT ---

    def _proposed(self, member: Member, proposal: Proposal, now_s: float) -> None:
        if self.completing:
            raise Refused(refusals.finished(self.spec.job, self.reason))
        if not proposal.fields:
            raise Refused(refusals.empty_proposal(member.member_id))
        if conflicts := self._conflicts_with_trainers(member, proposal):
            raise Refused(refusals.conflict(self.spec.job, conflicts))
        again, member.proposal = member.proposal is not None, proposal
        if self.first_proposal_s is None:
            self.first_proposal_s = now_s
        if not again:
            member.waits("other members", now_s)
            self._log("member_proposed", f"{member.member_id} is ready to train", member)

    def _conflicts_with_trainers(self, member: Member, proposal: Proposal) -> tuple[Conflict, ...]:
        """A newcomer that differs from those who train, or did before a break, is refused here:
        it must not disturb them."""
        roster = self.running or self.previous
        if roster is None or member.is_in(roster):
            return ()
        trainers = [m.as_candidate() for m in self.members_of(roster) if m.proposal]
        newcomer = replace(member, proposal=proposal).as_candidate()
        return find_conflicts([*trainers, newcomer])

    def _advance(self, now_s: float) -> None:
        """Go on as far as time and the members that are present allow."""
        if self.completing:
            return
        if self.deadline_s is not None and now_s >= self.deadline_s:
            self._deadline_passed(now_s)
        joiners = self._joiners(now_s)
        if self.phase is Phase.RUNNING and joiners:
            self._to(Trigger.CHANGE_WANTED, f"{_names(joiners)} joins", now_s)
        if self.phase is not Phase.COLLECT:
            return
        if self.running is not None and not joiners:
            self._to(Trigger.CHANGE_DROPPED, "the joiner is gone", now_s)
            return
        chosen = self._chosen(now_s)
        if self._may_freeze(chosen, now_s):
            self._freeze(chosen, now_s)

    def _joiners(self, now_s: float) -> list[Member]:
        """Who would be taken into the running generation."""
        if self.running is None or not any(
            m.proposal is not None and not m.is_in(self.running) for m in self.members.values()
        ):
            return []
        return [m for m in self._chosen(now_s) if not m.is_in(self.running)]

    def _chosen(self, now_s: float) -> list[Member]:
        """Who would be in a roster drawn up now: who trained before first, then by arrival."""
        candidates = [m for m in self.members.values() if m.proposal is not None]
        ranks = {e.member_id: e.rank for e in self.previous.entries} if self.previous else {}
        candidates.sort(key=lambda m: (ranks.get(m.member_id, len(ranks)), m.attended_s))
        for position, member in enumerate(candidates[self.spec.max_members :], start=1):
            reason = f"standing by: the job has its maximum of {self.spec.max_members} members"
            if member.waiting_for != reason:
                member.waits(reason, now_s)
                self._tell(member, StandbyNotice(reason=reason, position=position))
        return candidates[: self.spec.max_members]

    def _may_freeze(self, chosen: list[Member], now_s: float) -> bool:
        if self.running is not None:
            # Members that have not proposed yet are on their way: one stop takes them along.
            coming = any(m.proposal is None for m in self.members.values())
            return not coming or self._passed(self.phase_since_s, self.limits.gather_s, now_s)
        if len(chosen) < self.spec.min_members or not all(m.settled for m in chosen):
            return False
        if len(chosen) >= self.spec.desired_members or self._survivors(chosen):
            # Survivors that still have to settle are worth waiting for; others are not.
            return all(m.settled for m in self.members.values())
        return self._passed(self.first_proposal_s, self._last_call_s, now_s)

    @property
    def _last_call_s(self) -> float:
        return self.spec.last_call_s or self.limits.last_call_s

    def _survivors(self, chosen: list[Member]) -> bool:
        """Whether somebody is there who trained before: then nobody waits for a last call."""
        return any(m.is_in(self.previous) for m in chosen)

    def _freeze(self, chosen: list[Member], now_s: float) -> None:
        generation = Generation(self.last_generation + 1)
        candidates = [m.as_candidate() for m in chosen]
        planned = self.running is not None
        roster = draw_up(generation, candidates, previous=self.previous, planned=planned)
        self.last_generation, self.attempt, self.stop_at = generation, roster, None
        self._to(Trigger.FROZEN, f"{_names(chosen)} form generation {generation}", now_s)
        if conflicts := find_conflicts(candidates):
            self._abort_conflicting(conflicts, now_s)
            return
        self.deadline_s = now_s + self.limits.prepare_s
        for member in chosen:
            member.accepted, member.ready, member.offer = False, False, None
            member.waits(f"all members to accept generation {generation}", now_s)
            self._tell(member, self._prepare_notice(roster))

    # --- PREPARE ---

    def _answered(self, member: Member, event: Answered, now_s: float) -> None:
        roster = self._attempt_of(member, event.generation, Phase.PREPARE)
        if roster is None:
            return  # Late: the attempt was decided without this answer.
        if event.rejections:
            held = member.member_id
            conflicts = tuple(
                Conflict(field=r.field, values=((r.seen, (held,)), (r.expected, ("roster",))))
                for r in event.rejections
            )
            self._abort_conflicting(conflicts, now_s)
        elif event.digest != self.digest_of(roster):
            self._abort(f"{member.member_id} accepted another roster than was sent", now_s)
        else:
            member.accepted = True
            if all(self.members[m].accepted for m in roster.member_ids):
                self._commit(roster, now_s)

    def _commit(self, roster: Roster, now_s: float) -> None:
        reason = f"all {len(roster.entries)} members accepted generation {roster.generation}"
        self._to(Trigger.ACCEPTED, reason, now_s)
        record = self._record(roster, Verdict.COMMITTED, reason, now_s)
        self.previous, self.record = roster, record
        self._do(Write(record=record))
        to_boundary_s = self.limits.collective_s if _has_boundary(roster) else 0.0
        self.deadline_s = now_s + to_boundary_s + self.limits.bring_up_s
        for member in self.members_of(roster):
            member.settled = not roster.synchronous
            member.waits(f"the first collective of generation {roster.generation}", now_s)
            self._tell(member, OutcomeNotice(reason=reason, record=record))

    # --- COMMITTED ---

    def _offered(self, member: Member, event: Offered) -> None:
        roster = self._attempt_of(member, event.generation, Phase.COMMITTED)
        if roster is None or self.running is None or not member.is_in(self.running):
            return
        member.offer = event.next_step
        if self.stop_at is not None:
            self._tell(member, self._stop_notice(roster, self.stop_at))
            return
        old_members = self.members_of(self.running)
        offers = [m.offer for m in old_members if m.offer is not None]
        if len(offers) == len(old_members):
            self.stop_at = max(offers)
            self._log("boundary_agreed", f"the old generation stops at step {self.stop_at}")
            for old_member in old_members:
                self._tell(old_member, self._stop_notice(roster, self.stop_at))

    def _became_ready(self, member: Member, event: BecameReady, now_s: float) -> None:
        roster = self._attempt_of(member, event.generation, Phase.COMMITTED)
        if roster is None:
            return
        member.ready = True
        # Of a job that completes, members may have left before the last was ready.
        if not all(m.ready for m in self.members_of(roster)):
            member.waits(f"the others' first collective in {roster.generation}", now_s)
            return
        self.running, self.attempt, self.stop_at = roster, None, None
        self.deadline_s = self.broken_since_s = self.suspect_since_s = None
        self.failures = 0
        reason = f"generation {roster.generation} runs with {len(roster.entries)} members"
        self._to(Trigger.READY, reason, now_s)
        for trainer in self.members_of(roster):
            trainer.waits("nothing: it trains", now_s)
            self._tell(trainer, RunningNotice(reason=reason, generation=roster.generation))

    def _attempt_of(self, member: Member, generation: Generation, phase: Phase) -> Roster | None:
        """The roster under way, if the member speaks of it in the phase where it counts."""
        roster = self.attempt
        if roster is None or self.phase is not phase or generation != roster.generation:
            return None
        return roster if member.is_in(roster) else None

    # --- what goes wrong ---

    def _broke(self, member: Member, event: Broke, now_s: float) -> None:
        """A collective failed. Who is also disconnected is lost; else word of a loss may follow."""
        if self._attempt_of(member, event.generation, Phase.COMMITTED) is not None:
            self._abort(f"{member.member_id} could not bring it up: {event.error}", now_s)
            return
        running = self.running
        if running is None or event.generation != running.generation or not running.synchronous:
            return
        self.reason = f"a collective failed under {member.member_id}: {event.error}"
        self._log("collective_failed", self.reason, member)
        if self.suspect_since_s is None:
            self.suspect_since_s = now_s
        member.reported_broken = running.generation
        for other in self.members_of(running):
            if other.disconnected_s is not None:
                self._remove(other, "its stream broke, and so did a collective", now_s)
        trainers = self.members_of(running)
        if all(m.reported_broken == running.generation for m in trainers):
            # Every one of them is here and says so: there is nobody's loss to wait for.
            self._break((), f"{self.reason}; all members answer", now_s)

    def _break(self, lost: tuple[str, ...], reason: str, now_s: float) -> None:
        """End the running generation now. Its survivors settle, then the next one forms."""
        if self.attempt is not None:
            self._abort(reason, now_s)
        running, self.running, self.suspect_since_s = self.running, None, None
        if running is None:
            return  # the abort took it along and told its members
        if self.phase is not Phase.ABORTED:
            self._to(Trigger.BROKEN, reason, now_s)
        self._tell_broken(running, lost, reason, now_s)

    def _tell_broken(
        self, roster: Roster, lost: tuple[str, ...], reason: str, now_s: float
    ) -> None:
        if not roster.synchronous:
            return
        self.broken_since_s = now_s
        generation = roster.generation
        for member in self.members_of(roster):
            member.settled = False
            member.waits(f"its trainer to stop after the break ({reason})", now_s)
            self._tell(
                member, BreakNotice(reason=reason, generation=generation, lost_member_ids=lost)
            )

    def _settled(self, member: Member, event: Settled, now_s: float) -> None:
        if self.completing:
            raise Refused(refusals.finished(self.spec.job, self.reason))
        if member.is_in(self.running) or member.is_in(self.attempt):
            return
        if member.proposal is not None:
            step, has_state = event.step, event.has_state
            member.proposal = replace(member.proposal, step=step, has_state=has_state)
        member.settled = True
        member.waits("the other members to settle", now_s)
        if all(m.settled for m in self.members.values()):
            self.broken_since_s = None

    def _abort_conflicting(self, conflicts: tuple[Conflict, ...], now_s: float) -> None:
        """Nobody in conflict trains; members of a generation that still runs are not to blame."""
        roster = self.attempt
        assert roster is not None
        at_fault = [m for m in self.members_of(roster) if not m.is_in(self.running)]
        reason = "members differ in " + "; ".join(str(c) for c in conflicts)
        self._abort(reason, now_s, conflicts)
        for member in at_fault:
            self._refuse(member, refusals.conflict(self.spec.job, conflicts), now_s)

    def _abort(self, reason: str, now_s: float, conflicts: tuple[Conflict, ...] = ()) -> None:
        """End the attempt with one record for all.

        Once the boundary is agreed, members may have begun to leave the old generation: then that
        is over too. Before, it goes on as if nothing had been.
        """
        roster = self.attempt
        assert roster is not None
        brought_up = self.phase is Phase.COMMITTED and roster.synchronous
        old_is_over = self.running is None or self.stop_at is not None
        self._to(Trigger.FAILED, reason, now_s)
        self.attempt, self.stop_at, self.failures = None, None, self.failures + 1
        record = self._record(roster, Verdict.ABORTED, reason, now_s)
        record = replace(record, conflicts=conflicts)
        self._do(Write(record=record))
        for member in self.members_of(roster):
            self._tell(member, OutcomeNotice(reason=reason, record=record))
        if brought_up and old_is_over:
            old, self.running = self.running, None
            if old is not None:
                self._tell_broken(old, (), reason, now_s)
            self._tell_broken(roster, (), reason, now_s)
        elif brought_up:
            for member in self.members_of(roster):
                member.settled = not member.is_in(self.running)
        self.previous = self.running or self.previous
        back_off_s = min(FIRST_BACK_OFF_S * 2 ** (self.failures - 1), MAX_BACK_OFF_S)
        # One loss is news, not a failure to agree: the survivors need not wait to try again.
        again_s = now_s + (back_off_s if self.failures > 1 else 0.0)
        self.deadline_s = None if self.completing else again_s

    def _deadline_passed(self, now_s: float) -> None:
        self.deadline_s = None
        if self.phase is Phase.ABORTED:
            intact = self.running is not None
            self._to(Trigger.INTACT if intact else Trigger.BACKED_OFF, self.reason, now_s)
        elif self.phase is Phase.PREPARE and self.attempt is not None:
            late = [m for m in self.members_of(self.attempt) if not m.accepted]
            self._expel_late(late, "accept or reject the roster", now_s)
        elif self.phase is Phase.COMMITTED and self.attempt is not None:
            late = [m for m in self.members_of(self.attempt) if not m.ready]
            if _has_boundary(self.attempt) and self.stop_at is None:
                late = [m for m in late if m.is_in(self.running) and m.offer is None]
            self._expel_late(late, "bring the generation up", now_s)

    def _expel_late(self, late: list[Member], task: str, now_s: float) -> None:
        reason = f"{_names(late)} did not {task} in time"
        self._abort(reason, now_s)
        for member in late:
            self._refuse(member, refusals.timeout(reason), now_s)

    def _drop_unsettled(self, now_s: float) -> None:
        self.broken_since_s = None
        limit = f"{self.limits.collective_s:g} s"
        for member in [m for m in self.members.values() if not m.settled]:
            reason = f"{member.member_id} did not come to a stand within {limit} of the break"
            self._refuse(member, refusals.timeout(reason), now_s)

    def _drop_overdue(self, now_s: float) -> None:
        """Nobody waits for a generation for longer than the join limit."""
        if self.running is not None or self.phase is not Phase.COLLECT:
            return
        ready = [m for m in self.members.values() if m.proposal is not None]
        for member in ready:
            if now_s >= self._overdue_s(member):
                reason = (
                    f"no generation formed within {self.limits.join_s:g} s:"
                    f" {len(ready)} of at least {self.spec.min_members} members were ready"
                )
                self._refuse(member, refusals.timeout(reason), now_s)

    def _overdue_s(self, member: Member) -> float:
        return max(member.waiting_since_s, self.phase_since_s) + self.limits.join_s

    # --- the end ---

    def _complete(self, leaver: Member, now_s: float) -> None:
        """Nobody else needs to join. Who trains finishes; an attempt to change is called off."""
        self.completing = True
        reason = f"{leaver.member_id} completed its work"
        self._log("job_completing", reason)
        if self.attempt is not None and (self.running or self.phase is Phase.PREPARE):
            self.stop_at = None  # who has steps left goes on with them
            self._abort(reason, now_s)
            if self.running is not None:
                self._to(Trigger.INTACT, reason, now_s)
        self.deadline_s, self.reason = None, reason
        # Who trained before finishes by itself, in a generation or (asynchronous) between two.
        trained = self.running or self.previous
        newcomers = [m for m in self.members.values() if not m.is_in(trained)]
        for member in [m for m in newcomers if m is not leaver]:
            self._refuse(member, refusals.finished(self.spec.job, reason), now_s)

    def _finish(self, now_s: float) -> None:
        self._to(Trigger.COMPLETED, self.reason, now_s)
        self.running = self.attempt = None
        self.deadline_s = self.broken_since_s = self.suspect_since_s = None
        self._do(Finish(reason=self.reason))

    # --- small parts ---

    def _deadlines(self) -> Iterable[float]:
        if self.deadline_s is not None:
            yield self.deadline_s
        if self.broken_since_s is not None:
            yield self.broken_since_s + self.limits.collective_s
        if self.suspect_since_s is not None:
            yield self.suspect_since_s + self.limits.reconnect_s
        for member in self.members.values():
            if member.disconnected_s is not None:
                yield member.disconnected_s + self.limits.reconnect_s
        if self.phase is Phase.COLLECT and not self.completing:
            yield from self._collect_deadlines()

    def _collect_deadlines(self) -> Iterable[float]:
        if self.running is not None:
            yield self.phase_since_s + self.limits.gather_s
            return
        waiting = [m for m in self.members.values() if m.proposal is not None]
        formable = len(waiting) >= self.spec.min_members and all(m.settled for m in waiting)
        if formable and self.first_proposal_s is not None and not self._survivors(waiting):
            yield self.first_proposal_s + self._last_call_s
        for member in waiting:
            yield self._overdue_s(member)

    @staticmethod
    def _passed(since_s: float | None, limit_s: float, now_s: float) -> bool:
        return since_s is not None and now_s >= since_s + limit_s

    def members_of(self, roster: Roster) -> list[Member]:
        """Those of the roster that are still here, by rank."""
        present = (self.members.get(e.member_id) for e in roster.entries)
        return [m for m in present if m is not None and m.is_in(roster)]

    def _to(self, trigger: Trigger, reason: str, now_s: float) -> None:
        self.phase = after(self.phase, trigger)
        self.phase_since_s, self.reason = now_s, reason
        self._log(f"phase_{self.phase.value}", reason)

    def _do(self, effect: Effect) -> None:
        self._effects.append(effect)

    def _take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _tell(self, member: Member, notice: Notice) -> None:
        who = {"member_id": member.member_id, "incarnation": member.incarnation}
        self._do(Tell(**who, notice=notice))

    def _log(self, kind: str, reason: str, member: Member | None = None) -> None:
        member_id = member.member_id if member else ""
        generation = self.last_generation
        self._do(Log(kind=kind, reason=reason, member_id=member_id, generation=generation))

    def _prepare_notice(self, roster: Roster) -> PrepareNotice:
        return PrepareNotice(reason=self.reason, roster=roster, digest=self.digest_of(roster))

    @staticmethod
    def _stop_notice(roster: Roster, step: Step) -> StopAtNotice:
        reason = f"generation {roster.generation} starts at step {step}"
        return StopAtNotice(reason=reason, generation=roster.generation, step=step)

    def _record(self, roster: Roster, verdict: Verdict, reason: str, now_s: float) -> Record:
        return Record(
            job=self.spec.job,
            roster=roster,
            verdict=verdict,
            reason=reason,
            digest=self.digest_of(roster),
            decided_s=now_s,
        )


def _names(members: list[Member]) -> str:
    return ", ".join(sorted(m.member_id for m in members)) or "nobody"


def _has_boundary(roster: Roster) -> bool:
    return roster.planned and roster.synchronous
