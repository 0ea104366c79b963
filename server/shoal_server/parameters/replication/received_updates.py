"""Updates from primaries, acknowledged once received, and applied afterwards."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import structlog

from shoal_proto.errors import Overloaded
from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.effects import SettleCopy
from shoal_server.core.replication.protocol.events import CopyFailed, CopySettled
from shoal_server.core.replication.protocol.messages import Key
from shoal_server.parameters.comparison.digest import Comparison, PieceDigest, compared
from shoal_server.parameters.replication.core_driver import CoreDriver
from shoal_server.parameters.replication.incoming_links import IncomingLinks
from shoal_server.parameters.replication.throttle import LARGE
from shoal_server.parameters.replication.wire.frames import ArrivedRequest, RequestAssembler
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica, work_bytes_of
from shoal_server.parameters.shard.workers import Runner
from shoal_server.parameters.tables.batch import ID_BYTES
from shoal_server.serving.tasks import SupervisedTasks

log = structlog.get_logger(__name__)

MAX_UNAPPLIED_BYTES = 256 * 1024 * 1024
"""Bound on received records that are not applied yet, over all shards. Beyond it, a stream is read
up to its next update, which waits."""

COPY_FAILED = "copy_failed"


@dataclass(slots=True, eq=False)
class _Backlog:
    replica: ShardReplica
    records: deque[ArrivedRequest | PieceDigest] = field(default_factory=deque)
    """Records, and digests to compare after the records before them."""
    applied: "asyncio.Task[None] | None" = None


class ReceivedUpdates:
    def __init__(
        self,
        driver: CoreDriver,
        *,
        catalog: Catalog,
        memory: Memory,
        run: Runner,
        is_coming: Callable[[Key, int], bool],
        links: IncomingLinks,
    ) -> None:
        self._driver = driver
        self._is_coming = is_coming
        self._links = links
        self._catalog = catalog
        self.memory = memory
        self.run = run
        self._backlogs: dict[Key, _Backlog] = {}
        self._unapplied_bytes = 0
        self._capacity = asyncio.Condition()
        self._tasks = SupervisedTasks()
        self.num_compared = self.num_different = 0
        """Pieces compared with the primary's, and pieces that differed."""

    async def close(self) -> None:
        await self._tasks.close()

    async def await_capacity(self) -> None:
        async with self._capacity:
            await self._capacity.wait_for(lambda: self.has_capacity)

    @property
    def has_capacity(self) -> bool:
        return self._unapplied_bytes <= MAX_UNAPPLIED_BYTES

    def assembly(self) -> RequestAssembler:
        """An assembler for one stream. Close it at the stream's end."""
        return RequestAssembler(self.memory, self._is_coming)

    def check_memory(self, arrived: ArrivedRequest) -> None:
        """Raise Overloaded for an update that was dropped for lack of memory, or that has rows
        while the memory limit is exceeded. The copy stays until the assignment allows this server
        to drop it."""
        if arrived.why_dropped:
            raise Overloaded("there was no memory for an update", seen=arrived.why_dropped)
        if arrived.push is not None and arrived.push.row_ids:
            shard_id = arrived.request.key[1]
            self.memory.check(f"more rows in a copy of shard {shard_id}")

    def replay_record(self, key: Key, arrived: ArrivedRequest) -> None:
        replica = self._catalog.find(*key)
        assert replica is not None
        if not arrived.is_borrowed:
            self._put(key, replica, arrived)
        elif not self._replayed_now(key, replica, arrived):
            self._put(key, replica, arrived.owned())

    def _replayed_now(self, key: Key, replica: ShardReplica, arrived: ArrivedRequest) -> bool:
        """Apply a small update from the memory in which it arrived, if no earlier one waits; False
        if that was not tried."""
        if key in self._backlogs:
            return False
        replay = partial(replica.state.replay, arrived.record(), is_borrowed=True)
        try:
            return replica.work_now(_work_bytes(replica, arrived), replay)
        except Exception:
            log.exception(COPY_FAILED, job=key[0], shard_id=key[1])
            self._give_up(key, replica)
            return True

    def compare(self, key: Key, epoch: int, digest: PieceDigest) -> None:
        """Compare the backup with its primary's digest, once earlier updates are applied."""
        replica = self._catalog.find(*key)
        if replica is None or replica.role is not ReplicaRole.BACKUP or replica.epoch != epoch:
            return
        self._put(key, replica, digest)

    def _put(self, key: Key, replica: ShardReplica, item: ArrivedRequest | PieceDigest) -> None:
        backlog = self._backlogs.get(key)
        if backlog is None or backlog.replica is not replica:
            backlog = self._backlogs[key] = _Backlog(replica)
        self._unapplied_bytes += _num_bytes(item)
        backlog.records.append(item)
        if backlog.applied is None or backlog.applied.done():
            backlog.applied = self._tasks.start(self._apply(key, backlog))

    async def _apply(self, key: Key, backlog: _Backlog) -> None:
        replica = backlog.replica
        while backlog.records:
            item = backlog.records.popleft()
            size = _num_bytes(item)
            try:
                if isinstance(item, PieceDigest):
                    await self._compare(key, replica, item)
                else:
                    await self._replay(replica, item)
            except Exception:
                log.exception(COPY_FAILED, job=key[0], shard_id=key[1])
                size += sum(map(_num_bytes, backlog.records))
                backlog.records.clear()
                self._give_up(key, replica)
            finally:
                self._unapplied_bytes -= size
                async with self._capacity:
                    self._capacity.notify_all()
        if self._backlogs.get(key) is backlog and not backlog.records:
            del self._backlogs[key]

    def _give_up(self, key: Key, replica: ShardReplica) -> None:
        if self._catalog.find(*key) is replica:
            self._driver.submit_event(CopyFailed(key))

    async def _compare(self, key: Key, replica: ShardReplica, digest: PieceDigest) -> None:
        seen = await replica.run_in_order(self.run, LARGE, partial(compared, replica.state, digest))
        if seen is Comparison.ANOTHER_VERSION:
            return
        self.num_compared += 1
        if seen is Comparison.DIFFERENT:
            self.num_different += 1
            log.error(
                "copy_differs",
                job=key[0],
                shard_id=key[1],
                version=digest.version,
                part=digest.piece.part,
                start=digest.piece.start,
            )
            if self._catalog.find(*key) is replica:
                # The core makes the backup anew. Until then, the primary continues without it.
                self._driver.submit_event(CopyFailed(key))

    async def _replay(self, replica: ShardReplica, arrived: ArrivedRequest) -> None:
        num_bytes = _work_bytes(replica, arrived)
        await replica.run_in_order(
            self.run, num_bytes, lambda: replica.state.replay(arrived.record())
        )

    def settle_copy(self, effect: SettleCopy) -> None:
        replica = self._catalog.find(*effect.key)
        assert replica is not None
        self._tasks.start(self._settled(effect.key, replica, effect.last))

    async def _settled(self, key: Key, replica: ShardReplica, last: Holder | None) -> None:
        if last is not None:
            await self._links.read_to_end(last)
        await self.settle(replica)
        if self._catalog.find(*key) is replica:
            self._driver.submit_event(CopySettled(key, replica.state.version))

    async def settle(self, replica: ShardReplica) -> None:
        """Return once every update received for a backup is applied, or the backup was given up."""
        key = replica.job, replica.shard_id
        while (backlog := self._backlogs.get(key)) is not None and backlog.replica is replica:
            if backlog.applied is None or backlog.applied.done():
                return
            # `wait` does not cancel the task: acknowledged updates are applied in any case.
            await asyncio.wait({backlog.applied})


def _work_bytes(replica: ShardReplica, arrived: ArrivedRequest) -> int:
    """The `num_bytes` with which a `Runner` applies an update."""
    assert arrived.push is not None
    num_rows = len(arrived.push.row_ids) // ID_BYTES
    num_bytes = work_bytes_of(arrived.push, _num_bytes(arrived))
    return int(num_bytes + replica.state.body.regrown_bytes(num_rows))


def _num_bytes(arrived: ArrivedRequest | PieceDigest) -> int:
    if isinstance(arrived, PieceDigest):
        return len(arrived.piece.row_ids)
    push = arrived.push
    row_bytes = len(push.row_ids) + len(push.row_births) if push is not None else 0
    return row_bytes + sum(map(len, arrived.parts))
