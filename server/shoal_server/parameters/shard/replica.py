"""One shard as this server holds it: its state, this server's part in it, who has what of it."""

import asyncio
import heapq
from collections.abc import Callable, Iterable
from enum import Enum
from itertools import count
from typing import TypeVar

import structlog

from shoal_proto.errors import InvalidSpec, Overloaded, ShoalError, WrongEpoch
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_server.core.shards.assignments import Holder
from shoal_server.parameters.shard.image import UpdateRecord
from shoal_server.parameters.shard.versioned import AnyShard
from shoal_server.parameters.shard.workers import INLINE_BYTES, Runner

log = structlog.get_logger(__name__)

T = TypeVar("T")

MAX_UNREPLICATED_BYTES = 256 * 1024 * 1024
"""Of one shard's pushes that a backup has not received yet; beyond it, pushes are refused."""


class Role(Enum):
    PRIMARY = "primary"
    BACKUP = "backup"


class Receipts:
    """Up to which version each backup in step has a shard. Lives on the event loop."""

    def __init__(self) -> None:
        self._received: dict[Holder, int] = {}
        self._required: frozenset[Holder] = frozenset()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = count()
        self._ended: ShoalError | None = None

    def require(self, holders: Iterable[Holder]) -> None:
        """From now on a version is safe once all of these have it."""
        self._required = frozenset(holders)
        self._release()

    def received(self, holder: Holder, version: int) -> None:
        self._received[holder] = max(version, self._received.get(holder, 0))
        self._release()

    def restart(self, holder: Holder) -> None:
        """The holder gets the shard anew: what it had does not count."""
        self._received.pop(holder, None)

    def version_of(self, holder: Holder) -> int:
        """The newest version that the holder is known to have; 0 if none."""
        return self._received.get(holder, 0)

    @property
    def safe_version(self) -> int | None:
        """The newest version that every backup has; None where there is no backup."""
        return min((self._received.get(h, 0) for h in self._required), default=None)

    async def wait_safe(self, version: int) -> None:
        """Return once every backup in step has the version. Raises what `end` was given."""
        if self._ended is not None:
            raise self._ended
        safe = self.safe_version
        if safe is None or version <= safe:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (version, next(self._order), waiter))
        await waiter

    def end(self, error: ShoalError) -> None:
        """Nothing more becomes safe here: whoever waits, or comes to wait, gets the error."""
        self._ended = error
        waiting, self._waiting = self._waiting, []
        for _, _, waiter in waiting:
            if not waiter.done():
                waiter.set_exception(error)

    def _release(self) -> None:
        safe = self.safe_version
        while self._waiting and (safe is None or self._waiting[0][0] <= safe):
            _, _, waiter = heapq.heappop(self._waiting)
            if not waiter.done():
                waiter.set_result(None)


class ShardReplica:
    """A shard in the catalog. Lives on the event loop; its state may be used from any thread."""

    def __init__(self, job: str, state: AnyShard, role: Role, epoch: int) -> None:
        self._turn = asyncio.Lock()
        self.job = job
        self.state = state
        self.role = role
        self.epoch = epoch
        self.receipts = Receipts()
        self.disk = Receipts()
        """Up to which version this server's journal has the shard, where it keeps one."""
        self.check_disk: Callable[[], None] = _always_room
        """Raises Overloaded while the journal is too far behind to take more."""
        self.is_forming = False
        """Created, and its first backup has not got it yet: nobody may push so far."""
        self.is_handing_over = False
        self.unreplicated_bytes = 0
        self.pushed_bytes = 0
        """Data of pushes applied since this server leads it."""

    @property
    def shard_id(self) -> int:
        return self.state.shard_id

    async def in_turn(self, run: Runner, num_bytes: int, work: Callable[[], T]) -> T:
        """The result of work on the state of a shard that may be large, one after the other.

        All that takes long goes by here: so what is short never waits on the event loop, or in one
        of its few threads, for a shard's lock that is held while a gigabyte is copied.
        """
        await self._turn.acquire()
        try:
            running = asyncio.ensure_future(run(num_bytes, work))
        except BaseException:
            self._turn.release()
            raise
        if running.done():
            self._turn.release()
            return running.result()
        # A thread goes on though nobody waits for it any more: it has the turn until it ends.
        running.add_done_callback(self._end_turn)
        return await asyncio.shield(running)

    def _end_turn(self, ended: "asyncio.Future[T]") -> None:
        self._turn.release()
        if not ended.cancelled() and ended.exception() is not None:
            log.debug("shard_work_failed", job=self.job, shard_id=self.shard_id)

    def check_room(self) -> None:
        """Raise Overloaded while a backup, or the disk, is too far behind to take more."""
        self.check_disk()
        if self.unreplicated_bytes > MAX_UNREPLICATED_BYTES:
            raise Overloaded(
                f"a backup of shard {self.shard_id} is behind",
                seen=f"{self.unreplicated_bytes} bytes on their way to it",
                expected=f"at most {MAX_UNREPLICATED_BYTES}",
                fix="Retry a little later.",
            )

    def check_durable(self) -> None:
        """Raise InvalidSpec where no journal keeps the shard: nothing here becomes durable."""
        if self.disk.safe_version is None:
            raise InvalidSpec(
                f"shard {self.shard_id} of job {self.job} is on no disk",
                seen="a push that is to be acknowledged as durable",
                expected="a server that keeps a journal",
                fix="Start every `shoal ps` with --journal DIRECTORY, or push with another level.",
            )

    async def wait_acknowledged(self, version: int, level: Acknowledgement.ValueType) -> None:
        """Return once a version is as safe as the level asks for. Raises what ended the wait."""
        if level == Acknowledgement.ACKNOWLEDGEMENT_APPLIED:
            return
        await self.receipts.wait_safe(version)
        if level == Acknowledgement.ACKNOWLEDGEMENT_DURABLE:
            await self.disk.wait_safe(version)

    def end(self, why: ShoalError | None = None) -> None:
        """This server is not the shard's primary any more, or holds it no longer."""
        error = why or self.deposed()
        self.receipts.end(error)
        self.disk.end(error)

    def deposed(self) -> WrongEpoch:
        return WrongEpoch(
            f"shard {self.shard_id} of job {self.job} has another primary now",
            seen=f"epoch {self.epoch}",
            expected="a newer one",
            fix="Fetch the shard map and retry.",
        )


def _always_room() -> None:
    """Where no journal is kept."""


def work_bytes_of(record: UpdateRecord) -> int:
    """What to replay a record takes, as `Runner` counts it. Compressed data never stay on the
    event loop: to read them takes longer than to apply as many bytes."""
    return len(record.data) + (INLINE_BYTES if record.push.HasField("codec") else 0)


def num_bytes_of(record: UpdateRecord) -> int:
    """What a record takes up while it waits."""
    return len(record.data) + len(record.push.row_ids) + len(record.push.row_births)
