"""Access to etcd for a coordinator: each write is conditional on the leader's key.

The coordinator's services get a `LeaderStore` and no other store.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import structlog

from shoal_proto.errors import NotLeader
from shoal_server.etcd.api import (
    Compare,
    Get,
    Keyspace,
    KeyValue,
    Operation,
    RangeResult,
    Revision,
    TransactionResult,
    WatchBatch,
    holds,
)

log = structlog.get_logger(__name__)


class Term:
    """The time in which this coordinator believes that it leads."""

    def __init__(self) -> None:
        self.deposed = asyncio.Event()
        """Set when a transaction showed that this coordinator leads no longer."""
        self.why_deposed = ""
        self._conditions: Sequence[Compare] | None = None

    def begin(self, conditions: Sequence[Compare]) -> None:
        """Begin a term. `conditions` must hold in etcd for each write."""
        self._conditions = conditions
        self.why_deposed = ""
        self.deposed.clear()

    def end(self) -> None:
        """End the term: later writes raise NotLeader."""
        self._conditions = None

    def depose(self, reason: str) -> None:
        self.why_deposed = reason
        self.deposed.set()

    def conditions(self) -> Sequence[Compare]:
        """Conditions of every write. Raises NotLeader outside of a term."""
        if self._conditions is None:
            raise NotLeader("this coordinator does not lead", details={"leader": ""})
        return self._conditions


class LeaderStore:
    """A `Keyspace` that writes only while this coordinator leads. Reads are not checked."""

    def __init__(
        self,
        store: Keyspace,
        leadership: Callable[[], Sequence[Compare]],
        on_deposed: Callable[[str], object],
    ) -> None:
        """`leadership`: conditions of leading; raises NotLeader outside of a term. `on_deposed`:
        called with the reason when a condition of the present term fails."""
        self._store = store
        self._leadership = leadership
        self._on_deposed = on_deposed
        self._current_check: asyncio.Task[None] | None = None
        self._next_check: asyncio.Task[None] | None = None

    async def get(self, key: str) -> KeyValue | None:
        return await self._store.get(key)

    async def range(self, prefix: str) -> RangeResult:
        return await self._store.range(prefix)

    async def keys(self, prefix: str) -> tuple[str, ...]:
        return await self._store.keys(prefix)

    def watch(self, prefix: str, start: Revision) -> AsyncGenerator[WatchBatch, None]:
        return self._store.watch(prefix, start)

    async def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> TransactionResult:
        """`Keyspace.transact`, on condition of the leader's key if anything is written.

        Raises NotLeader, with nothing written, outside of a term or if the key is gone or replaced.
        `otherwise` may only read.
        """
        if all(isinstance(each, Get) for each in (*then, *otherwise)):
            return await self._store.transact(compares, then, otherwise)
        leadership = self._leadership()
        if not all(isinstance(each, Get) for each in otherwise):
            # etcd runs this branch for a deposed coordinator too.
            raise AssertionError("a leader writes nothing if its comparison fails")
        leader_gets = [Get(each.key) for each in leadership]
        result = await self._store.transact(
            [*leadership, *compares], then, [*otherwise, *leader_gets]
        )
        if result.succeeded:
            return result
        seen = result.reads[len(otherwise) :]
        for compare, items in zip(leadership, seen, strict=True):
            if not holds(compare, items[0] if items else None):
                raise self._no_longer_leads(leadership)
        return TransactionResult(False, result.revision, result.reads[: len(otherwise)])

    async def confirm(self) -> None:
        """Return once a read that began after this call has shown that this coordinator leads.
        Waiting calls share one read. Raises NotLeader, and what the store raises."""
        if self._next_check is None:
            self._next_check = asyncio.create_task(
                self._check_after(self._current_check), name="leading-check"
            )
            self._next_check.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._next_check)

    async def _check_after(self, previous: "asyncio.Task[None] | None") -> None:
        if previous is not None:
            await asyncio.wait([previous])
        self._current_check, self._next_check = self._next_check, None
        leadership = self._leadership()
        leader_gets = [Get(each.key) for each in leadership]
        if not (await self._store.transact(leadership, leader_gets, leader_gets)).succeeded:
            raise self._no_longer_leads(leadership)

    def _no_longer_leads(self, failed: Sequence[Compare]) -> NotLeader:
        error = NotLeader(
            "this coordinator no longer leads",
            seen="no leader's key in etcd, or another coordinator's",
            expected="this coordinator's key",
            fix="Ask another coordinator.",
        )
        log.warning("transaction_refused", reason=str(error))
        if self._are_current(failed):
            self._on_deposed(str(error))
        return error

    def _are_current(self, conditions: Sequence[Compare]) -> bool:
        """False if the conditions are those of an earlier term, in which the call began."""
        try:
            return self._leadership() == conditions
        except NotLeader:
            return False
