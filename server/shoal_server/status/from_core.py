"""Conversion of the core's types to views."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shoal_proto.incarnation import public_id
from shoal_server.core.generations.roster import GenerationRecord, GenerationRoster
from shoal_server.core.job.job import Job
from shoal_server.core.membership.member import MemberState
from shoal_server.core.membership.pauses import Pause
from shoal_server.core.membership.phases import OVER as PHASES_OVER
from shoal_server.core.membership.phases import Phase
from shoal_server.core.publications.readers import Reader
from shoal_server.core.publications.records import PublishedVersion
from shoal_server.core.publications.series import PublishedSeries
from shoal_server.status.views import (
    OVER,
    ConflictView,
    GenerationView,
    JobView,
    LifeView,
    MemberView,
    ProcessView,
    PublishedSeriesView,
    PublishedVersionView,
    RosterEntryView,
    WeightReaderView,
)

MAX_GENERATIONS = 100
QUARANTINED = "quarantined"
OWN_CODE_SHOWN_AFTER_S = 5.0
"""Minimum time in the script's own code (a validation, a save) that the page mentions."""
MAX_AWAY = 3
MAX_READERS = 200
"""Maximum number of readers shown of one series; readers whose bytes differ come first."""


@dataclass(frozen=True, kw_only=True)
class LastSeen:
    """A member's newest heartbeat."""

    at_s: float
    """Time on the clock of the core's `now_s`."""
    step: int


def job_view(
    job: Job,
    *,
    last_seen: Mapping[str, LastSeen],
    records: Iterable[GenerationRecord] = (),
    now_s: float | None = None,
) -> JobView:
    """View of a job.

    `records` are its decided generations in any order. Only the newest 100 are shown, since the
    cost of each grows with its members. `last_seen` maps member ids to heartbeats. The core's clock
    must count Unix seconds. With `now_s`, on that clock, the view says for how long members have
    been paused.
    """
    roster = job.attempt or job.running or job.previous
    result = job.tally.result
    newest = sorted(records, key=lambda record: -record.roster.generation)[:MAX_GENERATIONS]
    return JobView(
        job=job.spec.job,
        phase=job.phase.value,
        state=_job_state(job),
        life=LifeView(
            begun_unix_s=job.tally.begun_s,
            ended_unix_s=job.phase_since_s if job.phase in PHASES_OVER else 0.0,
            step=max(job.progress.reached, result.step) if result else job.progress.reached,
            num_restarts=job.tally.num_breaks,
            loss=result.loss if result else None,
            num_samples=result.num_samples if result else None,
            idle_s=_idle_s(job, now_s),
        ),
        reason=job.reason,
        since_unix_s=job.phase_since_s,
        min_members=job.spec.min_members,
        max_members=job.spec.max_members,
        desired_members=job.spec.desired_members,
        generation=job.last_generation,
        synchronous=roster.synchronous if roster else True,
        fields=dict(roster.fields) if roster else {},
        members=_member_views(job, job.members.values(), last_seen, now_s),
        generations=tuple(generation_view(record) for record in newest),
    )


def _job_state(job: Job) -> str:
    if job.phase.value in OVER:
        return job.phase.value
    if job.members:
        return "running"
    return "interrupted" if job.progress.reached or job.previous or job.running else "waiting"


def _idle_s(job: Job, now_s: float | None) -> float:
    """Idle time of the job, up to now if no generation runs now."""
    if now_s is None or job.phase in PHASES_OVER:
        return job.tally.idle_s
    changes = job.tries.changes
    since_s = job.tally.begun_s if changes.before is None else changes.broke_s
    return job.tally.idle_s + (max(0.0, now_s - since_s) if since_s is not None else 0.0)


def member_view(
    job: Job, member: MemberState, seen: LastSeen | None, *, now_s: float | None = None
) -> MemberView:
    """One member, as in its job's view."""
    last_seen = {} if seen is None else {member.member_id: seen}
    return _member_views(job, (member,), last_seen, now_s)[0]


def quarantined_view(job: str, reason: str, since_unix_s: float) -> JobView:
    """View of a quarantined job: the coordinator knows only the reason."""
    return JobView(
        job=job,
        phase=QUARANTINED,
        state=QUARANTINED,
        reason=reason,
        since_unix_s=since_unix_s,
        min_members=0,
        max_members=0,
        desired_members=0,
    )


def generation_view(record: GenerationRecord) -> GenerationView:
    """A decided generation, committed or aborted."""
    roster = record.roster
    return GenerationView(
        generation=roster.generation,
        verdict=record.verdict.value,
        reason=record.reason,
        decided_unix_s=record.decided_s,
        members=tuple(
            RosterEntryView(
                member_id=entry.member_id,
                public_id=public_id(entry.incarnation),
                rank=entry.rank,
                host=entry.host,
                address=entry.address,
                state_action=entry.state.value,
            )
            for entry in sorted(roster.entries, key=lambda entry: entry.rank)
        ),
        source_member_id=roster.source_member_id,
        step=roster.step,
        planned=roster.planned,
        digest=record.digest,
        conflicts=tuple(
            ConflictView(field=c.field, values=dict(c.values)) for c in record.conflicts
        ),
    )


def _member_views(
    job: Job, members: Iterable[MemberState], last_seen: Mapping[str, LastSeen], now_s: float | None
) -> tuple[MemberView, ...]:
    paused, away = job.why_paused(now_s), _in_own_code(job, now_s)
    views = ((m, _member_view(job, m, last_seen.get(m.member_id))) for m in members)
    return tuple(
        _while_paused(_while_away(view, away), job.table.pauses.of(member), paused)
        for member, view in views
    )


def _member_view(job: Job, member: MemberState, seen: LastSeen | None) -> MemberView:
    info, proposed = member.info, member.proposal
    roster = _roster_of(job, member)
    last_seen_s = max(member.joined_s, seen.at_s if seen else member.joined_s)
    return MemberView(
        member_id=member.member_id,
        public_id=public_id(member.incarnation),
        state=_state(job, member),
        waiting_for=member.waiting_for,
        waiting_since_unix_s=member.waiting_since_s,
        rank=roster.ranks.get(member.member_id) if roster else None,
        generation=roster.generation if roster else 0,
        process=ProcessView(
            host=info.host,
            pid=info.pid,
            address=info.address,
            device=info.device,
            torch_version=info.torch_version,
            shoal_version=info.shoal_version,
        ),
        step=max(seen.step if seen else 0, proposed.step if proposed else 0),
        joined_unix_s=member.joined_s,
        last_seen_unix_s=last_seen_s,
    )


def _in_own_code(job: Job, now_s: float | None) -> Mapping[str, str]:
    """Text for each member of a synchronous job that has long been in the script's own code."""
    roster = job.running
    if now_s is None or roster is None or not roster.synchronous:
        return {}
    found = {}
    for member in job.members_of(roster):
        since_s = member.trainer.own_code_since_s
        if since_s is not None and now_s - since_s >= OWN_CODE_SHOWN_AFTER_S:
            found[member.member_id] = f"in your code for {now_s - since_s:.0f} s"
    return found


def _while_away(view: MemberView, away: Mapping[str, str]) -> MemberView:
    """Add to a training member's view that it waits for members in the script's own code."""
    if view.state != "training" or not away:
        return view
    if own := away.get(view.member_id):
        return replace(view, waiting_for=f"nothing: it has been {own}")
    names = [f"{member_id}, which has been {reason}" for member_id, reason in away.items()]
    more = f" and {len(names) - MAX_AWAY} more" if len(names) > MAX_AWAY else ""
    return replace(view, waiting_for="; ".join(names[:MAX_AWAY]) + more)


def _while_paused(view: MemberView, own: Pause | None, paused: str) -> MemberView:
    """Add to a member's view that it waits for the end of a pause, its own or another member's."""
    if own is not None:
        text = f"the end of its own pause: {own.reason}, {own.limit_s:g} s at the most"
        state = "paused" if view.state == "training" else view.state
        return replace(view, state=state, waiting_for=text, waiting_since_unix_s=own.since_s)
    return replace(view, waiting_for=paused) if paused else view


def _roster_of(job: Job, member: MemberState) -> GenerationRoster | None:
    return next((r for r in (job.running, job.attempt) if member.is_in(r)), None)


def _state(job: Job, member: MemberState) -> str:
    if member.halted_s is not None:
        return "halted"
    if member.disconnected_s is not None:
        return "disconnected"
    if member.drain.since_s is not None:
        return "draining"
    if member.is_in(job.running):
        return "training"
    if member.is_in(job.attempt):
        agreement = job.agreement
        waits = agreement is not None and member.member_id in agreement.unready
        brought_up = "bringing-up" if waits else "ready"
        return "preparing" if job.phase is Phase.PREPARE else brought_up
    return _state_outside(member)


def _state_outside(member: MemberState) -> str:
    if member.proposal is None:
        return "joining"
    if not member.settled:
        return "settling"
    return "standby" if member.is_standby else "waiting"


def series_view(series: PublishedSeries) -> PublishedSeriesView:
    """View of a series of published weights."""
    readers = [_reader_view(series, name, each) for name, each in series.readers.known.items()]
    readers.sort(key=lambda each: (not each.differs, each.reader_id))
    return PublishedSeriesView(
        series=series.name,
        version=series.head.number,
        publisher=str(series.head.publisher),
        versions=tuple(_version_view(series.versions[number]) for number in series.head.kept),
        readers=tuple(readers[:MAX_READERS]),
        num_readers=len(readers),
        num_differing=sum(each.differs for each in readers),
        lost=series.head.lost,
    )


def _version_view(version: PublishedVersion) -> PublishedVersionView:
    return PublishedVersionView(
        version=version.number,
        step=version.step,
        created_unix_s=version.created_unix_s,
        num_bytes=version.num_bytes,
        num_copies=min((len(each.holders) for each in version.segments), default=0),
        digest=version.digest.hex(),
        pinned=version.is_pinned,
        durable=version.is_durable,
        rolled_back_to=version.rolled_back_to,
    )


def _reader_view(series: PublishedSeries, name: str, reader: Reader) -> WeightReaderView:
    report = reader.report
    return WeightReaderView(
        reader_id=name,
        version=report.installed,
        digest=report.installed_digest.hex(),
        differs=series.differs(reader),
        lag_versions=max(series.head.number - report.installed, 0) if report.installed else 0,
        seen_unix_s=reader.seen_s,
        fetch_s=report.fetch_s,
        fetch_bytes=report.fetch_bytes,
    )
