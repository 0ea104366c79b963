"""Parameter servers without parameters, which change the assignment records in etcd.

Each has its own client and assignment table, as real servers have. Work that a real server does
when a stream breaks or a copy has arrived is done at once.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import (
    JobAssignments,
    exchange_primary,
    in_step,
    promote,
    without_backup,
)
from shoal_server.etcd import keys
from shoal_server.etcd.api import Compare, KeyValueStore, Operation, Put, TransactionResult
from shoal_server.etcd.records.assignment_mirror import AssignmentMirror
from shoal_server.etcd.remote import wire
from shoal_server.etcd.remote.client import EtcdClient
from shoal_server.serving.tasks import SupervisedTasks


class Tally:
    """Counts of the transactions of all clients."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.num_transactions = 0
        self.num_refused = 0
        self.written_bytes = 0
        """Bytes of keys and values that were put."""
        self.largest_value_bytes = 0
        self.largest_request_bytes = 0
        self.most_operations = 0

    def count(
        self, compares: Sequence[Compare], then: Sequence[Operation], others: Sequence[Operation]
    ) -> None:
        """Count a transaction before it is sent."""
        self.num_transactions += 1
        self.most_operations = max(self.most_operations, *map(len, (compares, then, others)))
        size = wire.transaction_request(compares, then, others).ByteSize()
        self.largest_request_bytes = max(self.largest_request_bytes, size)

    def count_done(self, then: Sequence[Operation], result: TransactionResult) -> None:
        """Count the outcome of a transaction."""
        self.num_refused += not result.succeeded
        for operation in then if result.succeeded else ():
            if isinstance(operation, Put):
                self.written_bytes += len(operation.key) + len(operation.value)
                self.largest_value_bytes = max(self.largest_value_bytes, len(operation.value))


class CountedClient(EtcdClient):
    """A client whose transactions are counted."""

    tally: Tally

    async def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> TransactionResult:
        self.tally.count(compares, then, otherwise)
        result = await super().transact(compares, then, otherwise)
        self.tally.count_done(then, result)
        return result


class RecordKeeper:
    """A server without parameters. All methods run on the event loop."""

    def __init__(self, store: KeyValueStore, server_id: str) -> None:
        self.me = Holder(server_id, "0190f5c0-0000-7000-8000-000000000000")
        self._store = store
        self._table = AssignmentMirror(store, self._carry_out, lambda job: None)
        self._tasks = SupervisedTasks()
        self._to_do: dict[str, set[int]] = {}
        """Shards whose records require work of this server, by job."""
        self._is_dead = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator["RecordKeeper"]:
        """Register the server, and let it work within the block or until it dies."""
        async with self._table, self._tasks:
            await self.register()
            yield self

    async def register(self, *, leaving: bool = False) -> None:
        record = {
            "address": f"{self.me.server_id}.ps.training.svc.cluster.local:7710",
            "incarnation": self.me.incarnation,
            "leaving": leaving,
        }
        await self._store.put(keys.server(self.me.server_id), json.dumps(record).encode())

    async def die(self) -> None:
        """Stop all work."""
        self._is_dead = True
        await self._tasks.close()

    async def lost(self, server: Holder) -> None:
        """Handle the end of a server's streams: take over its shards, and drop it as a backup."""
        for job in self._table.jobs:
            held = self._table.of_job(job)
            mine = [i for i, h in held.items() if h.primary == server and self.me in h.backups]
            await self._table.change_until_written(
                job, mine, partial(promote, lost=server, backup=self.me)
            )
            led = [i for i, h in held.items() if h.primary == self.me and server in h.holders[1:]]
            change = partial(without_backup, primary=self.me, lost=server)
            await self._table.change_until_written(job, led, change)

    def _carry_out(self, job: str, shard_ids: Collection[int]) -> None:
        for shard_id in shard_ids:
            assignment = self._table.of_job(job).get(shard_id)
            if self._is_dead or assignment is None or assignment.primary != self.me:
                continue
            if assignment.joining is not None or assignment.successor is not None:
                self._to_do.setdefault(job, set()).add(shard_id)
                self._tasks.start(self._follow(job), key=job)

    async def _follow(self, job: str) -> None:
        """Bring joiners in step and hand over shards, until nothing is left to do."""
        while True:
            # Collect all shards that are due by then, to change them together.
            await asyncio.sleep(0)
            # Only shards that are due: with a hundred servers on one loop, a scan of all shards
            # each time would take longer than etcd's time limits.
            held = self._table.of_job(job)
            known = {i: held[i] for i in self._to_do.pop(job, ()) if i in held}
            mine = {i: h for i, h in known.items() if h.primary == self.me}
            joining = {i: h.joining for i, h in mine.items() if h.joining is not None}
            leaving = [i for i, h in mine.items() if h.successor is not None and i not in joining]
            if not joining and not leaving:
                return
            for joined in set(joining.values()):
                ids = [i for i, holder in joining.items() if holder == joined]
                await self._table.change_until_written(
                    job, ids, partial(in_step, primary=self.me, joined=joined)
                )
            await self._table.change_until_written(
                job, leaving, partial(exchange_primary, primary=self.me)
            )


class RecordKeepers:
    """Many servers on one etcd, and an observer."""

    def __init__(self, store: KeyValueStore, tally: Tally) -> None:
        self.store = store
        self.tally = tally
        self.servers: list[RecordKeeper] = []
        self.observed = AssignmentMirror(store, self._changed, self._gone)
        self._news = asyncio.Event()

    async def kill(self, server: RecordKeeper) -> None:
        """Kill the server; all other servers notice at once."""
        self.servers.remove(server)
        await server.die()
        await asyncio.gather(*(other.lost(server.me) for other in self.servers))
        # The registration disappears last, as when a lease expires.
        await self.store.delete(keys.server(server.me.server_id))

    async def until(
        self, job: str, is_so: Callable[[JobAssignments], bool], limit_s: float
    ) -> None:
        """Wait until `is_so` holds for the job's records."""
        async with asyncio.timeout(limit_s):
            while (found := self.observed.assembled(job)) is None or not is_so(found):
                self._news.clear()
                await self._news.wait()

    def _changed(self, job: str, shard_ids: Collection[int]) -> None:
        self._news.set()

    def _gone(self, job: str) -> None:
        self._news.set()


@asynccontextmanager
async def record_keepers(
    connect: Callable[[], CountedClient], num_servers: int
) -> AsyncIterator[RecordKeepers]:
    """Run servers within the block, each with its own connection."""
    async with AsyncExitStack() as stack:

        async def connected(tally: Tally) -> CountedClient:
            client = await stack.enter_async_context(connect())
            client.tally = tally
            return client

        tally = Tally()
        cluster = RecordKeepers(await connected(tally), tally)
        await stack.enter_async_context(cluster.observed)
        for number in range(num_servers):
            server = RecordKeeper(await connected(tally), f"ps-{number:03d}")
            cluster.servers.append(await stack.enter_async_context(server.running()))
        yield cluster


def is_whole(assignments: JobAssignments) -> bool:
    """True if every shard has its copies, and none is in transfer."""
    return all(
        len(h.backups) == assignments.copies - 1 and h.joining is None and h.successor is None
        for h in assignments.shards
    )


def leads_nothing(server: Holder) -> Callable[[JobAssignments], bool]:
    """Return a check that the server is primary of no shard of a job."""
    return lambda assignments: all(h.primary != server for h in assignments.shards)


def holds_nothing(server: Holder) -> Callable[[JobAssignments], bool]:
    """Return a check that the server holds no shard of a job in any role."""
    return lambda assignments: all(server not in h.holders for h in assignments.shards)
