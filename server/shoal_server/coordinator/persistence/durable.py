"""What the coordinator writes to etcd, each write fenced by its own leadership."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import structlog

from shoal_proto.errors import AccessDenied, NotLeader, RetryError
from shoal_server.coordinator.persistence import codec, stored_chunks
from shoal_server.coordinator.persistence.stored_chunks import StoredChunks
from shoal_server.coordinator.persistence.stored_json import state_to_json
from shoal_server.core.driver.job_write import JobWrite
from shoal_server.core.membership.member import Member
from shoal_server.etcd import keys
from shoal_server.etcd.api import Compare, Delete, Operation, Put, TransactionResult

log = structlog.get_logger(__name__)

ETCD_RETRY_S = 0.2
MAX_TRANSACTION = 100  # etcd takes 128 operations by default
MAX_TRANSACTION_BYTES = 1024 * 1024  # and 1.5 MiB


class Transactions(Protocol):
    """The one thing that is asked of the store here."""

    async def transact(
        self, compares: Sequence[Compare], then: Sequence[Operation]
    ) -> TransactionResult: ...


class DurableJobs:
    """Writes jobs. `leadership` gives what must hold for this coordinator to lead."""

    def __init__(self, store: Transactions, leadership: Callable[[], Sequence[Compare]]) -> None:
        self._store = store
        self._leadership = leadership
        self._more: dict[str, Mapping[str, object]] = {}

    def keep(self, job: str, more: Mapping[str, object]) -> None:
        """Write these fields, of which a later release knows, with each record of the job."""
        if more:
            self._more[job] = more
        else:
            self._more.pop(job, None)

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
        for batch in _batches(operations):
            await self.apply(batch)

    async def persist(self, write: JobWrite, chunks: StoredChunks) -> None:
        """Make a job's write durable. `chunks`: those of it that etcd holds, which is noted.

        Takes as long as it takes: while etcd is away, or denies access, changes wait, and training
        goes on. Raises NotLeader once another coordinator leads, and what etcd refuses it with.
        """
        await self._until_written(write.job, operations_of(self._with_more(write), chunks))
        if write.record is not None:
            await self._until_written(write.job, chunks.decided(write.record))

    def _with_more(self, write: JobWrite) -> JobWrite:
        more = self._more.get(write.job)
        if not more or write.state is None:
            return write
        return replace(write, state=replace(write.state, more=more))

    async def _until_written(self, job: str, operations: Sequence[Operation]) -> None:
        while True:
            try:
                await self.apply_all(operations)
                return
            except NotLeader:
                raise
            except (RetryError, AccessDenied) as error:
                log.warning("etcd_away", job=job, reason=str(error))
            await asyncio.sleep(ETCD_RETRY_S)

    @staticmethod
    def _require(result: TransactionResult) -> None:
        if not result.succeeded:
            raise NotLeader(
                "this coordinator no longer leads",
                seen="another leader's key in etcd",
                expected="its own",
                fix="Ask another coordinator.",
            )


def operations_of(write: JobWrite, chunks: StoredChunks) -> list[Operation]:
    """What is put and deleted, in order."""
    operations = [_member(write.job, name, member) for name, member in write.members.items()]
    if write.record is not None:
        operations += chunks.missing(write.record)
    if write.state is not None:
        operations.append(Put(keys.job_state(write.job), state_to_json(write.state)))
    if write.record is not None:
        # It stands last and so is written only once all before it are.
        key = keys.generation(write.job, write.record.roster.generation)
        operations.append(Put(key, stored_chunks.to_stored(write.record).value))
    return operations


def _batches(operations: Sequence[Operation]) -> Iterator[list[Operation]]:
    """As few as etcd takes them in."""
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


def _member(job: str, member_id: str, member: Member | None) -> Operation:
    """The member's key, which is under no lease: only a leader that removes the member ends it."""
    key = keys.member(job, member_id)
    if member is None:
        return Delete(key)
    return Put(key, codec.member_to_json(member.incarnation, member.info))
