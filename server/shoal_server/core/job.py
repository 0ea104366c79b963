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

A member that is to leave (drain) is left out by a planned change too, and goes once the others
train without it.

Members of an asynchronous job never stop: they need neither boundary nor settling.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal_server.core import refusals
from shoal_server.core.agreement import Agreement
from shoal_server.core.events import (
    Admit,
    Answered,
    Attended,
    BecameReady,
    BreakNotice,
    Broke,
    Continued,
    Disconnected,
    DrainAsked,
    DrainNotice,
    Effect,
    Event,
    Expel,
    Finish,
    Halted,
    Left,
    Lost,
    Offered,
    OutcomeNotice,
    Proposed,
    Refusal,
    Refused,
    RefusedNotice,
    RunningNotice,
    Settled,
    StandbyNotice,
    Write,
)
from shoal_server.core.incarnations import is_older
from shoal_server.core.job_state import JobState
from shoal_server.core.member import Member
from shoal_server.core.phases import Phase, Trigger
from shoal_server.core.ranges import confined_members, device_problem
from shoal_server.core.reach import whom_to_exclude
from shoal_server.core.roster import (
    NO_GENERATION,
    Candidate,
    Conflict,
    Generation,
    Proposal,
    Roster,
    Verdict,
    draw_up,
    find_conflicts,
)

FIRST_BACK_OFF_S = 0.05
MAX_BACK_OFF_S = 5.0
MAX_NAMES = 10


@dataclass(kw_only=True)
class Job(JobState):
    """One job's state machine. `handle` and `tick` change it; the edge only reads it."""

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
        for member, reason in self.attendance.overdue(now_s):
            if self.members.get(member.member_id) is member:
                self._remove(member, reason, now_s)
        if _passed(self.suspect_since_s, self.limits.reconnect_s, now_s):
            self._break((), f"{self.reason}; all members still answer", now_s)
        if _passed(self.broken_since_s, self.limits.collective_s, now_s):
            self._drop_unsettled(now_s)
        if self.overdue_check_s is not None and now_s >= self.overdue_check_s:
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
            case Halted() | Continued():
                self._halted(member, event, now_s)
            case DrainAsked():
                self._drain_asked(member, event, now_s)
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
        if problem := device_problem(event.info):
            raise Refused(refusals.bad_devices(event.member_id, problem))
        known = self.members.get(event.member_id)
        if known is not None and known.incarnation == event.incarnation:
            self.attendance.show_life(known)
            self._tell_again(known)
            return
        if event.incarnation in self.attendance.expelled:
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
        self.attendance.admit(member)
        self._do(Admit(member_id=member.member_id, incarnation=member.incarnation))
        self._log("member_attended", f"{member.member_id} attends from {event.info.host}", member)

    def _disconnected(self, member: Member, now_s: float) -> None:
        self.attendance.disconnect(member, now_s)
        if self.suspect_since_s is not None and member.is_in(self.running):
            self._remove(member, "its stream broke, and so did a collective", now_s)

    def _halted(self, member: Member, event: Halted | Continued, now_s: float) -> None:
        if isinstance(event, Halted):
            self.attendance.halt(member, now_s)
            self._log("member_halted", f"a signal halted {member.member_id}", member)
        else:
            self.attendance.go_on(member)
            self._log("member_continued", f"{member.member_id} goes on", member)

    def _left(self, member: Member, event: Left, now_s: float) -> None:
        # Who comes with all its work behind it does not end the training of the others.
        concerns_all = self.running is None or member.is_in(self.running)
        if event.completed and concerns_all and not self.completing:
            self._complete(member, now_s)
        self._remove(member, f"left: {event.reason}", now_s, completed=event.completed)

    def _remove(
        self, member: Member, reason: str, now_s: float, *, completed: bool = False
    ) -> None:
        """Take a member out, and with it whatever it was needed for."""
        trained, attempted = member.is_in(self.running), member.is_in(self.attempt)
        reason = f"{member.member_id}: {reason}"
        self.attendance.remove(member)
        self._do(Expel(member_id=member.member_id, incarnation=member.incarnation, reason=reason))
        self._log("member_completed" if completed else "member_removed", reason, member)
        if not self.attendance.candidates:
            self.first_proposal_s = None
        if self.completing:
            roster = self.running or self.attempt
            if (trained or attempted) and not completed and roster is not None:
                self._tell_broken(roster, (member.member_id,), reason, now_s)
            if self.agreement is not None:
                self.agreement.forget(member.member_id)
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

    # --- who is to leave ---

    def _drain_asked(self, member: Member, event: DrainAsked, now_s: float) -> None:
        if member.draining_s is None:
            self.attendance.drain(member, event.reason, now_s)
            self._log("drain_asked", f"{member.member_id} is to leave: {event.reason}", member)
        self._tell(member, DrainNotice(reason=event.reason, now=member.let_go))

    def _let_go(self, now_s: float) -> None:
        """Tell those to leave now whom no planned change can spare the others."""
        for member in list(self.attendance.draining.values()):
            if member.let_go or self._is_worth_waiting(member, now_s):
                continue
            member.let_go = True
            member.waits("nothing: it leaves at its next step boundary", now_s)
            self._tell(member, DrainNotice(reason=member.drain_reason, now=True))

    def _is_worth_waiting(self, member: Member, now_s: float) -> bool:
        """Whether a generation without the member may soon follow the one it trains in."""
        roster = self.attempt if member.is_in(self.attempt) else self.running
        if roster is None or not roster.synchronous or not member.is_in(roster):
            return False
        if self.completing or _passed(member.draining_s, self.limits.drain_s, now_s):
            return False
        candidates = self.attendance.candidates
        if len(candidates) >= self.spec.min_members and any(
            m.is_in(roster) for m in candidates.values()
        ):
            return True
        # Else its state has to be handed to somebody who is only on the way.
        return any(m.draining_s is None and not m.is_in(roster) for m in self.members.values())

    def _leavers(self, chosen: list[Member]) -> list[Member]:
        """Who trains and would not be in a roster of the chosen."""
        if self.running is None or not self.attendance.draining:
            return []
        staying = {m.member_id for m in chosen}
        draining = self.attendance.draining.values()
        return [m for m in draining if m.is_in(self.running) and m.member_id not in staying]

    # --- COLLECT ---

    def _proposed(self, member: Member, proposal: Proposal, now_s: float) -> None:
        if self.completing:
            raise Refused(refusals.finished(self.spec.job, self.reason))
        if not proposal.fields:
            raise Refused(refusals.empty_proposal(member.member_id))
        if conflicts := self._conflicts_with_trainers(member, proposal):
            raise Refused(refusals.conflict(self.spec.job, conflicts))
        known = member.proposal
        if known is not None and known.fields == proposal.fields:
            # Said again after a reconnection, or a call that comes late: what it said since stands.
            step, has_state = max(known.step, proposal.step), known.has_state or proposal.has_state
            proposal = replace(proposal, step=step, has_state=has_state)
        self.attendance.propose(member, proposal)
        if self.first_proposal_s is None:
            self.first_proposal_s = now_s
        if self.overdue_check_s is None:
            self.overdue_check_s = now_s + self.limits.join_s
        if known is None:
            member.waits("other members", now_s)
            self._log("member_proposed", f"{member.member_id} is ready to train", member)

    def _conflicts_with_trainers(self, member: Member, proposal: Proposal) -> tuple[Conflict, ...]:
        """A newcomer that differs from those who train, or did before a break, is refused here:
        it must not disturb them."""
        roster = self.running or self.previous
        if roster is None or member.is_in(roster) or proposal.fields == roster.fields:
            return ()
        trainers = [m.as_candidate() for m in self.members_of(roster) if m.proposal]
        newcomer = replace(member, proposal=proposal).as_candidate()
        return find_conflicts([*trainers, newcomer])

    def _advance(self, now_s: float) -> None:
        """Go on as far as time and the members that are present allow."""
        if self.attendance.draining:
            self._let_go(now_s)
        if self.completing:
            return
        if self.deadline_s is not None and now_s >= self.deadline_s:
            self._deadline_passed(now_s)
        if self.running is None:
            if self.phase is Phase.COLLECT and self._may_form(now_s):
                self._freeze(self._chosen(now_s), now_s)
        elif self.phase in (Phase.RUNNING, Phase.COLLECT):
            self._advance_change(now_s)

    def _advance_change(self, now_s: float) -> None:
        """A generation runs: who would join it, or leave it?"""
        wanted, chosen = self._change_wanted(now_s)
        if not wanted:
            if self.phase is Phase.COLLECT:
                self._to(Trigger.CHANGE_DROPPED, "who wanted the change is gone", now_s)
            return
        if self.phase is Phase.RUNNING:
            self._to(Trigger.CHANGE_WANTED, wanted, now_s)
        # Members that have not proposed yet are on their way: one stop takes them along.
        coming = len(self.attendance.candidates) + len(self.attendance.draining) < len(self.members)
        if not coming or _passed(self.phase_since_s, self.limits.gather_s, now_s):
            self._freeze(chosen, now_s)

    def _change_wanted(self, now_s: float) -> tuple[str, list[Member]]:
        """Why the running generation is to be changed ("": it is not), and to whom."""
        assert self.running is not None
        newcomer = any(not m.is_in(self.running) for m in self.attendance.candidates.values())
        if not newcomer and not self.attendance.draining:
            return "", []
        if any(m.proposal is None for m in self.members_of(self.running)):
            # After a change of leaders: a roster without them would leave behind who trains.
            return "", []
        chosen = self._chosen(now_s)
        joiners = [m for m in chosen if not m.is_in(self.running)]
        leavers = self._leavers(chosen)
        if len(chosen) < self.spec.min_members or not (joiners or leavers):
            return "", []
        texts = [f"{_names(joiners)} joins"] if joiners else []
        texts += [f"{_names(leavers)} leaves"] if leavers else []
        return ", ".join(texts), chosen

    def _chosen(self, now_s: float) -> list[Member]:
        """Who would be in a roster drawn up now: who trained before first, then by arrival."""
        candidates = list(self.attendance.candidates.values())
        if self.running is not None and not any(m.is_in(self.running) for m in candidates):
            # All who train are to leave: first they hand over to those who came.
            candidates += [m for m in self.members_of(self.running) if m.proposal is not None]
        ranks = {e.member_id: e.rank for e in self.previous.entries} if self.previous else {}
        candidates.sort(key=lambda m: (ranks.get(m.member_id, len(ranks)), m.attended_s))
        for position, member in enumerate(candidates[self.spec.max_members :], start=1):
            reason = f"standing by: the job has its maximum of {self.spec.max_members} members"
            if member.waiting_for != reason:
                member.waits(reason, now_s)
                self._tell(member, StandbyNotice(reason=reason, position=position))
        return candidates[: self.spec.max_members]

    def _may_form(self, now_s: float) -> bool:
        """Whether a roster can be drawn up, where nothing runs."""
        num_ready = len(self.attendance.candidates)
        # Survivors that still have to settle are worth waiting for.
        if num_ready < self.spec.min_members or not self.attendance.all_settled:
            return False
        if num_ready + self.num_excluded >= self.spec.desired_members or self._has_survivors:
            return True
        return _passed(self.first_proposal_s, self._last_call_s, now_s)

    @property
    def _last_call_s(self) -> float:
        return self.spec.last_call_s or self.limits.last_call_s

    @property
    def _has_survivors(self) -> bool:
        """Whether somebody is there who trained before: then nobody waits for a last call."""
        if self.previous is None:
            return False
        return any(m.is_in(self.previous) for m in self.attendance.candidates.values())

    def _freeze(self, chosen: list[Member], now_s: float) -> None:
        candidates = [m.as_candidate() for m in chosen]
        if blamed := self._confined(candidates):
            self._refuse_confined(blamed, candidates, now_s)
            self._advance(now_s)
            return
        generation = Generation(self.last_generation + 1)
        roster = draw_up(generation, candidates, previous=self.previous, running=self.running)
        old = self.running.member_ids if self.running is not None else ()
        self.last_generation = generation
        self.agreement = Agreement.on(roster, self.digest_of(roster), stopping=old)
        self._to(Trigger.FROZEN, f"{_names(chosen)} form generation {generation}", now_s)
        if conflicts := find_conflicts(candidates):
            self._abort_conflicting(conflicts, now_s)
            return
        self.deadline_s = now_s + self.limits.prepare_s
        notice = self._prepare_notice(self.agreement)
        for member in chosen:
            member.waits(f"all members to accept generation {generation}", now_s)
            self._tell(member, notice)

    def _confined(self, candidates: list[Candidate]) -> list[Candidate]:
        """Who cannot train with members on other hosts, for its address or for theirs."""
        confined = confined_members(candidates)
        if self.running is None:
            return confined
        trainers = self.members_of(self.running)
        hosts = {m.info.host for m in trainers}
        names = {m.member_id for m in trainers}
        if any(c.member_id in names for c in confined):
            # Who trains stays, on its own host: nobody comes in from another.
            confined += [c for c in candidates if c.info.host not in hosts]
        return [c for c in confined if c.member_id not in names]

    def _refuse_confined(
        self, blamed: list[Candidate], candidates: list[Candidate], now_s: float
    ) -> None:
        addresses: dict[str, list[str]] = {}
        for c in candidates:
            addresses.setdefault(c.info.address or "(none)", []).append(c.member_id)
        values = tuple((address, tuple(sorted(who))) for address, who in sorted(addresses.items()))
        refusal = refusals.confined(self.spec.job, Conflict(field="address", values=values))
        names = dict.fromkeys(c.member_id for c in blamed)
        self.num_excluded += len(names)
        for name in names:
            self._refuse(self.members[name], refusal, now_s)

    # --- PREPARE ---

    def _answered(self, member: Member, event: Answered, now_s: float) -> None:
        agreement = self.agreement_of(member, event.generation, Phase.PREPARE)
        if agreement is None:
            return  # Late: the attempt was decided without this answer.
        if event.rejections:
            held = member.member_id
            conflicts = tuple(
                Conflict(field=r.field, values=((r.seen, (held,)), (r.expected, ("roster",))))
                for r in event.rejections
            )
            self._abort_conflicting(conflicts, now_s)
        elif event.digest != agreement.digest:
            self._abort(f"{member.member_id} accepted another roster than was sent", now_s)
        elif agreement.accept(member.member_id, dict(event.unreachable)):
            if agreement.unreachable:
                self._exclude_unreachable(agreement, now_s)
            else:
                self._commit(agreement.roster, now_s)

    def _exclude_unreachable(self, agreement: Agreement, now_s: float) -> None:
        """Members that cannot reach each other never start: the fewest go, the rest try again."""
        members = self.members_of(agreement.roster)
        newest_last = sorted(members, key=lambda m: (not m.is_in(self.previous), m.attended_s))
        excluded = whom_to_exclude(
            agreement.unreachable,
            newest_last=[m.member_id for m in newest_last],
            kept={m.member_id for m in members if m.is_in(self.running)},
        )
        if not excluded:
            self._commit(agreement.roster, now_s)
            return
        self._abort(f"unreachable: {'; '.join(excluded.values())}", now_s)
        self.num_excluded += len(excluded)
        for name, seen in excluded.items():
            self._refuse(self.members[name], refusals.unreachable(self.spec.job, name, seen), now_s)

    def _commit(self, roster: Roster, now_s: float) -> None:
        reason = f"all {len(roster.entries)} members accepted generation {roster.generation}"
        self._to(Trigger.ACCEPTED, reason, now_s)
        record = self._record(Verdict.COMMITTED, reason, now_s)
        self.previous, self.record = roster, record
        # Who was waited for after a break has settled or is gone.
        self.broken_since_s = None
        self._do(Write(record=record))
        to_boundary_s = self.limits.collective_s if self._stops_old else 0.0
        self.deadline_s = now_s + to_boundary_s + self.limits.bring_up_s
        self.attendance.settle(self.members_of(roster), settled=not roster.synchronous)
        notice = OutcomeNotice(reason=reason, record=record)
        for member in self.concerned(roster):
            member.waits(f"the first collective of generation {roster.generation}", now_s)
            self._tell(member, notice)

    # --- COMMITTED ---

    @property
    def _stops_old(self) -> bool:
        return self.agreement is not None and self.agreement.has_boundary

    def _offered(self, member: Member, event: Offered) -> None:
        agreement = self.agreement
        if agreement is None or self.phase is not Phase.COMMITTED or self.running is None:
            return
        if event.generation != agreement.generation or not member.is_in(self.running):
            return
        if agreement.stop_at is not None:
            self._tell(member, self._stop_notice(agreement.generation, agreement.stop_at))
        elif agreement.offer(member.member_id, event.next_step):
            assert agreement.stop_at is not None
            stop_at = agreement.stop_at
            self._log("boundary_agreed", f"the old generation stops at step {stop_at}")
            for old_member in self.members_of(self.running):
                self._tell(old_member, self._stop_notice(agreement.generation, stop_at))

    def _became_ready(self, member: Member, event: BecameReady, now_s: float) -> None:
        agreement = self.agreement_of(member, event.generation, Phase.COMMITTED)
        if agreement is None:
            return
        member.entered = agreement.generation
        if not agreement.ready(member.member_id):
            member.waits(f"the others' first collective in {agreement.generation}", now_s)
            return
        roster, old = agreement.roster, self.running
        self.running, self.agreement = roster, None
        self.deadline_s = self.broken_since_s = self.suspect_since_s = None
        self.overdue_check_s, self.failures, self.num_excluded = None, 0, 0
        reason = f"generation {roster.generation} runs with {len(roster.entries)} members"
        self._to(Trigger.READY, reason, now_s)
        notice = RunningNotice(reason=reason, generation=roster.generation)
        for trainer in self.members_of(roster):
            trainer.waits("nothing: it trains", now_s)
            self._tell(trainer, notice)
            if roster.synchronous and trainer.proposal is not None:
                # Whatever it proposed with: from here on it holds what all hold.
                step = agreement.stop_at or roster.step
                trainer.proposal = replace(trainer.proposal, step=step, has_state=True)
        if old is not None and roster.synchronous:
            self._part_leavers(old, roster, now_s)

    def _part_leavers(self, old: Roster, roster: Roster, now_s: float) -> None:
        """Let those go who trained in the old generation and are not in the one that runs now."""
        for leaver in [m for m in self.members_of(old) if not m.is_in(roster)]:
            if leaver.draining_s is not None:
                self._tell(leaver, DrainNotice(reason=leaver.drain_reason, now=True))
                self._remove(leaver, f"drained: {leaver.drain_reason}", now_s)
            else:
                # It asked a leader before this one, and will ask again: it waits at the boundary.
                self.attendance.settle((leaver,), settled=False)
                self._tell(leaver, self._break_notice(old.generation))

    # --- what goes wrong ---

    def _broke(self, member: Member, event: Broke, now_s: float) -> None:
        """A collective failed. Who is also disconnected is lost; else word of a loss may follow."""
        agreement = self.agreement
        if self.agreement_of(member, event.generation, Phase.COMMITTED) is not None:
            self._abort(f"{member.member_id} could not bring it up: {event.error}", now_s)
            return
        if agreement is not None and self._lost_its_old(agreement, member):
            # A new leader could not know that the old generation still had to be trained in.
            self._abort(f"the old generation broke under {member.member_id}", now_s)
            return
        running = self.running
        if running is None or event.generation != running.generation:
            if NO_GENERATION < event.generation <= self.last_generation:
                # Its end was told by a leader that is gone, or while this member was away.
                self._tell(member, self._break_notice(event.generation))
            return
        if not running.synchronous:
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

    def _lost_its_old(self, agreement: Agreement, member: Member) -> bool:
        """Whether a member on its way to a planned generation comes from none that runs."""
        waits = self.phase is Phase.COMMITTED and agreement.has_boundary
        return waits and self.running is None and member.member_id in agreement.unready

    def _break(self, lost: tuple[str, ...], reason: str, now_s: float) -> None:
        """End the running generation now. Its survivors settle, then the next one forms."""
        if self.agreement is not None:
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
        members = self.members_of(roster)
        self.attendance.settle(members, settled=False)
        notice = BreakNotice(reason=reason, generation=generation, lost_member_ids=lost)
        for member in members:
            member.waits(f"its trainer to stop after the break ({reason})", now_s)
            self._tell(member, notice)

    def _settled(self, member: Member, event: Settled, now_s: float) -> None:
        if self.completing:
            raise Refused(refusals.finished(self.spec.job, self.reason))
        if event.left < member.entered:
            return  # Late: it has trained since.
        member.entered = event.left
        self._believe_left(member, event.left, now_s)
        committed = self.attempt if self.phase is Phase.COMMITTED else None
        if member.is_in(self.running) or member.is_in(committed):
            return
        if member.proposal is not None:
            step, has_state = event.step, event.has_state
            member.proposal = replace(member.proposal, step=step, has_state=has_state)
        self.attendance.settle((member,), settled=True)
        member.waits("the other members to settle", now_s)
        if self.attendance.all_settled:
            self.broken_since_s = None

    def _believe_left(self, member: Member, left: Generation, now_s: float) -> None:
        """It was told of a break by a leader whose word is lost: what it left does not run."""
        reason = f"{member.member_id} has left generation {left}"
        agreement, running = self.agreement, self.running
        committed = self.phase is Phase.COMMITTED and agreement is not None
        if committed and member.is_in(self.attempt) and left >= self.last_generation:
            self._abort(reason, now_s)
        if running is not None and member.is_in(running) and left >= running.generation:
            self._break((), reason, now_s)

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
        agreement = self.agreement
        assert agreement is not None
        roster, concerned = agreement.roster, self.concerned(agreement.roster)
        brought_up = self.phase is Phase.COMMITTED and roster.synchronous
        old_is_over = self.running is None or agreement.stop_at is not None
        self._to(Trigger.FAILED, reason, now_s)
        record = self._record(Verdict.ABORTED, reason, now_s, conflicts)
        self.agreement, self.failures = None, self.failures + 1
        self._do(Write(record=record))
        if brought_up and old_is_over and self.running is not None:
            # First of all: who waits at the boundary must not take the abort for leave to train on.
            old, self.running = self.running, None
            self._tell_broken(old, (), reason, now_s)
        notice = OutcomeNotice(reason=reason, record=record)
        for member in concerned:
            self._tell(member, notice)
        if brought_up and old_is_over:
            self._tell_broken(roster, (), reason, now_s)
        elif brought_up:
            newcomers = [m for m in self.members_of(roster) if not m.is_in(self.running)]
            # They had begun to bring it up. Or, where a new leader took the old generation for the
            # one that runs, they have trained in it since.
            self.attendance.settle(newcomers, settled=False)
        self.previous = self.running or self.previous
        back_off_s = min(FIRST_BACK_OFF_S * 2 ** (self.failures - 1), MAX_BACK_OFF_S)
        # One loss is news, not a failure to agree: the survivors need not wait to try again.
        again_s = now_s + (back_off_s if self.failures > 1 else 0.0)
        self.deadline_s = None if self.completing else again_s

    def _deadline_passed(self, now_s: float) -> None:
        self.deadline_s = None
        agreement = self.agreement
        if self.phase is Phase.ABORTED:
            intact = self.running is not None
            self._to(Trigger.INTACT if intact else Trigger.BACKED_OFF, self.reason, now_s)
        elif self.phase is Phase.PREPARE and agreement is not None:
            self._expel_late(agreement.unanswered, "accept or reject the roster", now_s)
        elif self.phase is Phase.COMMITTED and agreement is not None:
            to_stop = self.running is not None and agreement.stop_at is None
            late = agreement.unoffered if to_stop and agreement.unoffered else agreement.unready
            self._expel_late(late, "bring the generation up", now_s)

    def _expel_late(self, names: set[str], task: str, now_s: float) -> None:
        late = [self.members[name] for name in sorted(names) if name in self.members]
        reason = f"{_names(late)} did not {task} in time"
        self._abort(reason, now_s)
        for member in late:
            self._refuse(member, refusals.timeout(reason), now_s)

    def _drop_unsettled(self, now_s: float) -> None:
        self.broken_since_s = None
        limit = f"{self.limits.collective_s:g} s"
        for member in self.attendance.unsettled():
            if self.members.get(member.member_id) is member:
                reason = f"{member.member_id} did not come to a stand within {limit} of the break"
                self._refuse(member, refusals.timeout(reason), now_s)

    def _drop_overdue(self, now_s: float) -> None:
        """Nobody waits for a generation for longer than the join limit."""
        self.overdue_check_s = None
        if self.running is not None or self.phase is not Phase.COLLECT:
            return
        ready = list(self.attendance.candidates.values())
        for member in [m for m in ready if now_s >= self._overdue_s(m)]:
            reason = (
                f"no generation formed within {self.limits.join_s:g} s:"
                f" {len(ready)} of at least {self.spec.min_members} members were ready"
            )
            self._refuse(member, refusals.timeout(reason), now_s)
        left = self.attendance.candidates.values()
        self.overdue_check_s = min((self._overdue_s(m) for m in left), default=None)

    def _overdue_s(self, member: Member) -> float:
        return max(member.waiting_since_s, self.phase_since_s) + self.limits.join_s

    # --- the end ---

    def _complete(self, leaver: Member, now_s: float) -> None:
        """Nobody else needs to join. Who trains finishes; an attempt to change is called off."""
        self.completing = True
        reason = f"{leaver.member_id} completed its work"
        self._log("job_completing", reason)
        if self.agreement is not None and (self.running or self.phase is Phase.PREPARE):
            self.agreement.stop_at = None  # who has steps left goes on with them
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
        self.running = self.agreement = None
        self.deadline_s = self.broken_since_s = self.suspect_since_s = None
        self.overdue_check_s = None
        self._do(Finish(reason=self.reason))

    # --- time ---

    def _deadlines(self) -> Iterator[float]:
        yield from self.attendance.deadlines()
        if self.deadline_s is not None:
            yield self.deadline_s
        if self.broken_since_s is not None:
            yield self.broken_since_s + self.limits.collective_s
        if self.suspect_since_s is not None:
            yield self.suspect_since_s + self.limits.reconnect_s
        if self.overdue_check_s is not None:
            yield self.overdue_check_s
        for member in self.attendance.draining.values():
            if not member.let_go and member.draining_s is not None:
                yield member.draining_s + self.limits.drain_s
        if self.phase is Phase.COLLECT and not self.completing:
            yield from self._collect_deadlines()

    def _collect_deadlines(self) -> Iterator[float]:
        if self.running is not None:
            yield self.phase_since_s + self.limits.gather_s
            return
        formable = len(self.attendance.candidates) >= self.spec.min_members
        if formable and self.attendance.all_settled and self.first_proposal_s is not None:
            yield self.first_proposal_s + self._last_call_s


def _passed(since_s: float | None, limit_s: float, now_s: float) -> bool:
    return since_s is not None and now_s >= since_s + limit_s


def _names(members: list[Member]) -> str:
    names = sorted(m.member_id for m in members)
    shown = ", ".join(names[:MAX_NAMES])
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return shown + more or "nobody"
