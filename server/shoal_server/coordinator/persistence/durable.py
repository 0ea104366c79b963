"""What the coordinator writes to etcd, each write fenced by its own leadership."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from shoal_proto.errors import AccessDenied, NotLeader, RetryError
from shoal_server.coordinator.persistence import codec
from shoal_server.coordinator.persistence.stored_json import state_to_json
from shoal_server.core.driver.job_write import JobWrite
from shoal_server.core.membership.member import Member
from shoal_server.etcd import keys
from shoal_server.etcd.api import Compare, Delete, Operation, Put, TransactionResult

log = structlog.get_logger(__name__)

ETCD_RETRY_S = 0.2
MAX_TRANSACTION = 100  # etcd takes 128 operations by default


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

    async def persist(self, write: JobWrite) -> None:
        """Make a job's write durable.

        Takes as long as it takes: while etcd is away, or denies access, changes wait, and training
        goes on. Raises NotLeader once another coordinator leads, and what etcd refuses it with.
        """
        operations = operations_of(write)
        while True:
            try:
                await self.apply_all(operations)
                return
            except NotLeader:
                raise
            except (RetryError, AccessDenied) as error:
                log.warning("etcd_away", job=write.job, reason=str(error))
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


def operations_of(write: JobWrite) -> list[Operation]:
    """What is put and deleted, in order."""
    operations = [_member(write.job, name, member) for name, member in write.members.items()]
    if write.state is not None:
        operations.append(Put(keys.job_state(write.job), state_to_json(write.state)))
    if write.record is not None:
        # It stands last and so is written only once all before it are.
        key = keys.generation(write.job, write.record.roster.generation)
        operations.append(Put(key, codec.record_to_json(write.record)))
    return operations


def _member(job: str, member_id: str, member: Member | None) -> Operation:
    """The member's key, which is under no lease: only a leader that removes the member ends it."""
    key = keys.member(job, member_id)
    if member is None:
        return Delete(key)
    return Put(key, codec.member_to_json(member.incarnation, member.info))
