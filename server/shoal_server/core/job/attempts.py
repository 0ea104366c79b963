"""PREPARE and COMMITTED: members get a roster, agree on it, and bring it up."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal_server.core.generations.agreement import Agreement
from shoal_server.core.generations.conflicts import find_conflicts
from shoal_server.core.generations.ranges import unreachable_members
from shoal_server.core.generations.roster import (
    Candidate,
    Conflict,
    Generation,
    GenerationRoster,
    Step,
    Verdict,
    build_roster,
)
from shoal_server.core.job.endings import Drains, Endings, Removal
from shoal_server.core.job.job_state import JobState
from shoal_server.core.membership import refusals
from shoal_server.core.membership.events import (
    NextStepReached,
    OutcomeNotice,
    ReadinessReported,
    RosterAnswered,
    RunningNotice,
    SaveJobRecord,
    WriteGeneration,
)
from shoal_server.core.membership.member import MemberState, names_of
from shoal_server.core.membership.phases import Phase, Trigger


@dataclass(frozen=True, kw_only=True)
class RosterChecks:
    """Functions of the edge that a roster passes before its members see it."""

    digest_of: Callable[[GenerationRoster], str]
    """Returns the digest that the members have to accept."""
    size_problem: Callable[[GenerationRoster], str]
    """Returns why etcd would not accept the roster's record; empty if it would."""


class Attempts:
    """Forms a generation, from its roster to its first collective."""

    def __init__(
        self,
        state: JobState,
        endings: Endings,
        removal: Removal,
        drains: Drains,
        checks: RosterChecks,
    ) -> None:
        self._state = state
        self._endings = endings
        self._removal = removal
        self._drains = drains
        self._checks = checks

    def freeze(self, chosen: list[MemberState], now_s: float) -> bool:
        """Draw the roster up and send it to its members, or abort it at once if they are in
        conflict. False if there is no attempt, because members were refused instead."""
        candidates = [m.as_candidate() for m in chosen]
        if blamed := self._confined(chosen, candidates):
            self._refuse_confined(blamed, candidates, now_s)
            return False
        generation = Generation(self._state.last_generation + 1)
        roster = build_roster(
            generation,
            candidates,
            previous=self._state.previous,
            running=self._state.running,
            trained=self._state.progress.has_trained
            and not any(c.proposal.stateless for c in candidates),
        )
        if problem := self._checks.size_problem(roster):
            self._refuse_too_large(chosen, problem, now_s)
            return False
        running = self._state.running
        # A member without steps left offers no step to stop at.
        old = [m.member_id for m in self._state.table.trainers(running)] if running else ()
        self._state.last_generation = generation
        self._state.agreement = Agreement.on(roster, self._checks.digest_of(roster), stopping=old)
        self._state.to(Trigger.FROZEN, f"{names_of(chosen)} form generation {generation}", now_s)
        if conflicts := find_conflicts(candidates):
            self._removal.abort_conflicting(conflicts, now_s)
            return True
        self._state.deadlines.deadline_s = now_s + self._state.limits.prepare_s
        notice = self._state.prepare_notice(self._state.agreement)
        for member in chosen:
            member.waits(f"all members to accept generation {generation}", now_s)
            self._state.notify_member(member, notice)
        return True

    def _refuse_too_large(self, chosen: list[MemberState], problem: str, now_s: float) -> None:
        """Refuse the members that may be at fault for the size (`JobState.suspects_of`). The others
        go on."""
        refusal = refusals.roster_too_large(self._state.spec.job, len(chosen), problem)
        for member in self._state.suspects_of(chosen):
            self._removal.refuse(member, refusal, now_s)

    def _confined(self, chosen: list[MemberState], candidates: list[Candidate]) -> list[Candidate]:
        """Members to refuse because an address works on one host only: the member's own address, or
        the address of a member that stays."""
        confined = unreachable_members(candidates)
        staying = [m for m in chosen if self._state.stays(m)]
        hosts = {m.info.host for m in staying}
        if self._state.running is None and (len(staying) == len(chosen) or len(hosts) > 1):
            return confined
        names = {m.member_id for m in staying}
        if any(c.member_id in names for c in confined):
            # Members that stay can be reached on their own host only: no member joins from another
            # host.
            confined += [c for c in candidates if c.info.host not in hosts]
        return [c for c in confined if c.member_id not in names]

    def _refuse_confined(
        self, blamed: list[Candidate], candidates: list[Candidate], now_s: float
    ) -> None:
        addresses: dict[str, list[str]] = {}
        for c in candidates:
            addresses.setdefault(c.info.address or "(none)", []).append(c.member_id)
        values = tuple((address, tuple(sorted(who))) for address, who in sorted(addresses.items()))
        refusal = refusals.confined(self._state.spec.job, Conflict(field="address", values=values))
        names = dict.fromkeys(c.member_id for c in blamed)
        self._state.tries.num_excluded += len(names)
        for name in names:
            self._removal.refuse(self._state.members[name], refusal, now_s)

    def answered(self, member: MemberState, event: RosterAnswered, now_s: float) -> None:
        agreement = self._state.agreement_of(member, event.generation, Phase.PREPARE)
        if agreement is None:
            return  # Late: the attempt was decided without this answer.
        if event.rejections:
            held = member.member_id
            conflicts = tuple(
                Conflict(field=r.field, values=((r.seen, (held,)), (r.expected, ("roster",))))
                for r in event.rejections
            )
            self._removal.abort_conflicting(conflicts, now_s)
        elif event.digest != agreement.digest:
            self._endings.abort(f"{member.member_id} accepted another roster than was sent", now_s)
        elif agreement.accept(member.member_id, dict(event.unreachable), event.checkpoint_steps):
            if agreement.unreachable:
                self._exclude_unreachable(agreement, now_s)
            else:
                self._commit_if_there_is_state(agreement, now_s)
        else:
            # Extend the deadline while answers arrive: ten thousand answers take a while.
            limits, since_s = self._state.limits, self._state.stage.since_s
            until_s = min(now_s + limits.prepare_s, since_s + limits.join_s)
            self._state.deadlines.deadline_s = until_s

    def _exclude_unreachable(self, agreement: Agreement, now_s: float) -> None:
        """Abort, and refuse members so that all others reach each other: see `members_to_exclude`.
        Commit if only members that train do not reach each other."""
        members = self._state.members_of(agreement.roster)
        newest_last = sorted(members, key=lambda m: (not m.is_in(self._state.previous), m.joined_s))
        names, running = [m.member_id for m in newest_last], self._state.running
        staying = {m.member_id for m in members if self._state.stays(m)}
        trainers = {m.member_id for m in members if m.is_in(running)}
        excluded = members_to_exclude(
            agreement.unreachable, newest_last=names, kept=staying
        ) or members_to_exclude(agreement.unreachable, newest_last=names, kept=trainers)
        if not excluded:
            self._commit_if_there_is_state(agreement, now_s)
            return
        self._endings.abort(f"unreachable: {'; '.join(excluded.values())}", now_s)
        self._state.tries.num_excluded += len(excluded)
        for name, seen in excluded.items():
            self._removal.refuse(
                self._state.members[name],
                refusals.unreachable(self._state.spec.job, name, seen),
                now_s,
            )

    def _commit_if_there_is_state(self, agreement: Agreement, now_s: float) -> None:
        """Commit if the members have a state to start from.

        If the job has trained and no member of the roster holds its state, the members start from
        the checkpoint that most of them see (the newest of equals), never again from initial
        values. If some members do not see it, the attempt is aborted, and those members are
        removed. If no member sees any checkpoint, the job's state is lost.
        """
        if not agreement.roster.from_checkpoint:
            self._commit(agreement, now_s)
            return
        step = agreement.best_checkpoint()
        if step is None:
            names = names_of(self._state.members_of(agreement.roster))
            self._removal.lose_state(f"{names}, which hold no state and see no checkpoint", now_s)
            return
        seeing = {name for name, steps in agreement.checkpoint_steps.items() if step in steps}
        blind = [m for m in self._state.members_of(agreement.roster) if m.member_id not in seeing]
        if not blind:
            self._commit(agreement, now_s)
            return
        others = names_of([m for m in self._state.members_of(agreement.roster) if m not in blind])
        reason = f"{names_of(blind)} sees no checkpoint of step {step}, but {others} does"
        self._endings.abort(reason, now_s)
        self._state.tries.num_excluded += len(blind)
        for member in blind:
            self._removal.refuse(
                member, refusals.no_checkpoint(member.member_id, step, others), now_s
            )

    def _commit(self, agreement: Agreement, now_s: float) -> None:
        roster = agreement.roster
        self._note_leavers(roster)
        reason = self._state.tries.changes.cause(roster)
        self._state.to(Trigger.ACCEPTED, reason, now_s)
        record = self._state.record_of(Verdict.COMMITTED, reason, now_s)
        self._state.previous, self._state.record = roster, record
        # After a break, all members have settled or are gone by now.
        self._state.deadlines.broken_since_s = None
        self._state.emit(WriteGeneration(record=record))
        to_boundary_s = self._state.limits.collective_s if agreement.has_boundary else 0.0
        self._state.deadlines.deadline_s = now_s + to_boundary_s + self._state.limits.bring_up_s
        longest_s = to_boundary_s + self._state.limits.longest_bring_up_s
        self._state.deadlines.bring_up_over_s = now_s + longest_s
        self._state.table.settle(self._state.members_of(roster), settled=not roster.synchronous)
        notice = OutcomeNotice(reason=reason, record=record)
        for member in self._state.members_to_notify(roster):
            member.waits(f"the first collective of generation {roster.generation}", now_s)
            self._state.notify_member(member, notice)

    def _note_leavers(self, roster: GenerationRoster) -> None:
        """Record as departures the members that trained before and are not in this roster."""
        changes = self._state.tries.changes
        before = self._state.members_of(changes.before) if changes.before is not None else []
        for member in before:
            if not member.is_in(roster):
                drained = member.drain.since_s is not None
                why = f"drained: {member.drain.reason}" if drained else member.waiting_for
                changes.record_departure(member.member_id, why, lost=False)

    def offered(self, member: MemberState, event: NextStepReached) -> None:
        agreement = self._state.agreement
        if (
            agreement is None
            or self._state.stage.phase is not Phase.COMMITTED
            or self._state.running is None
        ):
            return
        if event.generation != agreement.generation or not member.is_in(self._state.running):
            return
        if agreement.stop_at is not None:
            self._state.notify_member(
                member, self._state.stop_notice(agreement.generation, agreement.stop_at)
            )
        elif agreement.offer(member.member_id, event.next_step):
            assert agreement.stop_at is not None
            stop_at = agreement.stop_at
            self._state.log("boundary_agreed", f"the old generation stops at step {stop_at}")
            for old_member in self._state.members_of(self._state.running):
                self._state.notify_member(
                    old_member, self._state.stop_notice(agreement.generation, stop_at)
                )

    def became_ready(self, member: MemberState, event: ReadinessReported, now_s: float) -> None:
        agreement = self._state.agreement_of(member, event.generation, Phase.COMMITTED)
        if agreement is None:
            return
        member.entered = agreement.generation
        if not agreement.ready(member.member_id, event.step):
            generation = agreement.generation
            member.waits(f"the others' first collective in generation {generation}", now_s)
            return
        roster, old = agreement.roster, self._state.running
        self._state.running, self._state.agreement = roster, None
        self._state.deadlines.deadline_s = self._state.deadlines.broken_since_s = (
            self._state.deadlines.suspect_since_s
        ) = None
        (
            self._state.deadlines.overdue_check_s,
            self._state.tries.failures,
            self._state.tries.num_excluded,
        ) = None, 0, 0
        self._state.setbacks.succeeded(roster.member_ids)
        assert self._state.record is not None
        cause = self._state.record.reason
        reason = f"generation {roster.generation}: {cause}"
        self._state.to(Trigger.READY, reason, now_s)
        trainers = self._state.members_of(roster)
        start, reached = Step(0), self._state.progress.reached
        if roster.synchronous:
            start = self._note_start(agreement, trainers)
        self._log_story(roster, cause, start=start, reached=reached, now_s=now_s)
        notice = RunningNotice(reason=reason, generation=roster.generation)
        for trainer in trainers:
            trainer.waits("nothing: it trains", now_s)
            self._state.notify_member(trainer, notice)
        if old is not None and roster.synchronous:
            self._drains.part_leavers(old, roster, now_s)

    def _log_story(
        self, roster: GenerationRoster, cause: str, *, start: Step, reached: Step, now_s: float
    ) -> None:
        """Log the changes that led to the generation that runs now."""
        changes = self._state.tries.changes
        if changes.newest_ran == roster.generation:
            # The generation ran under an earlier leader, which has logged this.
            reason = f"generation {roster.generation} continues under a new leader"
            self._state.log("leader_took_over", reason)
        else:
            story = changes.summarize(roster, cause, start=start, reached=reached, now_s=now_s)
            begun_s = self._state.tally.begun_s
            self._state.tally.idle_s += now_s - begun_s if changes.before is None else story.down_s
            reason = self._state.stage.reason
            self._state.log("generation_running", reason, story=story)
        changes.runs(roster)

    def _note_start(self, agreement: Agreement, trainers: list[MemberState]) -> Step:
        """Note the step from which a synchronous generation starts: all its members now hold that
        state."""
        start, reached = agreement.starts_at, self._state.progress.reached
        if start is None:
            start = max(agreement.stop_at or agreement.roster.step, reached)
        self._state.table.hold_state(trainers, start)
        if any(m.proposal is not None and m.proposal.stateless for m in trainers):
            return start
        if start < reached:
            reason = f"generation {agreement.generation} continues from step {start}"
            self._state.log("job_rolled_back", f"{reason}; the job had reached step {reached}")
        if self._state.progress.record_run(agreement.generation, start):
            # Durable before any member takes a step: each waits for the answer to its Ready.
            self._state.emit(SaveJobRecord())
        return start


def members_to_exclude(
    unreachable: Mapping[str, Mapping[str, str]], *, newest_last: Sequence[str], kept: set[str]
) -> dict[str, str]:
    """Members to exclude so that all others reach each other, each with up to five errors seen.

    `unreachable`: for each member the peers that it could not reach, with the errors. A pair is cut
    if either side reports it, since a collective needs both directions. The member that is cut off
    from most others is excluded first; of equals, the last in `newest_last`. Members in `kept` are
    never excluded, even if they do not reach each other.
    """
    cut: dict[str, dict[str, str]] = {}
    for member, peers in unreachable.items():
        for peer, seen in peers.items():
            cut.setdefault(member, {})[peer] = f"{member} could not reach {peer}: {seen}"
            cut.setdefault(peer, {}).setdefault(member, f"{member} could not reach {peer}: {seen}")
    order = {member: position for position, member in enumerate(newest_last)}
    excluded: dict[str, str] = {}
    while any(cut.values()):
        # Two kept members reached each other before; if they cannot now, their generation breaks.
        able = [m for m, peers in cut.items() if peers and m not in kept]
        if not able:
            break
        worst = max(able, key=lambda m: (len(cut[m]), order.get(m, -1)))
        excluded[worst] = "; ".join(cut[worst][peer] for peer in sorted(cut[worst])[:5])
        for peer in cut.pop(worst):
            cut[peer].pop(worst)
    return excluded
