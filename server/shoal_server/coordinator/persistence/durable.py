"""What the coordinator writes to etcd, each write fenced by its own leadership."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import structlog

from shoal_proto.errors import AccessDenied, NotLeader, RetryError
from shoal_server.coordinator.persistence import codec
from shoal_server.coordinator.persistence.stored_json import StateRecord
from shoal_server.core.generations.roster import Record
from shoal_server.core.membership.job import Job
from shoal_server.core.membership.member import Member
from shoal_server.etcd import keys
from shoal_server.etcd.api import (
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


class DurableJobs:
    """Writes jobs. `leadership` gives what must hold for this coordinator to lead."""

    def __init__(self, store: KeyValueStore, leadership: Callable[[], Sequence[Compare]]) -> None:
        self._store = store
        self._leadership = leadership

    async def apply(self, operations: Sequence[Operation]) -> None:
        """Make the operations durable in one transaction.

        All of them are idempotent, so a write whose outcome is unknown is simply written again.
        Raises NotLeader once another coordinator leads, Unavailable while etcd is away, and what
        etcd refuses it with (a record that is too large).
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

    async def apply_all(self, operations: Sequence[Operation]) -> None:
        """Make the operations durable, in order, in as many transactions as that takes."""
        for start in range(0, len(operations), MAX_TRANSACTION):
            await self.apply(operations[start : start + MAX_TRANSACTION])

    @staticmethod
    def _require(result: TransactionResult) -> None:
        if not result.succeeded:
            raise NotLeader(
                "this coordinator no longer leads",
                seen="another leader's key in etcd",
                expected="its own",
                fix="Ask another coordinator.",
            )


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

    def expel(self, member_id: str) -> None:
        self._members[member_id] = None

    def save(self) -> None:
        """Write the job's own key."""
        self._state_changed = True

    def finish(self) -> None:
        self._finished = self._state_changed = True

    async def flush(self, record: Record | None = None) -> None:
        """Make what was gathered durable, and behind it the record.

        Takes as long as it takes: while etcd is away, or denies access, changes wait, and training
        goes on. Raises NotLeader once another coordinator leads, and what etcd refuses it with.
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
                await self._jobs.apply_all(operations)
                return
            except NotLeader:
                raise
            except (RetryError, AccessDenied) as error:
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
    record = StateRecord(
        spec=job.spec,
        last_generation=job.last_generation,
        finished=finished,
        reason=job.reason,
        progress=job.progress,
        lost=job.lost.seen if job.lost is not None else None,
    )
    return Put(keys.job_state(job.spec.job), record.to_json())


def record_put(record: Record) -> Put:
    key = keys.generation(record.job, record.roster.generation)
    return Put(key, codec.record_to_json(record))


def member_delete(job: str, member_id: str) -> Delete:
    return Delete(keys.member(job, member_id))
