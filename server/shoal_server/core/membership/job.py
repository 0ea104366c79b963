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

from shoal_server.core.generations.agreement import Agreement
from shoal_server.core.generations.incarnations import is_older
from shoal_server.core.generations.ranges import confined_members, device_problem
from shoal_server.core.generations.roster import (
    Candidate,
    Conflict,
    Generation,
    Proposal,
    Verdict,
    draw_up,
    find_conflicts,
)
from shoal_server.core.membership import refusals
from shoal_server.core.membership.departures import Departures, names_of, passed
from shoal_server.core.membership.events import (
    Admit,
    Answered,
    Attended,
    Beaten,
    BecameReady,
    Broke,
    Continued,
    Disconnected,
    DrainAsked,
    Effect,
    Event,
    Halted,
    Left,
    Lost,
    Offered,
    OutcomeNotice,
    Paused,
    Proposed,
    Refusal,
    Refused,
    Resumed,
    RunningNotice,
    Save,
    Settled,
    StandbyNotice,
    Write,
)
from shoal_server.core.membership.member import Member
from shoal_server.core.membership.phases import Phase, Trigger
from shoal_server.core.membership.reach import whom_to_exclude


@dataclass(kw_only=True)
class Job(Departures):
    """One job's state machine. `handle` and `tick` change it; the edge only reads it."""

    # --- what the edge calls ---

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Take one event in and say what follows from it."""
        self._keep_limits(now_s)
        if isinstance(event, Attended):
            self._attended(event, now_s)
        else:
            self._heard(self._known(event), event, now_s)
        self._advance(now_s)
        self._tell_pauses(now_s)
        return self._take_effects()

    def tick(self, now_s: float) -> list[Effect]:
        """Act on the deadlines that have passed."""
        self._keep_limits(now_s)
        for member, reason in self.attendance.overdue(now_s):
            if self.members.get(member.member_id) is member:
                self._remove(member, reason, now_s)
        if passed(self.suspect_since_s, self.limits.reconnect_s, now_s):
            self._break((), f"{self.reason}; all members still answer", now_s)
        if passed(self.broken_since_s, self.limits.collective_s, now_s):
            self._drop_unsettled(now_s)
        if self.overdue_check_s is not None and now_s >= self.overdue_check_s:
            self._drop_overdue(now_s)
        self._drop_paused(now_s)
        self._advance(now_s)
        self._tell_pauses(now_s)
        return self._take_effects()

    def beaten(self, event: Beaten, now_s: float) -> None:
        """Take in what a heartbeat tells of the member's trainer. Nothing follows from it at once.

        It is called for every beat, so it costs next to nothing.
        """
        member = self.members.get(event.member_id)
        if member is None or member.incarnation != event.incarnation:
            return
        if event.moved != member.moved:
            member.moved, member.moved_s = event.moved, now_s
        member.waits_for_others = event.waits
        member.own_code_since_s = now_s - event.own_code_s if event.own_code_s > 0 else None

    def next_deadline_s(self) -> float | None:
        """When `tick` should be called next, if no event comes before."""
        return min(self._deadlines(), default=None)

    # --- who is there ---

    def _known(self, event: Event) -> Member:
        member = self.members.get(event.member_id)
        if refusal := self.attendance.expelled.get(event.incarnation):
            # The notice that says so is on its way; whichever comes first, the reason is one.
            raise Refused(refusal)
        if member is None or member.incarnation != event.incarnation:
            raise Refused(self._fenced(member, event))
        return member

    def _fenced(self, holder: Member | None, event: Event) -> Refusal:
        """To a process that is no member, where `holder` has its name now."""
        if holder is None:
            return refusals.not_a_member(self.spec.job, event, self.last_generation)
        return refusals.replaced(event, holder.incarnation, self.last_generation)

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
            case DrainAsked() | Paused() | Resumed():
                self._asked(member, event, now_s)
            case Lost():
                self._remove(member, event.reason, now_s)
            case Left():
                self._left(member, event, now_s)
            case _:
                raise AssertionError(f"no handler for {event}")

    def _attended(self, event: Attended, now_s: float) -> None:
        self._refuse_if_over()
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
            refusal = self.attendance.expelled[event.incarnation]
            raise Refused(refusal or self._fenced(known, event))
        if known is not None and is_older(event.incarnation, known.incarnation):
            raise Refused(self._fenced(known, event))
        if error := self.setbacks.left_out(event.member_id, now_s):
            raise Refused(self._left_out(event.member_id, error))
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
        if self._told_paused:
            self._tell(member, self._pauses_notice())

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

    # --- COLLECT ---

    def _proposed(self, member: Member, proposal: Proposal, now_s: float) -> None:
        self._refuse_if_over()
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
        self.setbacks.release(now_s)
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
        if self.pausing():
            return  # they would stop for nothing: the change comes when all can take part in it
        if self.phase is Phase.RUNNING:
            self._to(Trigger.CHANGE_WANTED, wanted, now_s)
        # Members that have not proposed yet are on their way: one stop takes them along.
        coming = len(self.attendance.candidates) + len(self.attendance.draining) < len(self.members)
        if not coming or passed(self.phase_since_s, self.limits.gather_s, now_s):
            self._freeze(chosen, now_s)

    def _change_wanted(self, now_s: float) -> tuple[str, list[Member]]:
        """Why the running generation is to be changed ("": it is not), and to whom."""
        assert self.running is not None
        newcomer = any(m.settled and not m.is_in(self.running) for m in self._able)
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
        texts = [f"{names_of(joiners)} joins"] if joiners else []
        texts += [f"{names_of(leavers)} leaves"] if leavers else []
        return ", ".join(texts), chosen

    def _chosen(self, now_s: float) -> list[Member]:
        """Who would be in a roster drawn up now: who trained before first, then by arrival."""
        # Who has still to settle may have missed what it was told: it would go on where it was.
        candidates = [m for m in self._able if m.settled or m.is_in(self.running)]
        if self.running is not None and not any(m.is_in(self.running) for m in candidates):
            # All who train are to leave: first they hand over to those who came.
            candidates += [m for m in self.members_of(self.running) if m.proposal is not None]
        if self._lacks_state(candidates):
            # Who is to leave hands over first, to whom it can.
            candidates += [m for m in self.attendance.draining.values() if m.holds_state]
        ranks = {e.member_id: e.rank for e in self.previous.entries} if self.previous else {}
        candidates.sort(
            key=lambda m: (
                self.running is None and not m.holds_state,
                ranks.get(m.member_id, len(ranks)),
                m.attended_s,
            )
        )
        for position, member in enumerate(candidates[self.spec.max_members :], start=1):
            reason = f"standing by: the job has its maximum of {self.spec.max_members} members"
            if member.waiting_for != reason:
                member.waits(reason, now_s)
                self._tell(member, StandbyNotice(reason=reason, position=position))
        return candidates[: self.spec.max_members]

    def _may_form(self, now_s: float) -> bool:
        """Whether a roster can be drawn up, where nothing runs."""
        num_ready = len(self._able)
        # Survivors that still have to settle are worth waiting for.
        if num_ready < self.spec.min_members or not self.attendance.all_settled:
            return False
        if self._awaits_state:
            return False
        if num_ready + self.num_excluded >= self.spec.desired_members or self._has_survivors:
            return True
        return passed(self.first_proposal_s, self._last_call_s, now_s)

    @property
    def _awaits_state(self) -> bool:
        """Whether the state that is missing may be with somebody who has not spoken yet, or is with
        one whose next try is put off."""
        if not self._lacks_state(self._able):
            return False
        candidates = self.attendance.candidates.values()
        return bool(self.attendance.unheard) or not self._lacks_state(candidates)

    @property
    def _last_call_s(self) -> float:
        return self.spec.last_call_s or self.limits.last_call_s

    @property
    def _has_survivors(self) -> bool:
        """Whether somebody is there who trained before: then nobody waits for a last call."""
        if self.previous is None:
            return False
        staying = self._able
        leaving = self.attendance.draining.values()
        return any(m.is_in(self.previous) for m in staying) or any(m.holds_state for m in leaving)

    def _freeze(self, chosen: list[Member], now_s: float) -> None:
        candidates = [m.as_candidate() for m in chosen]
        if blamed := self._confined(candidates):
            self._refuse_confined(blamed, candidates, now_s)
            self._advance(now_s)
            return
        generation = Generation(self.last_generation + 1)
        roster = draw_up(
            generation,
            candidates,
            previous=self.previous,
            running=self.running,
            trained=self.progress.has_trained and not any(c.proposal.stateless for c in candidates),
        )
        old = self.running.member_ids if self.running is not None else ()
        self.last_generation = generation
        self.agreement = Agreement.on(roster, self.digest_of(roster), stopping=old)
        self._to(Trigger.FROZEN, f"{names_of(chosen)} form generation {generation}", now_s)
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
        elif agreement.accept(member.member_id, dict(event.unreachable), event.checkpoint_steps):
            if agreement.unreachable:
                self._exclude_unreachable(agreement, now_s)
            else:
                self._commit_if_there_is_state(agreement, now_s)

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
            self._commit_if_there_is_state(agreement, now_s)
            return
        self._abort(f"unreachable: {'; '.join(excluded.values())}", now_s)
        self.num_excluded += len(excluded)
        for name, seen in excluded.items():
            self._refuse(self.members[name], refusals.unreachable(self.spec.job, name, seen), now_s)

    def _commit_if_there_is_state(self, agreement: Agreement, now_s: float) -> None:
        """Whoever trained here before: a job never starts from initial values a second time."""
        if not agreement.roster.from_checkpoint:
            self._commit(agreement, now_s)
            return
        step = agreement.best_checkpoint()
        if step is None:
            names = names_of(self.members_of(agreement.roster))
            self._lose_state(f"{names}, who hold no state and see no checkpoint", now_s)
            return
        seeing = {name for name, steps in agreement.checkpoint_steps.items() if step in steps}
        blind = [m for m in self.members_of(agreement.roster) if m.member_id not in seeing]
        if not blind:
            self._commit(agreement, now_s)
            return
        others = names_of([m for m in self.members_of(agreement.roster) if m not in blind])
        reason = f"{names_of(blind)} sees no checkpoint of step {step}, as {others} does"
        self._abort(reason, now_s)
        self.num_excluded += len(blind)
        for member in blind:
            self._refuse(member, refusals.no_checkpoint(member.member_id, step, others), now_s)

    def _commit(self, agreement: Agreement, now_s: float) -> None:
        roster = agreement.roster
        reason = f"all {len(roster.entries)} members accepted generation {roster.generation}"
        self._to(Trigger.ACCEPTED, reason, now_s)
        record = self._record(Verdict.COMMITTED, reason, now_s)
        self.previous, self.record = roster, record
        # Who was waited for after a break has settled or is gone.
        self.broken_since_s = None
        self._do(Write(record=record))
        to_boundary_s = self.limits.collective_s if agreement.has_boundary else 0.0
        self.deadline_s = now_s + to_boundary_s + self.limits.bring_up_s
        self.attendance.settle(self.members_of(roster), settled=not roster.synchronous)
        notice = OutcomeNotice(reason=reason, record=record)
        for member in self.concerned(roster):
            member.waits(f"the first collective of generation {roster.generation}", now_s)
            self._tell(member, notice)

    # --- COMMITTED ---

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
        if not agreement.ready(member.member_id, event.step):
            member.waits(f"the others' first collective in {agreement.generation}", now_s)
            return
        roster, old = agreement.roster, self.running
        self.running, self.agreement = roster, None
        self.deadline_s = self.broken_since_s = self.suspect_since_s = None
        self.overdue_check_s, self.failures, self.num_excluded = None, 0, 0
        self.setbacks.succeeded(roster.member_ids)
        reason = f"generation {roster.generation} runs with {len(roster.entries)} members"
        self._to(Trigger.READY, reason, now_s)
        trainers = self.members_of(roster)
        if roster.synchronous:
            self._note_start(agreement, trainers)
        notice = RunningNotice(reason=reason, generation=roster.generation)
        for trainer in trainers:
            trainer.waits("nothing: it trains", now_s)
            self._tell(trainer, notice)
        if old is not None and roster.synchronous:
            self._part_leavers(old, roster, now_s)

    def _note_start(self, agreement: Agreement, trainers: list[Member]) -> None:
        """A synchronous generation runs: whatever its members came with, all hold one state."""
        start, reached = agreement.starts_at, self.progress.reached
        if start is None:
            start = max(agreement.stop_at or agreement.roster.step, reached)
        self.attendance.hold_state(trainers, start)
        if any(m.proposal is not None and m.proposal.stateless for m in trainers):
            return
        if start < reached:
            reason = f"generation {agreement.generation} goes on from step {start}"
            self._log("went_back", f"{reason}; the job had come to step {reached}")
        if self.progress.ran(agreement.generation, start):
            # Before anybody takes a step: nobody does until all have an answer to their Ready.
            self._do(Save())

    # --- time ---

    def _deadlines(self) -> Iterator[float]:
        yield from self.attendance.deadlines()
        yield from self.setbacks.next_release_s(self.attendance.candidates)
        yield from (pause.ends_s for _, pause in self.attendance.pauses)
        if self.suspect_since_s is not None:
            yield self.suspect_since_s + self.limits.reconnect_s
        if not self.pausing():
            yield from self._limits_that_run()

    def _limits_that_run(self) -> Iterator[float]:
        """Those that a pause holds up."""
        if self.deadline_s is not None:
            yield self.deadline_s
        if self.broken_since_s is not None:
            yield self.broken_since_s + self.limits.collective_s
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
        formable = len(self._able) >= self.spec.min_members
        formable = formable and self.attendance.all_settled and not self._awaits_state
        if formable and self.first_proposal_s is not None:
            yield self.first_proposal_s + self._last_call_s
