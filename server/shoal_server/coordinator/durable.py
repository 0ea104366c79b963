"""What the coordinator writes to etcd, each write fenced by its own leadership."""

import asyncio
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog
from google.protobuf.json_format import ParseError

from shoal_proto.errors import NotLeader, RetryError, Unavailable
from shoal_server.coordinator import codec
from shoal_server.core.job import Job
from shoal_server.core.member import Member
from shoal_server.core.restore import Saved
from shoal_server.core.roster import Generation, JobSpec, Record, Verdict
from shoal_server.etcd import keys
from shoal_server.etcd.api import (
    NO_LEASE,
    Compare,
    Delete,
    KeyValueStore,
    Operation,
    Put,
    TransactionResult,
)

log = structlog.get_logger(__name__)

ETCD_RETRY_S = 0.2
MAX_TRANSACTION = 100  # etcd takes 128 operations by default


@dataclass(frozen=True, kw_only=True)
class StoredJob:
    """A job as it lies in etcd."""

    spec: JobSpec
    saved: Saved
    records: Sequence[Record]
    leased: Collection[str]
    """Members whose keys are under leases, as a release before this one wrote them."""


class DurableJobs:
    """Reads and writes jobs. `leadership` gives what must hold for this coordinator to lead."""

    def __init__(self, store: KeyValueStore, leadership: Callable[[], Sequence[Compare]]) -> None:
        self._store = store
        self._leadership = leadership

    async def apply(self, operations: Sequence[Operation]) -> None:
        """Make the operations durable in one transaction.

        All of them are idempotent, so a write whose outcome is unknown is simply written again.
        Raises NotLeader once another coordinator leads, Unavailable while etcd is away.
        """
        while True:
            try:
                result = await self._store.transact(self._leadership(), operations)
            except RetryError as error:
                if error.details.get("outcome") != "unknown":
                    raise
                continue
            self._require(result)
            return

    @staticmethod
    def _require(result: TransactionResult) -> None:
        if not result.succeeded:
            raise NotLeader(
                "this coordinator no longer leads",
                seen="another leader's key in etcd",
                expected="its own",
                fix="Ask another coordinator.",
            )

    async def names(self) -> list[str]:
        """The names of all jobs there have been."""
        snapshot = await self._store.range(keys.JOBS)
        found = (item.key.removeprefix(keys.JOBS).partition("/") for item in snapshot.items)
        return [job for job, _, rest in found if rest == "state"]

    async def load(self, job: str, now_s: float) -> StoredJob | None:
        """A job's bounds, state and decided records; None if there never was one of that name."""
        state = await self._store.get(keys.job_state(job))
        if state is None:
            return None
        try:
            value = json.loads(state.value)
            snapshot = await self._store.range(keys.generations(job))
            records = [
                codec.record_from_pb(codec.record_from_json(item.value)) for item in snapshot.items
            ]
        except (ValueError, KeyError, ParseError) as error:
            raise Unavailable(
                f"what etcd holds of job {job} cannot be read", seen=repr(error)
            ) from error
        members, leased = await self._members(job, now_s)
        committed = [r for r in records if r.verdict is Verdict.COMMITTED]
        saved = Saved(
            last_generation=Generation(
                max([value["last_generation"], *(r.roster.generation for r in records)])
            ),
            record=committed[-1] if committed else None,
            before=committed[-2] if len(committed) > 1 else None,
            members=tuple(members),
            finished=value["finished"],
            reason=value["reason"],
        )
        spec = JobSpec(**value["spec"])
        return StoredJob(spec=spec, saved=saved, records=records, leased=leased)

    async def _members(self, job: str, now_s: float) -> tuple[list[Member], list[str]]:
        snapshot = await self._store.range(keys.members(job))
        members = []
        for item in snapshot.items:
            incarnation, info = codec.member_from_json(item.value)
            members.append(
                Member(
                    member_id=item.key.removeprefix(keys.members(job)),
                    incarnation=incarnation,
                    info=info,
                    attended_s=now_s,
                    waiting_since_s=now_s,
                )
            )
        leased = [item.key for item in snapshot.items if item.lease != NO_LEASE]
        return members, [key.removeprefix(keys.members(job)) for key in leased]


class JobWrites:
    """One job's changes on their way to etcd: gathered, then written together."""

    def __init__(self, job: Job, jobs: DurableJobs) -> None:
        self._job = job
        self._jobs = jobs
        # By key: of several changes to one the last is the one that counts.
        self._members: dict[str, Member | None] = {}
        self._state_changed = False
        self._finished = False

    def admit(self, member: Member) -> None:
        self._members[member.member_id] = member
        self._state_changed = True

    def keep(self, members: Iterable[Member]) -> None:
        """Write keys of members that are admitted already."""
        self._members.update((member.member_id, member) for member in members)

    def expel(self, member_id: str) -> None:
        self._members[member_id] = None

    def finish(self) -> None:
        self._finished = self._state_changed = True

    async def flush(self, record: Record | None = None) -> None:
        """Make what was gathered durable, and behind it the record.

        Takes as long as it takes: while etcd is away changes wait, and training goes on. Raises
        NotLeader once another coordinator leads.
        """
        members, self._members = self._members, {}
        state_changed, self._state_changed = self._state_changed or record is not None, False
        while members or state_changed:
            operations = self._operations(members)
            try:
                if state_changed:
                    operations.append(state_put(self._job, finished=self._finished))
                if record is not None:
                    # It stands last and so is written only once all before it are.
                    operations.append(record_put(record))
                for start in range(0, len(operations), MAX_TRANSACTION):
                    await self._jobs.apply(operations[start : start + MAX_TRANSACTION])
                return
            except NotLeader:
                raise
            except RetryError as error:
                log.warning("etcd_away", job=self._job.spec.job, reason=str(error))
            await asyncio.sleep(ETCD_RETRY_S)

    def _operations(self, members: Mapping[str, Member | None]) -> list[Operation]:
        job = self._job.spec.job
        return [
            member_delete(job, name) if member is None else member_put(job, member)
            for name, member in members.items()
        ]


def member_put(job: str, member: Member) -> Put:
    """The member's key, which is under no lease: only a leader that removes the member ends it."""
    value = codec.member_to_json(member.incarnation, member.info)
    return Put(keys.member(job, member.member_id), value)


def state_put(job: Job, *, finished: bool) -> Put:
    """The job's own key, as it is after the effects so far."""
    spec = job.spec
    value = {
        "spec": {
            "job": spec.job,
            "min_members": spec.min_members,
            "max_members": spec.max_members,
            "desired_members": spec.desired_members,
            "last_call_s": spec.last_call_s,
        },
        "last_generation": job.last_generation,
        "finished": finished,
        "reason": job.reason,
    }
    return Put(keys.job_state(spec.job), json.dumps(value).encode())


def record_put(record: Record) -> Put:
    message = codec.record_to_pb(record)
    key = keys.generation(record.job, record.roster.generation)
    return Put(key, codec.record_to_json(message))


def member_delete(job: str, member_id: str) -> Delete:
    return Delete(keys.member(job, member_id))
