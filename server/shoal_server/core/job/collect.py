"""COLLECT: the choice of the next roster's members, and of the time to draw it up.

Either no generation runs (`form`), or a change of the running one is planned (`change`).
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from shoal_server.core.generations.agreement import Agreement
from shoal_server.core.generations.conflicts import find_conflicts
from shoal_server.core.generations.ranges import unreachable_members
from shoal_server.core.generations.roster import (
    Candidate,
    Conflict,
    Generation,
    Proposal,
    build_roster,
)
from shoal_server.core.job import draining, endings
from shoal_server.core.job.job_state import JobState, limit_passed
from shoal_server.core.membership import refusals
from shoal_server.core.membership.events import EventRefused, StandbyNotice, WaitingNotice
from shoal_server.core.membership.member import MemberState, names_of
from shoal_server.core.membership.phases import Phase, Trigger


def proposed(job: JobState, member: MemberState, proposal: Proposal, now_s: float) -> None:
    if job.is_completing and member.is_in(job.running or job.previous):
        return  # repeated after a reconnect; the member finishes by itself
    job.refuse_if_over()
    if not proposal.fields:
        raise EventRefused(refusals.empty_proposal(member.member_id))
    if conflicts := _conflicts_with_trainers(job, member, proposal):
        raise EventRefused(refusals.conflict(job.spec.job, conflicts))
    known = member.proposal
    if known is not None and known.fields == proposal.fields:
        # The call is late or repeated: keep the later step, and any state.
        step, has_state = max(known.step, proposal.step), known.has_state or proposal.has_state
        proposal = replace(proposal, step=step, has_state=has_state)
    job.table.propose(member, _sharing_listings(job, proposal))
    if job.deadlines.first_proposal_s is None:
        job.deadlines.first_proposal_s = now_s
    if job.deadlines.overdue_check_s is None:
        job.deadlines.overdue_check_s = now_s + job.limits.join_s
    if known is None:
        member.set_wait("other members", now_s)
        job.log("member_proposed", f"{member.member_id} is ready to train", member)


def _conflicts_with_trainers(
    job: JobState, member: MemberState, proposal: Proposal
) -> tuple[Conflict, ...]:
    """Return a newcomer's conflicts with the members that train, or trained before a break. The
    newcomer is then refused before it disturbs them."""
    roster = job.running or job.previous
    if roster is None or member.is_in(roster):
        return ()
    trainers = [m for m in job.members_of(roster) if m.proposal]
    if proposal.fields == roster.fields and all(
        m.proposal.optional_fields == proposal.optional_fields for m in trainers if m.proposal
    ):
        return ()
    newcomer = replace(member, proposal=proposal).as_candidate()
    return find_conflicts([*(m.as_candidate() for m in trainers), newcomer])


def _sharing_listings(job: JobState, proposal: Proposal) -> Proposal:
    others = (m.proposal.listings for m in job.members.values() if m.proposal)
    same = next((each for each in others if each == proposal.listings), proposal.listings)
    return replace(proposal, listings=same)


def form(job: JobState, now_s: float) -> bool:
    """Draw up a roster once enough members are ready. True if members were refused instead: try
    again."""
    if _may_form(job, now_s):
        return not freeze(job, chosen(job, now_s), now_s)
    _hold_for_members(job, now_s)
    return False


def change(job: JobState, now_s: float) -> bool:
    """Begin, drop or continue a planned change. True if members were refused instead: try again."""
    wanted, members = _change_wanted(job, now_s)
    if not wanted:
        if job.phase is Phase.COLLECT:
            job.apply_trigger(Trigger.CHANGE_DROPPED, "the members that wanted it are gone", now_s)
        return False
    if job.pausing():
        return False  # the change waits until no member is paused
    if job.phase is Phase.RUNNING:
        job.apply_trigger(Trigger.CHANGE_WANTED, wanted, now_s)
    # Wait for more members or drains, so that one stop serves all.
    coming = job.table.num_not_proposed > 0 or bool(job.table.draining)
    if coming and not limit_passed(job.phase_since_s, job.limits.gather_s, now_s):
        return False
    return not freeze(job, members, now_s)


def _change_wanted(job: JobState, now_s: float) -> tuple[str, list[MemberState]]:
    """Return the reason for a planned change, "" for none, and the members of the next roster."""
    assert job.running is not None
    if job.table.has_finished_in(job.running):
        # A change could interrupt the others' last work.
        _hold_newcomers(job, now_s)
        if not job.table.draining:
            return "", []
    newcomer = any(m.settled and not m.is_in(job.running) for m in job.eligible)
    if not newcomer and not job.table.draining:
        return "", []
    if any(m.proposal is None for m in job.members_of(job.running)):
        # A new leader's roster would leave out members that train.
        return "", []
    members = chosen(job, now_s)
    joiners = [m for m in members if not m.is_in(job.running)]
    leavers = draining.leavers(job, members)
    if len(members) < job.min_roster_size or not (joiners or leavers):
        return "", []
    texts = [f"{names_of(joiners)} joins"] if joiners else []
    texts += [f"{names_of(leavers)} leaves"] if leavers else []
    return ", ".join(texts), members


def _hold_newcomers(job: JobState, now_s: float) -> None:
    running = job.running
    newcomers = [m for m in job.eligible if not m.is_in(running)]
    reason = "standing by: members of the generation that trains have done their work"
    for position, member in enumerate(newcomers, start=1):
        _stand_by(job, member, reason, position, now_s)


def _stand_by(job: JobState, member: MemberState, reason: str, position: int, now_s: float) -> None:
    if member.waiting_for != reason or not member.is_standby:
        member.set_wait(reason, now_s, is_standby=True)
        job.notify_member(member, StandbyNotice(reason=reason, position=position))


def chosen(job: JobState, now_s: float) -> list[MemberState]:
    """Return the members of a roster drawn up now; put the others on standby.

    Members that hold the state come first (unless a generation runs), then former trainers by rank,
    then by arrival.
    """
    # A member that has not settled may still train.
    candidates = [m for m in job.eligible if m.settled or m.is_in(job.running)]
    if amid := _amid_call(job):
        names = {m.member_id for m in amid}
        _keep_out([m for m in candidates if m.member_id not in names], now_s)
        candidates = amid
    if job.running is not None and not any(m.is_in(job.running) for m in candidates):
        # All trainers are to leave, and hand over their state.
        trainers = job.table.trainers(job.running)
        candidates += [m for m in trainers if m.proposal and not m.proposal.stateless]
    if job.lacks_state(candidates):
        # Draining members that hold the state hand it over first.
        candidates += [m for m in job.table.draining.values() if m.holds_state]
    ranks = {e.member_id: e.rank for e in job.previous.entries} if job.previous else {}
    candidates.sort(
        key=lambda m: (
            job.running is None and not m.holds_state,
            ranks.get(m.member_id, len(ranks)),
            m.joined_s,
        )
    )
    for position, member in enumerate(candidates[job.spec.max_members :], start=1):
        reason = f"standing by: the job has its maximum of {job.spec.max_members} members"
        _stand_by(job, member, reason, position, now_s)
    return candidates[: job.spec.max_members]


def _hold_for_members(job: JobState, now_s: float) -> None:
    """Put the ready members on standby if the job lacks only members, else end their standby."""
    if job.previous is None or not job.table.all_settled or _are_enough(job):
        return
    waiting = [m for m in job.eligible if m.settled]
    if not _waits_for_members(job):
        job.deadlines.short_since_s = None
        for member in [m for m in waiting if m.is_standby]:
            member.set_wait("other members", now_s)
        return
    if job.deadlines.short_since_s is None:
        job.deadlines.short_since_s = now_s
    missing = job.min_roster_size - len(waiting)
    limit_s = job.limits.wait_for_members_s
    until = "no limit" if limit_s is None else f"until it has waited for {limit_s:g} s"
    reason = f"{missing} more member{'' if missing == 1 else 's'}, {until}"
    for member in waiting:
        _stand_by(job, member, reason, 0, now_s)
    if limit_s is not None:
        # Each failed attempt with a newcomer moves the check.
        due_s = max(job.deadlines.short_since_s, job.table.pauses.released_s) + limit_s
        job.deadlines.overdue_check_s = min(due_s, job.deadlines.overdue_check_s or due_s)


def _waits_for_members(job: JobState) -> bool:
    """True if the job lacks only members: a ready one has `keeps_job`, and no call between two
    steps is repeated."""
    # A member that joins cannot take part in such a call.
    return not _amid_call(job) and any(m.keeps_job for m in job.table.candidates.values())


def _may_form(job: JobState, now_s: float) -> bool:
    num_ready = len(job.eligible) + len(job.table.finished)
    # Wait for survivors to settle.
    if not job.table.all_settled or not _are_enough(job):
        return False
    if _awaits_state(job):
        return False
    if num_ready + job.tries.num_excluded >= job.spec.desired_members or _has_survivors(job):
        return True
    return limit_passed(job.deadlines.first_proposal_s, _last_call_s(job), now_s)


def _are_enough(job: JobState) -> bool:
    amid = _amid_call(job)
    return len(amid or job.eligible) >= _num_needed(job, amid)


def _num_needed(job: JobState, amid: list[MemberState]) -> int:
    # A call between two steps needs no minimum.
    enough = max((job.table.in_call[m.member_id] for m in amid), default=None)
    least = job.min_roster_size
    return least if enough is None else min(least, enough)


def _amid_call(job: JobState) -> list[MemberState]:
    """Return members that repeat a call between two steps. Others are elsewhere in their script,
    and cannot take part."""
    table = job.table
    if job.running is not None or not table.in_call:
        return []
    newest = max((m.state_and_step for m in job.eligible), default=None)
    return [m for m in job.eligible if m.member_id in table.in_call and m.state_and_step == newest]


def _keep_out(members: list[MemberState], now_s: float) -> None:
    for member in members:
        member.set_wait("the end of a call between two steps that the others are in", now_s)


def _awaits_state(job: JobState) -> bool:
    """True if a member that may hold the state has yet to propose, or is put off."""
    if not job.lacks_state(job.eligible):
        return False
    candidates = job.table.candidates.values()
    return bool(job.table.unproposed) or not job.lacks_state(candidates)


def _last_call_s(job: JobState) -> float:
    return job.spec.last_call_s or job.limits.last_call_s


def _has_survivors(job: JobState) -> bool:
    if job.previous is None:
        return False
    staying = job.eligible
    leaving = job.table.draining.values()
    return any(m.is_in(job.previous) for m in staying) or any(m.holds_state for m in leaving)


def freeze(job: JobState, chosen: list[MemberState], now_s: float) -> bool:
    """Draw the roster up and send it, or abort it for conflicts. False if members were refused
    instead."""
    candidates = [m.as_candidate() for m in chosen]
    if blamed := _confined(job, chosen, candidates):
        _refuse_confined(job, blamed, candidates, now_s)
        return False
    generation = Generation(job.last_generation + 1)
    roster = build_roster(
        generation,
        candidates,
        previous=job.previous,
        running=job.running,
        trained=job.progress.has_trained and not any(c.proposal.stateless for c in candidates),
    )
    if problem := job.size_problem(roster):
        _refuse_too_large(job, chosen, problem, now_s)
        return False
    running = job.running
    # A member without steps left offers no boundary.
    old = [m.member_id for m in job.table.trainers(running)] if running else ()
    job.last_generation = generation
    job.agreement = Agreement.begin(roster, job.digest_of(roster), stopping=old)
    job.apply_trigger(Trigger.FROZEN, f"{names_of(chosen)} form generation {generation}", now_s)
    if conflicts := find_conflicts(candidates):
        endings.abort_conflicting(job, conflicts, now_s)
        return True
    job.deadlines.deadline_s = now_s + job.limits.prepare_s
    notice = job.prepare_notice(job.agreement)
    for member in chosen:
        member.set_wait(f"all members to accept generation {generation}", now_s)
        job.notify_member(member, notice)
    return True


def _refuse_too_large(job: JobState, chosen: list[MemberState], problem: str, now_s: float) -> None:
    refusal = refusals.roster_too_large(job.spec.job, len(chosen), problem)
    for member in job.suspects_of(chosen):
        endings.refuse(job, member, refusal, now_s)


def _confined(
    job: JobState, chosen: list[MemberState], candidates: list[Candidate]
) -> list[Candidate]:
    """Return members to refuse because their own address, or that of a member that stays, works on
    one host only."""
    confined = unreachable_members(candidates)
    staying = [m for m in chosen if job.stays(m)]
    hosts = {m.info.host for m in staying}
    if job.running is None and (len(staying) == len(chosen) or len(hosts) > 1):
        return confined
    names = {m.member_id for m in staying}
    if any(c.member_id in names for c in confined):
        confined += [c for c in candidates if c.info.host not in hosts]
    return [c for c in confined if c.member_id not in names]


def _refuse_confined(
    job: JobState, blamed: list[Candidate], candidates: list[Candidate], now_s: float
) -> None:
    addresses: dict[str, list[str]] = {}
    for c in candidates:
        addresses.setdefault(c.info.address or "(none)", []).append(c.member_id)
    values = tuple((address, tuple(sorted(who))) for address, who in sorted(addresses.items()))
    refusal = refusals.confined(job.spec.job, Conflict(field="address", values=values))
    names = dict.fromkeys(c.member_id for c in blamed)
    job.tries.num_excluded += len(names)
    for name in names:
        endings.refuse(job, job.members[name], refusal, now_s)


def drop_overdue(job: JobState, now_s: float) -> None:
    """Refuse ready members that have waited for `join_s`, or if the job lacks only members, all of
    them `wait_for_members_s` after the loss."""
    job.deadlines.overdue_check_s = None
    if job.running is not None or job.phase is not Phase.COLLECT:
        return
    limit_s, short_since_s = job.limits.join_s, None
    if _waits_for_members(job):
        limit_s = job.limits.wait_for_members_s or math.inf
        short_since_s = job.deadlines.short_since_s

    def over_s(member: MemberState) -> float:
        return _waits_since_s(job, member, short_since_s) + limit_s

    ready = list(job.table.candidates.values())
    left_out = job.setbacks.left_out_errors(now_s)
    without = "".join(f"; {name} was left out: {error}" for name, error in left_out)
    seen = f"{_ready_in_words(job, ready)}{without}"
    reason = f"no generation formed within {limit_s:g} s: {seen}"
    for member in [m for m in ready if now_s >= over_s(m)]:
        endings.refuse(job, member, refusals.timeout(reason), now_s)
    # Without a member that keeps the job, the join limit applies again.
    again_s = now_s + job.limits.join_s
    job.deadlines.overdue_check_s = min(
        (min(over_s(m), again_s) for m in job.table.candidates.values()),
        default=None,
    )


def _ready_in_words(job: JobState, ready: list[MemberState]) -> str:
    amid = _amid_call(job)
    num_needed = _num_needed(job, amid)
    if not amid:
        return f"{len(ready)} of at least {num_needed} members were ready"
    return (
        f"{names_of(amid)} were in a call between two steps, such as session.evaluate, which"
        f" takes at least {num_needed} of the members that began it;"
        " members that join cannot help"
    )


def _waits_since_s(job: JobState, member: MemberState, short_since_s: float | None) -> float:
    own_s = max(member.waiting_since_s, job.phase_since_s)
    since_s = own_s if short_since_s is None else short_since_s
    return max(since_s, job.table.pauses.released_s)


def deadlines(job: JobState) -> Iterator[float]:
    """Yield times at which `form` or `change` may have work."""
    if job.running is not None:
        yield job.phase_since_s + job.limits.gather_s
        return
    formable = job.table.all_settled and _are_enough(job) and not _awaits_state(job)
    if formable and job.deadlines.first_proposal_s is not None:
        yield job.deadlines.first_proposal_s + _last_call_s(job)


def notify_waiting(job: JobState) -> None:
    """Notify members under torchrun if the number of waiting members has changed. Call after each
    event."""
    running = job.running
    first = next(iter(job.table.candidates.values()), None)
    if running is None or first is None or first.proposal is None:
        return
    if not first.proposal.stateless or job.is_completing:
        return
    trainers = job.table.trainers(running)
    num = sum(not m.is_in(running) for m in job.eligible)
    num = min(num, job.spec.max_members - len(trainers))
    if job.table.has_finished_in(running):
        num = 0
    if num != job.table.num_announced_waiting:
        job.table.num_announced_waiting = num
        for member in trainers:
            job.notify_member(member, waiting_notice(job))


def waiting_notice(job: JobState) -> WaitingNotice:
    num = job.table.num_announced_waiting
    return WaitingNotice(reason=f"{num} more members wait", num_members=num)
