"""Jobs as stored in etcd, read by a coordinator that begins to lead.

An unreadable record quarantines its own job only.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog

from shoal_proto.errors import JobQuarantined, RetryError, ShoalError
from shoal_proto.names import is_name
from shoal_server.coordinator.persistence import codec
from shoal_server.coordinator.persistence.quarantine import unreadable
from shoal_server.coordinator.persistence.records import MAX_ENTRIES, MAX_RECORDS
from shoal_server.coordinator.persistence.stored_generations import (
    StoredGenerations,
    size_problem,
    stored_record,
)
from shoal_server.coordinator.persistence.stored_json import (
    name_in_key,
    secret_digest_from,
    state_from_json,
)
from shoal_server.core.driver.job_write import StateRecord
from shoal_server.core.generations.roster import (
    Generation,
    GenerationRecord,
    MemberInfo,
    Verdict,
)
from shoal_server.core.job.job import Job
from shoal_server.core.job.restore import SavedJob, restored
from shoal_server.core.limits import Limits
from shoal_server.core.membership.member import MemberState, Wait
from shoal_server.etcd import keys
from shoal_server.etcd.api import Get, Keyspace, KeyValue
from shoal_server.etcd.json_fields import Fields, UnreadableRecord
from shoal_server.serving.tasks import gather_bounded

log = structlog.get_logger(__name__)

READS_AT_ONCE = 32
STATES_A_READ = 64
SHOWN_KEY = 200
RECORDS_A_READ = 8
"""Few, since a record may have a megabyte."""


@dataclass(frozen=True, kw_only=True)
class JobSurvey:
    """Overview of the jobs in etcd."""

    states: Mapping[str, StateRecord]
    attended: Collection[str]
    """Jobs with members."""
    quarantined: Mapping[str, JobQuarantined]
    strays: Sequence[str]
    """Keys of members without a job, or of a job that is over: an earlier leader ended before it
    expelled them."""


@dataclass(frozen=True, kw_only=True)
class StoredJob:
    """A job as stored in etcd; a finished one has only `state`."""

    state: StateRecord
    records: Sequence[GenerationRecord]
    members: Mapping[str, tuple[str, MemberInfo]]
    generations: StoredGenerations

    def restored_job(self, limits: Limits, now_s: float) -> Job:
        """Return the job as a new leader continues it."""
        committed = [r for r in self.records if r.verdict is Verdict.COMMITTED]
        numbers = [record.roster.generation for record in self.records]
        members = tuple(
            MemberState(
                member_id=name,
                incarnation=incarnation,
                info=info,
                joined_s=now_s,
                wait=Wait(since_s=now_s),
            )
            for name, (incarnation, info) in self.members.items()
        )
        saved = SavedJob(
            last_generation=Generation(max([self.state.last_generation, *numbers])),
            record=committed[-1] if committed else None,
            before=committed[-2] if len(committed) > 1 else None,
            members=members,
            finished=self.state.finished,
            reason=self.state.reason,
            progress=self.state.progress,
            lost=self.state.lost,
            stopping=self.state.stopping,
            failed=self.state.failed,
            tally=self.state.tally,
            ended_s=self.state.ended_s,
            done=self.state.done,
            completing=self.state.completing,
        )
        return restored(
            self.state.spec,
            saved,
            limits=limits,
            digest_of=codec.digest_of,
            size_problem=size_problem,
            now_s=now_s,
        )


class StoredJobs:
    """Reader of jobs. Raises Unavailable while etcd cannot be reached."""

    def __init__(self, store: Keyspace) -> None:
        self._store = store

    async def survey(self) -> JobSurvey:
        """Read the state record of every job, and the keys of all members."""
        in_jobs, in_members = await asyncio.gather(
            self._store.keys(keys.JOBS), self._store.keys(keys.MEMBERS)
        )
        names = self._names(in_jobs)
        states: dict[str, StateRecord] = {}
        failed: dict[str, JobQuarantined] = {}
        items = await self._read([keys.job_state(name) for name in names], STATES_A_READ)
        for name in names:
            item = items.get(keys.job_state(name))
            try:
                if item is not None:
                    states[name] = _state(name, _checked(item))
            except (UnreadableRecord, ShoalError) as error:
                failed[name] = unreadable(name, keys.job_state(name), error)
        owners = {key: _job_of_member(key) for key in in_members}
        unfinished = {n for n, each in states.items() if not each.finished and each.lost is None}
        has_members = unfinished | failed.keys()
        return JobSurvey(
            states=states,
            attended=frozenset(job for job in owners.values() if job),
            quarantined=failed,
            strays=[key for key, job in owners.items() if job and job not in has_members],
        )

    @staticmethod
    def _names(stored_keys: Iterable[str]) -> list[str]:
        names = []
        for key in stored_keys:
            if not key.endswith("/state"):
                continue
            name = name_in_key(keys.JOBS, key, suffix="/state")
            if name is None:
                log.warning("key_of_no_job", key=key)
            else:
                names.append(name)
        return names

    async def state(self, job: str) -> StateRecord | None:
        """The job's own record; None if etcd has none. Raises JobQuarantined."""
        item = await self._store.get(keys.job_state(job))
        if item is None:
            return None
        try:
            return _state(job, item)
        except UnreadableRecord as error:
            raise unreadable(job, item.key, error) from error

    async def is_kept_on_servers(self, job: str) -> bool:
        """True if the job has parameters on servers, or a sample ledger."""
        assigned = await self._store.keys(keys.assignments(job))
        return bool(assigned) or await self._store.get(keys.sample_ledger(job)) is not None

    async def secret_digest(self, job: str) -> str:
        """Digest of the job's secret, even if other parts of the job's record are damaged. Empty
        without a record or a secret, and if the digest cannot be read."""
        item = await self._store.get(keys.job_state(job))
        if item is None:
            return ""
        try:
            return secret_digest_from(Fields.parsed(item.value))
        except UnreadableRecord:
            return ""

    async def load(self, state: StateRecord) -> StoredJob:
        """Read an unfinished job. Raises JobQuarantined."""
        job = state.spec.job
        reading = _Reading()
        stored_members, _ = await asyncio.gather(
            self._store.range(keys.members(job)), self._read_newest(job, reading)
        )
        members = {}
        for item in stored_members.items:
            name = name_in_key(keys.members(job), item.key)
            if name is None:
                log.warning("key_of_no_member", key=item.key)
                continue
            try:
                members[name] = codec.member_from_json(item.value)
            except UnreadableRecord as error:
                raise unreadable(job, item.key, error) from error
        return StoredJob(
            state=state,
            records=reading.records[::-1],
            members=members,
            generations=StoredGenerations(reading.records[::-1], reading.older),
        )

    async def records(self, job: str) -> list[GenerationRecord]:
        """The newest records, oldest first, within the bounds of `Records` but with two committed
        ones. Raises JobQuarantined."""
        reading = _Reading()
        await self._read_newest(job, reading)
        return reading.records[::-1]

    async def _read_newest(self, job: str, reading: "_Reading") -> None:
        prefix = keys.generations(job)
        numbers = []
        for key in await self._store.keys(prefix):
            number = keys.generation_number(job, key)
            if number is not None:
                numbers.append(number)
            else:
                log.warning("key_of_no_generation", key=key[:SHOWN_KEY])
        unread = sorted(numbers, reverse=True)
        while unread and not _enough(reading.records):
            part, unread = unread[:RECORDS_A_READ], unread[RECORDS_A_READ:]
            await self._read_records(job, part, reading)
        reading.older = unread

    async def _read_records(self, job: str, numbers: Sequence[int], reading: "_Reading") -> None:
        at = {number: keys.generation(job, number) for number in numbers}
        items = await self._read(list(at.values()), RECORDS_A_READ)
        for number, key in at.items():
            item = items.get(key)
            if item is None:
                continue
            try:
                reading.records.append(stored_record(job, number, _checked(item).value))
            except (UnreadableRecord, ShoalError) as error:
                raise unreadable(job, key, error) from error

    async def _read(self, names: Sequence[str], at_once: int) -> dict[str, KeyValue | ShoalError]:
        parts = [names[start : start + at_once] for start in range(0, len(names), at_once)]
        items: dict[str, KeyValue | ShoalError] = {}
        for part in await gather_bounded(self._read_part, parts, READS_AT_ONCE):
            items |= part
        return items

    async def _read_part(self, names: Sequence[str]) -> dict[str, KeyValue | ShoalError]:
        try:
            result = await self._store.transact([], [Get(name) for name in names])
        except RetryError:
            raise
        except ShoalError as error:
            if len(names) == 1:
                return {names[0]: error}
            # One value may be too large for a reply.
            parts = [await self._read_part([name]) for name in names]
            return {name: item for part in parts for name, item in part.items()}
        return {item.key: item for read in result.reads for item in read}


@dataclass
class _Reading:
    records: list[GenerationRecord] = field(default_factory=list)
    older: list[int] = field(default_factory=list)
    """Numbers of unread records."""


def _job_of_member(key: str) -> str:
    job, _, member_id = key.removeprefix(keys.MEMBERS).partition("/")
    return job if is_name(job) and is_name(member_id) else ""


def _checked(item: KeyValue | ShoalError) -> KeyValue:
    if isinstance(item, ShoalError):
        raise item
    return item


def _state(job: str, item: KeyValue) -> StateRecord:
    return replace(state_from_json(job, item.value), revision=item.mod_revision)


def _enough(records: Sequence[GenerationRecord]) -> bool:
    committed = sum(record.verdict is Verdict.COMMITTED for record in records)
    num_entries = sum(len(record.roster.entries) for record in records)
    return (len(records) >= MAX_RECORDS or num_entries >= MAX_ENTRIES) and committed >= 2
