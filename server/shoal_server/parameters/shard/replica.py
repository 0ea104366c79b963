"""A replica: one server's copy of a shard, with its role."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Protocol, TypeVar

import structlog

from shoal_proto.errors import InternalError, InvalidSpec, Overloaded, ShoalError, WrongEpoch
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_proto.v1.replication_pb2 import PushRecord
from shoal_server.core.processes import Holder
from shoal_server.parameters.images.shard_image import ShardImage
from shoal_server.parameters.shard import workers
from shoal_server.parameters.shard.versioned import AnyShard
from shoal_server.parameters.shard.workers import INLINE_BYTES, Runner

log = structlog.get_logger(__name__)

T = TypeVar("T")
AnswerT = TypeVar("AnswerT")

MAX_UNREPLICATED_BYTES = 256 * 1024 * 1024
"""Bound on one shard's pushes that a backup has not received yet."""


class ShardLeadership(Protocol):
    """Acknowledgement and replication of a shard by its primary. Lives on the event loop."""

    def report_applied(self) -> None:
        """Pass applied pushes on to backups at once. Does nothing outside the event loop's
        thread."""
        ...

    async def wait_acknowledged(self, version: int, level: Acknowledgement.ValueType) -> None:
        """Return once a version is safe to that level.

        Raises WrongEpoch (another primary), Unavailable (this server may have been declared dead),
        or for a durable push the error of the disk, or InvalidSpec without a journal.
        """
        ...

    def when_acknowledged(
        self, version: int, level: Acknowledgement.ValueType, answer: AnswerT
    ) -> "asyncio.Future[AnswerT | ShoalError]":
        """Return a future of `answer`, or of the error that `wait_acknowledged` would raise."""
        ...

    def check_lease(self) -> None:
        """Raise Unavailable while this server may have been declared dead."""
        ...


class NoLeadership:
    """The `ShardLeadership` of a replica that has not been primary."""

    def report_applied(self) -> None:
        """Do nothing: there are no backups."""

    async def wait_acknowledged(self, version: int, level: Acknowledgement.ValueType) -> None:
        raise self._error(version, level)

    def when_acknowledged(
        self, version: int, level: Acknowledgement.ValueType, answer: AnswerT
    ) -> "asyncio.Future[AnswerT | ShoalError]":
        never: asyncio.Future[AnswerT | ShoalError] = asyncio.get_running_loop().create_future()
        never.set_result(self._error(version, level))
        return never

    def _error(self, version: int, level: Acknowledgement.ValueType) -> ShoalError:
        return InternalError(
            "a push to a replica that is not the primary", seen=f"version {version}, to be {level}"
        )

    def check_lease(self) -> None:
        """Do nothing: pushes admitted earlier are refused by their epoch."""


class ReplicaRole(Enum):
    PRIMARY = "primary"
    BACKUP = "backup"


class ShardReplica:
    """A shard in the catalog. Lives on the event loop; the state may be used from any thread."""

    def __init__(self, job: str, state: AnyShard, role: ReplicaRole, epoch: int) -> None:
        self._turn = asyncio.Lock()
        self._num_queued = 0
        self.job = job
        self.state = state
        self.role = role
        self.epoch = epoch
        self.leading: ShardLeadership = NoLeadership()
        self.is_led = False
        """True while this replica is the primary. Another run of the job may have the same shard id
        and epoch."""
        self.is_followed = False
        """True if any server has, or is getting, a copy from this replica."""
        self.links: Sequence[tuple[Holder, int]] = ()
        self.unreplicated_bytes = 0
        self.check_disk: Callable[[], None] = _check_nothing
        self.is_journaled = False
        """True if this server's journal has the shard, or will have it."""
        self.why_no_disk: ShoalError | None = None
        self.is_forming = False
        """True until the core opens the shard to calls: for a new shard, once its first backup has
        a copy."""
        self.is_handing_over = False
        self.pushed_bytes = 0

    @property
    def shard_id(self) -> int:
        return self.state.shard_id

    def image(self) -> ShardImage:
        """Return an image of the shard as of now."""
        return self.state.image(epoch=self.epoch)

    def work(self, run: Runner, num_bytes: int, work: Callable[[], T]) -> Awaitable[T]:
        """Call `work`, which touches `num_bytes` of the state, and return a future of its result.

        Small work runs at once if no other work on the shard is running or queued; this call raises
        its errors. Other work runs in threads, in order.
        """
        if self._enters(num_bytes):
            try:
                return run(num_bytes, work)
            finally:
                self.state.leave()
                self.leading.report_applied()
        num_bytes = max(num_bytes, workers.INLINE_BYTES + 1)
        self._num_queued += 1
        queued = asyncio.ensure_future(self.run_in_order(run, num_bytes, work))
        queued.add_done_callback(self._dequeue)
        return queued

    def work_now(self, num_bytes: int, work: Callable[[], None]) -> bool:
        """Call `work` if the method `work` would run it at once; return True if it ran."""
        if not self._enters(num_bytes):
            return False
        try:
            work()
        finally:
            self.state.leave()
        return True

    def _enters(self, num_bytes: int) -> bool:
        is_quiet = not self._num_queued and not self._turn.locked()
        return num_bytes <= workers.INLINE_BYTES and is_quiet and self.state.try_enter()

    def _dequeue(self, queued: "asyncio.Future[T]") -> None:
        self._num_queued -= 1

    async def run_in_order(self, run: Runner, num_bytes: int, work: Callable[[], T]) -> T:
        """Call `work` after all earlier work on the shard. Waits on the event loop, to block no
        thread."""
        await self._turn.acquire()
        try:
            running = asyncio.ensure_future(run(num_bytes, work))
        except BaseException:
            self._turn.release()
            raise
        if running.done():
            self._turn.release()
            return running.result()
        # If this call is cancelled, the work continues and keeps its turn.
        running.add_done_callback(self._end_turn)
        return await asyncio.shield(running)

    def _end_turn(self, ended: "asyncio.Future[T]") -> None:
        self._turn.release()
        if not ended.cancelled() and ended.exception() is not None:
            log.debug("shard_work_failed", job=self.job, shard_id=self.shard_id)

    def check_capacity(self) -> None:
        """Raise Overloaded while a backup or the disk is too slow; Unavailable while this server
        may have been declared dead."""
        self.leading.check_lease()
        self.check_disk()
        if self.unreplicated_bytes > MAX_UNREPLICATED_BYTES:
            raise Overloaded(
                f"a backup of shard {self.shard_id} is too slow",
                seen=f"{self.unreplicated_bytes} bytes on their way to it",
                expected=f"at most {MAX_UNREPLICATED_BYTES}",
                fix="Retry a little later.",
            )

    def check_durable(self) -> None:
        """Raise InvalidSpec if no journal keeps the shard."""
        if not self.is_journaled:
            raise self.no_journal_error()

    def no_journal_error(self) -> InvalidSpec:
        """Return the error for a durable push without a journal."""
        return InvalidSpec(
            f"shard {self.shard_id} of job {self.job} is on no disk",
            seen="a push that is to be acknowledged as durable",
            expected="a server that keeps a journal",
            fix="Start every `shoal ps` with --journal DIRECTORY, or push with another level.",
        )

    async def wait_safe(self, version: int) -> None:
        """Return once every backup in step has the version. Raises what `wait_acknowledged`
        raises."""
        await self.leading.wait_acknowledged(version, Acknowledgement.ACKNOWLEDGEMENT_REPLICATED)

    def deposed_error(self) -> WrongEpoch:
        return WrongEpoch(
            f"shard {self.shard_id} of job {self.job} has another primary now",
            seen=f"epoch {self.epoch}",
            expected="a newer one",
            fix="Fetch the shard map and retry.",
        )


def _check_nothing() -> None:
    """Raise nothing: no journal limits the pushes."""


def work_bytes_of(push: PushRecord, num_bytes: int) -> int:
    """Return the cost of a record for a `Runner`. Compressed data are never decoded on the event
    loop."""
    return num_bytes + (INLINE_BYTES if push.HasField("codec") else 0)
