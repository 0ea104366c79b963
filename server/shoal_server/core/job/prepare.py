"""PREPARE: the members answer the roster, which is committed once all have accepted it."""

from collections.abc import Mapping, Sequence

from shoal_server.core.generations.agreement import Agreement
from shoal_server.core.generations.roster import Conflict, GenerationRoster, Verdict
from shoal_server.core.job import endings
from shoal_server.core.job.job_state import JobState
from shoal_server.core.membership import refusals
from shoal_server.core.membership.changes import MAX_LINE, shortened
from shoal_server.core.membership.events import OutcomeNotice, RosterAnswered, WriteGeneration
from shoal_server.core.membership.member import MemberState, names_of
from shoal_server.core.membership.phases import Trigger


def answered(job: JobState, member: MemberState, event: RosterAnswered, now_s: float) -> None:
    agreement = job.agreement_of(member, event.generation)
    if agreement is None:
        return  # late: the attempt is decided
    if event.rejections:
        held = member.member_id
        conflicts = tuple(
            Conflict(field=r.field, values=((r.seen, (held,)), (r.expected, ("roster",))))
            for r in event.rejections
        )
        endings.abort_conflicting(job, conflicts, now_s)
    elif event.digest != agreement.digest:
        endings.abort(job, f"{member.member_id} accepted another roster than was sent", now_s)
    elif agreement.accept(member.member_id, dict(event.unreachable), event.checkpoint_steps):
        if agreement.unreachable:
            _exclude_unreachable(job, agreement, now_s)
        else:
            _commit_if_there_is_state(job, agreement, now_s)
    else:
        # Extend the deadline while answers arrive: ten thousand take a while.
        limits, since_s = job.limits, job.phase_since_s
        until_s = min(now_s + limits.prepare_s, since_s + limits.join_s)
        job.deadlines.deadline_s = until_s


def overdue(job: JobState, now_s: float) -> None:
    agreement = job.agreement
    assert agreement is not None
    late = [job.members[name] for name in sorted(agreement.unanswered) if name in job.members]
    reason = f"{names_of(late)} did not accept or reject the roster in time"
    endings.abort(job, reason, now_s)
    for member in late:
        if job.members.get(member.member_id) is member:
            endings.refuse(job, member, refusals.timeout(reason), now_s)


def _exclude_unreachable(job: JobState, agreement: Agreement, now_s: float) -> None:
    """Commit if all cut pairs train already; else abort, and exclude members."""
    members = job.members_of(agreement.roster)
    newest_last = sorted(members, key=lambda m: (not m.is_in(job.previous), m.joined_s))
    order, running = [m.member_id for m in newest_last], job.running
    staying = {m.member_id for m in members if job.stays(m)}
    trainers = {m.member_id for m in members if m.is_in(running)}
    excluded = members_to_exclude(
        agreement.unreachable, newest_last=order, kept=staying
    ) or members_to_exclude(agreement.unreachable, newest_last=order, kept=trainers)
    if not excluded:
        _commit_if_there_is_state(job, agreement, now_s)
        return
    names = names_of([job.members[name] for name in excluded])
    errors = "; ".join(excluded.values())
    # Bounded, since the reason is sent to all members and stored.
    endings.abort(job, shortened(f"unreachable: {names}: {errors}", MAX_LINE), now_s)
    job.tries.num_excluded += len(excluded)
    for name, seen in excluded.items():
        endings.refuse(
            job,
            job.members[name],
            refusals.unreachable(job.spec.job, name, seen),
            now_s,
        )


def members_to_exclude(
    unreachable: Mapping[str, Mapping[str, str]], *, newest_last: Sequence[str], kept: set[str]
) -> dict[str, str]:
    """Return members to exclude so that the others reach each other, each with up to five errors.

    `unreachable`: peers that each member could not reach, with the errors. The member cut off from
    most is excluded first; of equals, the last in `newest_last`. Members in `kept` are never
    excluded.
    """
    cut: dict[str, dict[str, str]] = {}
    for member, peers in unreachable.items():
        for peer, seen in peers.items():
            cut.setdefault(member, {})[peer] = f"{member} could not reach {peer}: {seen}"
            cut.setdefault(peer, {}).setdefault(member, f"{member} could not reach {peer}: {seen}")
    order = {member: position for position, member in enumerate(newest_last)}
    excluded: dict[str, str] = {}
    while any(cut.values()):
        # Kept members reached each other before: if they cannot now, their generation breaks.
        able = [m for m, peers in cut.items() if peers and m not in kept]
        if not able:
            break
        worst = max(able, key=lambda m: (len(cut[m]), order.get(m, -1)))
        excluded[worst] = "; ".join(cut[worst][peer] for peer in sorted(cut[worst])[:5])
        for peer in cut.pop(worst):
            cut[peer].pop(worst)
    return excluded


def _commit_if_there_is_state(job: JobState, agreement: Agreement, now_s: float) -> None:
    """Commit if the members have a state to start from.

    A job that has trained never starts from initial values again, but from the checkpoint that most
    members see. Members that do not see it are removed, and the attempt is aborted. Without any
    checkpoint, the job's state is lost.
    """
    if not agreement.roster.from_checkpoint:
        _commit(job, agreement, now_s)
        return
    step = agreement.best_checkpoint()
    if step is None:
        names = names_of(job.members_of(agreement.roster))
        endings.lose_state(job, f"no state and no checkpoint on {names}", now_s)
        return
    seeing = {name for name, steps in agreement.checkpoint_steps.items() if step in steps}
    blind = [m for m in job.members_of(agreement.roster) if m.member_id not in seeing]
    if not blind:
        _commit(job, agreement, now_s)
        return
    others = names_of([m for m in job.members_of(agreement.roster) if m not in blind])
    reason = f"{names_of(blind)} sees no checkpoint of step {step}, but {others} does"
    endings.abort(job, reason, now_s)
    job.tries.num_excluded += len(blind)
    for member in blind:
        endings.refuse(job, member, refusals.no_checkpoint(member.member_id, step, others), now_s)


def _commit(job: JobState, agreement: Agreement, now_s: float) -> None:
    roster = agreement.roster
    _note_leavers(job, roster)
    reason = job.tries.changes.cause(roster)
    job.apply_trigger(Trigger.ACCEPTED, reason, now_s)
    record = job.record_of(Verdict.COMMITTED, reason, now_s)
    job.previous, job.record = roster, record
    job.tally.num_breaks += job.tries.is_after_break
    job.tries.is_after_break = False
    # All members have settled or are gone.
    job.deadlines.broken_since_s = None
    job.emit(WriteGeneration(record=record))
    to_boundary_s = job.limits.collective_s if agreement.has_boundary else 0.0
    job.deadlines.deadline_s = now_s + to_boundary_s + job.limits.bring_up_s
    longest_s = to_boundary_s + job.limits.longest_bring_up_s
    job.deadlines.bring_up_over_s = now_s + longest_s
    job.table.settle(job.members_of(roster), settled=not roster.synchronous)
    notice = OutcomeNotice(reason=reason, record=record)
    for member in job.members_to_notify(roster):
        member.set_wait(f"the first collective of generation {roster.generation}", now_s)
        job.notify_member(member, notice)


def _note_leavers(job: JobState, roster: GenerationRoster) -> None:
    changes = job.tries.changes
    before = job.members_of(changes.before) if changes.before is not None else []
    for member in before:
        if not member.is_in(roster):
            drained = member.drain.since_s is not None
            why = f"drained: {member.drain.reason}" if drained else member.waiting_for
            changes.record_departure(member.member_id, why, lost=False)
