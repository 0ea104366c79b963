"""Durable writes of jobs, conditional on the leader's key.

A job's writes also compare its record's revision with the last known one: no decision is based on a
record that another process has changed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import structlog

from shoal_proto.errors import AccessDenied, InternalError, NotLeader, RetryError, ShoalError
from shoal_server.coordinator.persistence import codec
from shoal_server.coordinator.persistence.stored_generations import (
    StoredGenerations,
    record_to_json,
)
from shoal_server.coordinator.persistence.stored_json import state_to_json
from shoal_server.core.driver.job_write import JobWrite, StateRecord
from shoal_server.core.membership.member import MemberState
from shoal_server.etcd import keys
from shoal_server.etcd.api import (
    Delete,
    Get,
    KeyValue,
    Operation,
    Put,
    Revision,
    unchanged_since,
)
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.etcd.repeat import is_outcome_unknown, transact_until_known, until_answered

log = structlog.get_logger(__name__)

MAX_TRANSACTION = 100  # etcd takes 128 operations by default
MAX_TRANSACTION_BYTES = 1024 * 1024  # and 1.5 MiB


class DurableJobs:
    """Writer of jobs' records and members."""

    def __init__(self, store: LeaderStore) -> None:
        self._store = store
        self._more: dict[str, Mapping[str, object]] = {}
        self._revisions: dict[str, Revision] = {}
        self._unsure: set[str] = set()
        """Jobs with a write of unknown outcome."""

    def keep(self, job: str, stored: StateRecord | None) -> None:
        """Continue from this record of the job; None: etcd has none. Writes preserve fields that a
        later release added."""
        self.forget(job)
        if stored is not None:
            self._more[job] = stored.more
            self._revisions[job] = Revision(stored.revision)

    def forget(self, job: str) -> None:
        """Stop tracking the job's record."""
        self._more.pop(job, None)
        self._revisions.pop(job, None)
        self._unsure.discard(job)

    def has_written(self, job: str) -> bool:
        """True if etcd may have a record of the job."""
        return bool(self._revisions.get(job)) or job in self._unsure

    async def apply(self, operations: Sequence[Operation]) -> None:
        """Make the operations durable in one transaction, repeated while its outcome is unknown.

        Raises NotLeader, Unavailable while etcd cannot be reached, and the error with which etcd
        refuses. After Unavailable, an earlier attempt may have taken effect.
        """
        await transact_until_known(self._store, (), operations)

    async def apply_all(self, operations: Sequence[Operation]) -> None:
        """Make the operations durable in order, in several transactions if necessary."""
        for batch in _batches(operations):
            await self.apply(batch)

    async def persist(self, write: JobWrite, generations: StoredGenerations) -> None:
        """Make a job's write durable, and update its `generations` in etcd.

        Retries while etcd cannot be reached or denies access. Raises NotLeader, InternalError if
        another process wrote the job's own record, and the error with which etcd refuses.
        """
        await self._until_written(write.job, operations_of(self._with_more(write)))
        if write.record is not None:
            await self._until_written(write.job, generations.decided(write.record))

    def _with_more(self, write: JobWrite) -> JobWrite:
        more = self._more.get(write.job)
        if not more or write.state is None:
            return write
        return replace(write, state=replace(write.state, more=more))

    async def _until_written(self, job: str, operations: Sequence[Operation]) -> None:
        # Each batch is repeated by itself, so that no batch is written again after a later one.
        for batch in _batches(operations):
            await until_answered(
                partial(self.apply_to, job, batch),
                lambda error: log.warning("etcd_unreachable", job=job, reason=str(error)),
                _is_waited_out,
            )

    async def apply_to(self, job: str, operations: Sequence[Operation]) -> None:
        """Apply the operations as `apply` does. Raises InternalError if the job's own record is not
        the known one."""
        key = keys.job_state(job)
        state = next((o.value for o in operations if isinstance(o, Put) and o.key == key), None)
        while True:
            known = self._revisions.get(job, Revision(0))
            is_known = unchanged_since(key, known)
            try:
                result = await self._store.transact([is_known], operations, [Get(key)])
            except RetryError as error:
                if not is_outcome_unknown(error):
                    raise
                self._unsure.add(job)
                continue
            break
        revision = result.revision
        if not result.succeeded:
            stored = next(iter(result.reads[0]), None)
            if stored is None or stored.value != state or job not in self._unsure:
                raise _changed(job, stored, known)
            revision = stored.mod_revision  # the write of unknown outcome had arrived
        if state is not None:
            self._revisions[job] = revision
            self._unsure.discard(job)


def _is_waited_out(error: ShoalError) -> bool:
    return isinstance(error, RetryError | AccessDenied) and not isinstance(error, NotLeader)


def _changed(job: str, stored: KeyValue | None, known: Revision) -> InternalError:
    seen = "none" if stored is None else f"one written at revision {stored.mod_revision}"
    return InternalError(
        f"the record of job {job} in etcd is not the one that its last coordinator wrote",
        seen=seen,
        expected=f"the one of revision {known}" if known else "none",
        fix=f"Something other than the leading coordinator writes to {keys.job_state(job)}."
        f" `shoal repair {job}` shows it; `shoal repair {job} --apply` continues from it.",
    )


def operations_of(write: JobWrite) -> list[Operation]:
    """Puts and deletes of the write, in order."""
    operations = [_member(write.job, name, member) for name, member in write.members.items()]
    if write.state is not None:
        operations.append(Put(keys.job_state(write.job), state_to_json(write.state)))
    if write.record is not None:
        # Last, so that the record follows all the others.
        key = keys.generation(write.job, write.record.roster.generation)
        operations.append(Put(key, record_to_json(write.record)))
    return operations


def _batches(operations: Sequence[Operation]) -> Iterator[list[Operation]]:
    batch: list[Operation] = []
    num_bytes = 0
    for operation in operations:
        size = len(operation.value) if isinstance(operation, Put) else 0
        if batch and (len(batch) == MAX_TRANSACTION or num_bytes + size > MAX_TRANSACTION_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(operation)
        num_bytes += size
    if batch:
        yield batch


def _member(job: str, member_id: str, member: MemberState | None) -> Operation:
    """Write or delete the member's key, which is under no lease."""
    key = keys.member(job, member_id)
    if member is None:
        return Delete(key)
    return Put(key, codec.member_to_json(member.incarnation, member.info))
