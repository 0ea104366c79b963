"""Jobs as they lie in etcd, read by a coordinator that begins to lead.

What cannot be read concerns its own job alone: that one is set aside, with the key and the reason.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from shoal_proto.errors import JobSetAside, RetryError, ShoalError
from shoal_proto.names import is_name
from shoal_server.coordinator.persistence import codec
from shoal_server.coordinator.persistence.records import MAX_RECORDS
from shoal_server.coordinator.persistence.stored_json import named_under, set_aside, state_from_json
from shoal_server.core.driver.job_write import StateRecord
from shoal_server.core.generations.progress import Progress
from shoal_server.core.generations.roster import (
    NO_GENERATION,
    Generation,
    MemberInfo,
    Record,
    Verdict,
)
from shoal_server.core.job.job import Job
from shoal_server.core.job.restore import Saved, restored
from shoal_server.core.limits import Limits
from shoal_server.core.membership.member import Member
from shoal_server.etcd import keys
from shoal_server.etcd.api import NO_LEASE, Get, KeyValueStore, Put
from shoal_server.etcd.json_fields import Unreadable
from shoal_server.serving.tasks import gather_bounded

log = structlog.get_logger(__name__)

READS_AT_ONCE = 32
STATES_A_READ = 64
RECORDS_A_READ = 8
"""A record may have a megabyte."""

Item = TypeVar("Item")
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Which jobs there are. Who is read how soon follows from it."""

    states: Mapping[str, StateRecord]
    attended: Collection[str]
    """Jobs that have members."""
    set_aside: Mapping[str, JobSetAside]
    strays: Sequence[str]
    """Keys of members of jobs that there are not."""


@dataclass(frozen=True, kw_only=True)
class StoredJob:
    """An unfinished job as it lies in etcd."""

    state: StateRecord
    records: Sequence[Record]
    members: Mapping[str, tuple[str, MemberInfo]]
    leased: Sequence[Put]
    """Keys of members that are under leases, as a release before this one wrote them; anew."""

    def begun(self, limits: Limits, now_s: float) -> Job:
        """The job as a leader takes it up that serves from now on."""
        committed = [r for r in self.records if r.verdict is Verdict.COMMITTED]
        numbers = [record.roster.generation for record in self.records]
        members = tuple(
            Member(
                member_id=name,
                incarnation=incarnation,
                info=info,
                joined_s=now_s,
                waiting_since_s=now_s,
            )
            for name, (incarnation, info) in self.members.items()
        )
        saved = Saved(
            last_generation=Generation(max([self.state.last_generation, *numbers])),
            record=committed[-1] if committed else None,
            before=committed[-2] if len(committed) > 1 else None,
            members=members,
            finished=self.state.finished,
            reason=self.state.reason,
            progress=self.state.progress or _taken_to_have_run(committed),
            lost=self.state.lost,
        )
        digest_of = codec.digest_of
        return restored(self.state.spec, saved, limits=limits, digest_of=digest_of, now_s=now_s)


def _taken_to_have_run(committed: Sequence[Record]) -> Progress:
    """Of a job whose record does not tell: what was agreed is taken to have trained."""
    numbers = [r.roster.generation for r in committed if r.roster.synchronous]
    return Progress(trained_in=max(numbers, default=NO_GENERATION))


class StoredJobs:
    """Reads jobs. Raises Unavailable while etcd is away."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store

    async def survey(self) -> Survey:
        """All jobs by their own keys, and which of them have members; no key is read twice."""
        in_jobs, in_members = await asyncio.gather(
            self._store.keys(keys.JOBS), self._store.keys(keys.MEMBERS)
        )
        names = self._names(in_jobs)
        states: dict[str, StateRecord] = {}
        failed: dict[str, JobSetAside] = {}
        found = await self._read([keys.job_state(name) for name in names], STATES_A_READ)
        for name in names:
            value = found.get(keys.job_state(name))
            try:
                if value is not None:
                    states[name] = state_from_json(name, _value(value))
            except (Unreadable, ShoalError) as error:
                failed[name] = set_aside(name, keys.job_state(name), error)
        owners = {key: _job_of_member(key) for key in in_members}
        known = states.keys() | failed.keys()
        return Survey(
            states=states,
            attended=frozenset(job for job in owners.values() if job),
            set_aside=failed,
            strays=[key for key, job in owners.items() if job and job not in known],
        )

    @staticmethod
    def _names(found: Iterable[str]) -> list[str]:
        names = []
        for key in found:
            if not key.endswith("/state"):
                continue
            name = named_under(keys.JOBS, key, suffix="/state")
            if name is None:
                log.warning("key_of_no_job", key=key)
            else:
                names.append(name)
        return names

    async def load(self, state: StateRecord) -> StoredJob:
        """An unfinished job with its newest records and its members. Raises JobSetAside."""
        job = state.spec.job
        records, found = await asyncio.gather(
            self.records(job), self._store.range(keys.members(job))
        )
        members = {}
        for item in found.items:
            name = named_under(keys.members(job), item.key)
            if name is None:
                log.warning("key_of_no_member", key=item.key)
                continue
            try:
                members[name] = codec.member_from_json(item.value)
            except Unreadable as error:
                raise set_aside(job, item.key, error) from error
        leased = [Put(item.key, item.value) for item in found.items if item.lease != NO_LEASE]
        return StoredJob(state=state, records=records, members=members, leased=leased)

    async def records(self, job: str) -> list[Record]:
        """The newest decided records, oldest first: 100, or more where that takes to reach two that
        were committed. Raises JobSetAside."""
        prefix = keys.generations(job)
        numbers = []
        for key in await self._store.keys(prefix):
            number = key.removeprefix(prefix)
            if number.isascii() and number.isdigit():
                numbers.append(int(number))
            else:
                log.warning("key_of_no_generation", key=key)
        newest: list[Record] = []
        left = sorted(numbers, reverse=True)
        while left and not _enough(newest):
            part, left = left[:RECORDS_A_READ], left[RECORDS_A_READ:]
            newest += await self._read_records(job, part)
        return newest[::-1]

    async def _read_records(self, job: str, numbers: Sequence[int]) -> list[Record]:
        at = {number: keys.generation(job, number) for number in numbers}
        found = await self._read(list(at.values()), RECORDS_A_READ)
        records = []
        for number, key in at.items():
            value = found.get(key)
            if value is None:
                continue
            try:
                records.append(codec.stored_record(job, number, _value(value)))
            except (Unreadable, ShoalError) as error:
                raise set_aside(job, key, error) from error
        return records

    async def _read(self, names: Sequence[str], at_once: int) -> dict[str, bytes | ShoalError]:
        """The values of the keys that are there, or what keeps one from being read."""
        parts = [names[start : start + at_once] for start in range(0, len(names), at_once)]
        found: dict[str, bytes | ShoalError] = {}
        for part in await gather_bounded(self._read_part, parts, READS_AT_ONCE):
            found |= part
        return found

    async def _read_part(self, names: Sequence[str]) -> dict[str, bytes | ShoalError]:
        try:
            result = await self._store.transact([], [Get(name) for name in names])
        except RetryError:
            raise
        except ShoalError as error:
            if len(names) == 1:
                return {names[0]: error}
            # One of them may be too large for an answer: it is to harm no other.
            parts = [await self._read_part([name]) for name in names]
            return {name: value for part in parts for name, value in part.items()}
        return {item.key: item.value for read in result.reads for item in read}


def _job_of_member(key: str) -> str:
    """The job; empty for a key that names no member."""
    job, _, member_id = key.removeprefix(keys.MEMBERS).partition("/")
    return job if is_name(job) and is_name(member_id) else ""


def _value(found: bytes | ShoalError) -> bytes:
    if isinstance(found, ShoalError):
        raise found
    return found


def _enough(records: Sequence[Record]) -> bool:
    committed = sum(record.verdict is Verdict.COMMITTED for record in records)
    return len(records) >= MAX_RECORDS and committed >= 2
