"""Conversion of the core's types to views. The core's types hold secrets, and may be renamed, while
the names in the API may not."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from shoal_proto.incarnation import public_id
from shoal_proto.names import SHOWN_PHASES
from shoal_server.core.driver.liveness import HeartbeatHistory
from shoal_server.core.generations.roster import GenerationRecord, GenerationRoster
from shoal_server.core.job.job import Job
from shoal_server.core.membership.member import MemberState
from shoal_server.core.membership.phases import OVER as PHASES_OVER
from shoal_server.core.membership.phases import Phase
from shoal_server.core.publications.readers import Reader
from shoal_server.core.publications.records import PublishedVersion
from shoal_server.core.publications.series import PublishedSeries
from shoal_server.status.views import (
    OVER,
    ConflictView,
    GenerationView,
    JobDetail,
    JobSummary,
    MemberDetail,
    MemberView,
    ProcessView,
    PublishedSeriesView,
    PublishedVersionView,
    RosterEntryView,
    SamplesView,
    WeightReaderView,
)

QUARANTINED = "quarantined"
OWN_CODE_SHOWN_AFTER_S = 5.0
MAX_AWAY = 3
MAX_READERS = 200


@dataclass(frozen=True, kw_only=True)
class JobReader:
    """Makes the views of a job and of its members at one moment. The core's clock must count Unix
    seconds. The mappings are by member id."""

    job: Job
    newest_roster: GenerationRoster | None = None
    """Newest roster in the job's records: a job that ended under an earlier leader has no other."""
    heartbeats: Mapping[str, HeartbeatHistory] = field(default_factory=dict)
    clocks: Mapping[str, int] = field(default_factory=dict)
    waiting: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Reason and start of waits outside of the core, such as for shards."""
    now_s: float | None = None
    """Moment of the views, on the core's clock. None leaves out durations that are not over yet,
    such as those of pauses."""

    def detail(
        self, generations: Iterable[GenerationView] = (), samples: SamplesView | None = None
    ) -> JobDetail:
        """Details of the job, without what its members reported. `generations`: its decided ones,
        the newest first."""
        job, tally = self.job, self.job.tally
        members = tuple(self.member(member) for member in job.members.values())
        roster = job.attempt or job.running or job.previous or self.newest_roster
        state, result = _job_state(job), tally.result
        return JobDetail(
            summary=JobSummary(
                job=job.spec.job,
                phase=job.phase.value,
                state=state,
                shown_state=shown_state(state, job.phase.value),
                reason=job.reason,
                since_unix_s=job.phase_since_s,
                generation=job.last_generation,
                num_members=len(members),
                num_training=sum(member.state == "training" for member in members),
                step=max(job.progress.reached, result.step) if result else job.progress.reached,
                begun_unix_s=tally.begun_s,
                ended_unix_s=job.phase_since_s if job.phase in PHASES_OVER else 0.0,
                num_restarts=tally.num_breaks,
                loss=result.loss if result else None,
                num_samples=result.num_samples if result else None,
                goodput=None,
                unproductive_s=tally.idle_s
                if self.now_s is None
                else tally.idle_until_s(self.now_s),
            ),
            min_members=job.spec.min_members,
            max_members=job.spec.max_members,
            desired_members=job.spec.desired_members,
            synchronous=roster.synchronous if roster else True,
            fields=dict(roster.fields) if roster else {},
            members=tuple(MemberDetail(member=m, health=None, losses=()) for m in members),
            generations=tuple(generations),
            samples=samples,
        )

    def member(self, member: MemberState) -> MemberView:
        info, proposed = member.info, member.proposal
        roster, seen = _roster_of(self.job, member), self.heartbeats.get(member.member_id)
        state, waiting_for, since_s = self._wait(member)
        return MemberView(
            member_id=member.member_id,
            public_id=public_id(member.incarnation),
            state=state,
            waiting_for=waiting_for,
            waiting_since_unix_s=since_s,
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
            clock=self.clocks.get(member.member_id),
            joined_unix_s=member.joined_s,
            last_seen_unix_s=max(member.joined_s, seen.at_s if seen else member.joined_s),
            takes_part=member.is_in(self.job.running) or member.keeps_job or member.is_standby,
        )

    def _wait(self, member: MemberState) -> tuple[str, str, float]:
        waiting_for, since_s = member.waiting_for, member.waiting_since_s
        state = _state(self.job, member)
        if own := self.job.table.pauses.of(member):
            waiting_for = f"the end of its own pause: {own.reason}, {own.limit_s:g} s at the most"
            since_s = own.since_s
            state = "paused" if state == "training" else state
        elif self._paused:
            waiting_for = self._paused
        elif state == "training" and self._away:
            waiting_for = _while_away(member.member_id, self._away)
        return state, *self.waiting.get(member.member_id, (waiting_for, since_s))

    @cached_property
    def _paused(self) -> str:
        return self.job.why_paused(self.now_s)

    @cached_property
    def _away(self) -> Mapping[str, str]:
        """Text for each member that has been in the script's own code for long, by member id. Empty
        unless a generation of a synchronous job runs."""
        roster = self.job.running
        if self.now_s is None or roster is None or not roster.synchronous:
            return {}
        found = {}
        for member in self.job.members_of(roster):
            since_s = member.trainer.own_code_since_s
            if since_s is not None and self.now_s - since_s >= OWN_CODE_SHOWN_AFTER_S:
                found[member.member_id] = f"in your code for {self.now_s - since_s:.0f} s"
        return found


def shown_state(state: str, phase: str) -> str:
    """State of a job as people see it."""
    return SHOWN_PHASES.get(phase, phase) if state == "running" else state


def _while_away(member_id: str, away: Mapping[str, str]) -> str:
    if own := away.get(member_id):
        return f"nothing: it has been {own}"
    names = [f"{name}, which has been {reason}" for name, reason in away.items()]
    more = f" and {len(names) - MAX_AWAY} more" if len(names) > MAX_AWAY else ""
    return "; ".join(names[:MAX_AWAY]) + more


def _job_state(job: Job) -> str:
    if job.phase.value in OVER:
        return job.phase.value
    if job.members:
        return "running"
    return "interrupted" if job.progress.has_trained or job.previous or job.running else "waiting"


def quarantined_detail(job: str, reason: str, since_unix_s: float) -> JobDetail:
    """Details of a quarantined job."""
    return JobDetail(
        summary=JobSummary(
            job=job,
            phase=QUARANTINED,
            state=QUARANTINED,
            shown_state=QUARANTINED,
            reason=reason,
            since_unix_s=since_unix_s,
            generation=0,
            num_members=0,
            num_training=0,
            step=0,
            begun_unix_s=0.0,
            ended_unix_s=0.0,
            num_restarts=0,
            loss=None,
            num_samples=None,
            goodput=None,
        ),
        min_members=0,
        max_members=0,
        desired_members=0,
        synchronous=True,
        fields={},
        members=(),
        generations=(),
        samples=None,
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
        num_lost=series.head.num_lost,
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
