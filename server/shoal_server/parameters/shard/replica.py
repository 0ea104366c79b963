"""One shard as this server holds it: its state, this server's part in it, who has what of it."""

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Protocol, TypeVar

import structlog

from shoal_proto.errors import InternalError, InvalidSpec, Overloaded, ShoalError, WrongEpoch
from shoal_proto.pieces import Buffer
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_proto.v1.replication_pb2 import PushRecord
from shoal_server.parameters.shard import workers
from shoal_server.parameters.shard.image import UpdateRecord
from shoal_server.parameters.shard.versioned import AnyShard
from shoal_server.parameters.shard.workers import INLINE_BYTES, Runner

log = structlog.get_logger(__name__)

T = TypeVar("T")
AnswerT = TypeVar("AnswerT")

MAX_UNREPLICATED_BYTES = 256 * 1024 * 1024
"""Of one shard's pushes that a backup has not received yet; beyond it, pushes are refused."""


class ShardLeadership(Protocol):
    """What goes with a shard that this server leads. Lives on the event loop."""

    def tell_applied(self) -> None:
        """Pass on at once what was applied; from another thread, nothing: it is passed on soon."""
        ...

    def is_acknowledged(self, version: int, level: Acknowledgement.ValueType) -> bool:
        """Whether a version is as safe as that already."""
        ...

    async def wait_acknowledged(self, version: int, level: Acknowledgement.ValueType) -> None:
        """Return once it is. Raises what makes it impossible."""
        ...

    def once_acknowledged(
        self, version: int, level: Acknowledgement.ValueType, answer: AnswerT
    ) -> "asyncio.Future[AnswerT | ShoalError]":
        """`answer` once it is, or what makes it impossible: without a task that waits for it."""
        ...

    def check_lease(self) -> None:
        """Raise Unavailable while this server may have been taken for dead."""
        ...


class NotLed:
    """Of a shard that this server does not lead."""

    def tell_applied(self) -> None:
        """Nobody is told."""

    def is_acknowledged(self, version: int, level: Acknowledgement.ValueType) -> bool:
        return False

    async def wait_acknowledged(self, version: int, level: Acknowledgement.ValueType) -> None:
        raise self._error(version, level)

    def once_acknowledged(
        self, version: int, level: Acknowledgement.ValueType, answer: AnswerT
    ) -> "asyncio.Future[AnswerT | ShoalError]":
        never: asyncio.Future[AnswerT | ShoalError] = asyncio.get_running_loop().create_future()
        never.set_result(self._error(version, level))
        return never

    def _error(self, version: int, level: Acknowledgement.ValueType) -> ShoalError:
        return InternalError(
            "a push of a shard that is not led here", seen=f"version {version}, to be {level}"
        )

    def check_lease(self) -> None:
        """What was let in before is refused by its epoch."""


class RecordLog(Protocol):
    """What was applied and a backup may still have to be told of."""

    num_bytes: int

    def append(self, record: UpdateRecord) -> None: ...

    def trim(self, version: int) -> None: ...

    def skip(self, version: int) -> None: ...

    def get(self, version: int) -> UpdateRecord | None: ...

    def lies_at(self, version: int, data: Buffer) -> None: ...

    def give_back(self, version: int, data: Buffer) -> None: ...

    def owned(self, version: int) -> UpdateRecord | None: ...


class ReplicaRole(Enum):
    PRIMARY = "primary"
    BACKUP = "backup"


class ShardReplica:
    """A shard in the catalog. Lives on the event loop; its state may be used from any thread."""

    def __init__(self, job: str, state: AnyShard, role: ReplicaRole, epoch: int) -> None:
        self._turn = asyncio.Lock()
        self._num_queued = 0
        self.job = job
        self.state = state
        self.role = role
        self.epoch = epoch
        self.leading: ShardLeadership = NotLed()
        """From when this server leads the shard first."""
        self.log: RecordLog | None = None
        """What was applied and a backup may still have to be told of, while it is led here."""
        self.check_disk: Callable[[], None] = _always
        """Raises Overloaded while the journal is too far behind to take more."""
        self.is_journaled = False
        """Whether this server's journal keeps the shard, or is to."""
        self.why_no_disk: ShoalError | None = None
        """Why it does not for now."""
        self.is_forming = False
        """Created, and its first backup has not got it yet: nobody may push so far."""
        self.is_handing_over = False
        self.pushed_bytes = 0
        """Data of pushes applied since this server leads it."""

    @property
    def shard_id(self) -> int:
        return self.state.shard_id

    def work(self, run: Runner, num_bytes: int, work: Callable[[], T]) -> Awaitable[T]:
        """The result of work on the state, which goes through so many bytes.

        Done at once if it is small and nobody is at work on the shard or waits to be: so nothing
        on the event loop ever waits for a shard's lock. Else in a thread, one after the other.
        """
        if self._enters(num_bytes):
            try:
                return run(num_bytes, work)
            finally:
                self.state.leave()
                self.leading.tell_applied()
        num_bytes = max(num_bytes, workers.INLINE_BYTES + 1)
        self._num_queued += 1
        queued = asyncio.ensure_future(self.in_turn(run, num_bytes, work))
        queued.add_done_callback(self._dequeue)
        return queued

    def work_now(self, num_bytes: int, work: Callable[[], None]) -> bool:
        """Do such work at once if `work` would; whether it is done."""
        if not self._enters(num_bytes):
            return False
        try:
            work()
        finally:
            self.state.leave()
        return True

    def _enters(self, num_bytes: int) -> bool:
        """Whether work is small, and nobody is at work or waits to be: then `leave` is to follow
        it."""
        is_quiet = not self._num_queued and not self._turn.locked()
        return num_bytes <= workers.INLINE_BYTES and is_quiet and self.state.try_enter()

    def _dequeue(self, queued: "asyncio.Future[T]") -> None:
        self._num_queued -= 1

    async def in_turn(self, run: Runner, num_bytes: int, work: Callable[[], T]) -> T:
        """The result of work on the state of a shard that may be large, one after the other.

        All that takes long goes by here, so that it waits in none of the few threads for a shard's
        lock.
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

    @property
    def is_led(self) -> bool:
        """Whether this server leads it. Once it does not, what is led here by its name is another
        one, of a later run maybe, and the epochs of two runs can be the same."""
        return self.log is not None

    @property
    def unreplicated_bytes(self) -> int:
        """Of pushes that some backup has not received yet."""
        return 0 if self.log is None else self.log.num_bytes

    def check_room(self) -> None:
        """Raise Overloaded while a backup, or the disk, is too far behind to take more; Unavailable
        while nothing would be acknowledged."""
        self.leading.check_lease()
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
        if not self.is_journaled:
            raise self.on_no_disk()

    def on_no_disk(self) -> InvalidSpec:
        """The error for a push that is to be durable where nothing becomes so."""
        return InvalidSpec(
            f"shard {self.shard_id} of job {self.job} is on no disk",
            seen="a push that is to be acknowledged as durable",
            expected="a server that keeps a journal",
            fix="Start every `shoal ps` with --journal DIRECTORY, or push with another level.",
        )

    async def wait_safe(self, version: int) -> None:
        """Return once every backup in step has the version: from then on it does not vanish."""
        await self.leading.wait_acknowledged(version, Acknowledgement.ACKNOWLEDGEMENT_REPLICATED)

    def deposed(self) -> WrongEpoch:
        return WrongEpoch(
            f"shard {self.shard_id} of job {self.job} has another primary now",
            seen=f"epoch {self.epoch}",
            expected="a newer one",
            fix="Fetch the shard map and retry.",
        )


def _always() -> None:
    """Where there is nothing to check."""


def work_bytes_of(push: PushRecord, num_bytes: int) -> int:
    """What to replay a record with so many bytes takes, as `Runner` counts it. Compressed data
    never stay on the event loop: to read them takes longer than to apply as many bytes."""
    return num_bytes + (INLINE_BYTES if push.HasField("codec") else 0)


def num_bytes_of(record: UpdateRecord) -> int:
    """What a record takes up while it waits."""
    return len(record.data) + len(record.push.row_ids) + len(record.push.row_births)
