"""Updates that a primary has told this server of: acknowledged once here, applied behind."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import structlog

from shoal_proto.errors import InternalError
from shoal_server.parameters.replication.frames import Arrived
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.image import Image, UpdateRecord
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.shard.replica import ShardReplica, num_bytes_of, work_bytes_of
from shoal_server.parameters.shard.workers import Runner
from shoal_server.parameters.tables.batch import ID_BYTES

log = structlog.get_logger(__name__)

MAX_UNAPPLIED_BYTES = 256 * 1024 * 1024
"""Of records received and not applied yet, over all shards; beyond it no stream is read."""


@dataclass(slots=True)
class _Backlog:
    """What was received for one shard and is still to be applied, in order."""

    replica: ShardReplica
    received_version: int
    discard: Callable[[ShardReplica], None]
    """Called if a record cannot be applied: the copy is not what it should be."""
    is_closed: bool = False
    """No more is taken: the shard is to be led here, or another image of it has come."""
    records: deque[UpdateRecord] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None


class ReceivedUpdates:
    """Lives on the event loop. `run` does work on so many bytes without holding the loop up."""

    def __init__(self, catalog: Catalog, memory: Memory, run: Runner) -> None:
        self._catalog = catalog
        self._memory = memory
        self._run = run
        self._backlogs: dict[tuple[str, int], _Backlog] = {}
        self._unapplied_bytes = 0
        self._room = asyncio.Condition()

    def begin(self, replica: ShardReplica, discard: Callable[[ShardReplica], None]) -> None:
        """A shard's image is here, and what follows on it may come."""
        key = replica.job, replica.shard_id
        self._backlogs[key] = _Backlog(replica, replica.state.version, discard)

    async def await_room(self) -> None:
        """Return once so little waits to be applied that more may be taken."""
        async with self._room:
            await self._room.wait_for(self._has_room)

    def _has_room(self) -> bool:
        return self._unapplied_bytes <= MAX_UNAPPLIED_BYTES

    def check_not_older(self, arrived: Arrived, image: Image) -> None:
        """What a primary was told to be received here must not be replaced by less."""
        backlog = self._backlogs.get((arrived.job, arrived.shard_id))
        if (
            backlog is not None
            and self._catalog.find(arrived.job, arrived.shard_id) is backlog.replica
            and backlog.replica.epoch == arrived.epoch
            and backlog.received_version > image.version
        ):
            raise InternalError(
                f"an image of shard {arrived.shard_id} is older than the copy that is here",
                seen=f"version {image.version}",
                expected=f"version {backlog.received_version} or a newer one",
            )

    def take(self, arrived: Arrived, record: UpdateRecord) -> int:
        """Without an await: what was checked holds until the record has its place in the order."""
        key = arrived.job, arrived.shard_id
        backlog = self._backlogs.get(key)
        is_open = backlog is not None and not backlog.is_closed
        if backlog is None or not is_open or self._catalog.find(*key) is not backlog.replica:
            raise InternalError(
                f"no copy of shard {arrived.shard_id} of job {arrived.job} is here",
                seen=f"a record of version {record.push.version}",
                expected="the shard's image first",
            )
        if record.push.version != backlog.received_version + 1:
            raise InternalError(
                f"a record of shard {arrived.shard_id} does not follow on what came before",
                seen=f"version {record.push.version}",
                expected=f"version {backlog.received_version + 1}",
            )
        if record.push.row_ids:
            # What was acknowledged stays here until the record says that it may go.
            self._memory.check(f"more rows in a copy of shard {arrived.shard_id}")
        self._unapplied_bytes += num_bytes_of(record)
        backlog.received_version = record.push.version
        backlog.records.append(record)
        if backlog.task is None or backlog.task.done():
            backlog.task = asyncio.create_task(self._apply(backlog))
        return record.push.version

    async def _apply(self, backlog: _Backlog) -> None:
        """Replay until nothing is left; a copy that fails to is given up."""
        while backlog.records:
            record = backlog.records.popleft()
            size = num_bytes_of(record)
            state = backlog.replica.state
            num_bytes = work_bytes_of(record) + state.body.regrown_bytes(
                len(record.push.row_ids) // ID_BYTES
            )
            try:
                await self._run(num_bytes, partial(state.replay, record))
            except Exception:
                log.exception(
                    "copy_failed", job=backlog.replica.job, shard_id=backlog.replica.shard_id
                )
                size += sum(map(num_bytes_of, backlog.records))
                backlog.records.clear()
                backlog.discard(backlog.replica)
            finally:
                self._unapplied_bytes -= size
                async with self._room:
                    self._room.notify_all()

    async def settle(self, replica: ShardReplica) -> None:
        """Return once everything that was received for a shard is applied."""
        await self.settle_key((replica.job, replica.shard_id))

    async def settle_key(self, key: tuple[str, int]) -> None:
        """The same of a shard by its job and id."""
        backlog = self._backlogs.get(key)
        if backlog is None:
            return
        backlog.is_closed = True
        if backlog.task is not None:
            # Whoever else settles it waits too, and what was acknowledged is applied although who
            # waits for it is cancelled.
            await asyncio.wait({backlog.task})
        if self._backlogs.get(key) is backlog:
            del self._backlogs[key]
