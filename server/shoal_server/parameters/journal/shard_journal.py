"""Journaling of the shards of which this server is primary.

Updates are durable once the journal has the shard's image and later records, and the assignment
names this server's disk (`ShardAssignment.on_disk`, written by the replication core). After a
change of primary, the shard stays in this journal until the assignment names another disk.

While the disk cannot be written, durable pushes fail; later, journaling resumes with a new image of
each shard.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial

import structlog

from shoal_proto.back_off import BackOff
from shoal_proto.errors import Overloaded, ShoalError, Unavailable
from shoal_server.core.shards.shard_log import ShardLog
from shoal_server.parameters.images.image import LoadedImage
from shoal_server.parameters.images.shard_image import ShardImage
from shoal_server.parameters.journal.log import Journal
from shoal_server.parameters.journal.replay import RecoveredShard
from shoal_server.parameters.shard.record import UpdateRecord
from shoal_server.parameters.shard.replica import ShardReplica
from shoal_server.parameters.shard.versioned import AnyShard
from shoal_server.serving.tasks import SupervisedTasks

log = structlog.get_logger(__name__)

LOOK_EACH_S = 1.0
LONGEST_PAUSE_S = 8.0
"""Longest time between attempts to resume journaling."""
LONGEST_SHORTEN_PAUSE_S = 60.0
"""Longest time between attempts to replace a shard's old records: each may read the whole shard,
and a damaged one stays unreadable."""
MAX_WAITING_BYTES = 256 * 1024 * 1024
"""Bound on a shard's records that wait for its image; beyond it, pushes are refused as Overloaded.
One shard at a time has such records."""

Take = Callable[[ShardReplica], Awaitable[ShardImage]]
Make = Callable[[LoadedImage], AnyShard]
OnDisk = Callable[[ShardReplica, int], None]
OnFailure = Callable[[ShardReplica], None]
Key = tuple[str, int]


@dataclass(slots=True, eq=False)
class _JournaledShard:
    """An attempt to journal a shard."""

    replica: ShardReplica
    placement_id: str
    pauses: BackOff
    is_queued: bool = True
    """True until the shard's image is begun. The image will have all updates applied until then."""
    waiting: ShardLog[UpdateRecord] | None = None
    """Records that wait until the image is on disk. None before the image is begun, once it is on
    disk, and while journaling is interrupted."""
    why_not: ShoalError | None = None
    again_s: float = 0.0
    """Next attempt to resume, on the event loop's clock."""


class ShardJournal:
    """Journals shards. `take` makes an image of a shard, `make` a shard of an image. `on_disk` is
    called with the version up to which a shard is on disk, `on_failure` when its journaling is
    interrupted. Lives on the event loop, and writes files in `pool`."""

    def __init__(
        self,
        journal: Journal,
        pool: Executor,
        *,
        take: Take,
        make: Make,
        on_disk: OnDisk,
        on_failure: OnFailure,
    ) -> None:
        self._journal = journal
        self._pool = pool
        self._take = take
        self._make = make
        self._on_disk = on_disk
        self._on_failure = on_failure
        self._led: dict[Key, _JournaledShard] = {}
        self._for_others: set[Key] = set()
        """Shards that this disk has or may have, and that this server does not lead."""
        self._ends: dict[Key, Future[None]] = {}
        """End entries' futures, by shard."""
        self._one_image = asyncio.Lock()
        """Held from taking an image, or reading a shard to shorten its records, until the image is
        on disk: each may cost as much memory as its shard."""
        self._not_shortened: dict[Key, tuple[BackOff, float]] = {}
        """Overdue shards whose records could not be replaced: pauses, and the time of the next
        attempt on the event loop's clock."""
        self._tasks = SupervisedTasks()

    async def __aenter__(self) -> "ShardJournal":
        self._tasks.start(self._look_for_ever(), name="journal")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._tasks.close()

    # --- shards of which this server is the primary ---

    def start_journaling(self, replica: ShardReplica, placement_id: str = "") -> None:
        """Start to journal a shard that this server now leads. Updates that are applied before the
        shard's image is on disk are written after it."""
        self._start(_JournaledShard(replica, placement_id, _new_pauses()))

    def _start(self, led: _JournaledShard) -> None:
        replica = led.replica
        self._led[_key(replica)] = led
        self._for_others.discard(_key(replica))
        replica.is_journaled = True
        replica.check_disk = partial(self._check_capacity, led)
        self._tasks.start(self._begin(led))

    def _check_capacity(self, led: _JournaledShard) -> None:
        self._journal.check_capacity()
        if led.waiting is not None and led.waiting.num_bytes > MAX_WAITING_BYTES:
            raise Overloaded(
                f"the journal has no image of shard {led.replica.shard_id} yet",
                seen=f"{led.waiting.num_bytes} bytes waiting for it",
                expected=f"at most {MAX_WAITING_BYTES}",
                fix="Retry a little later; give the journal a faster disk.",
            )

    def append_update(self, replica: ShardReplica, record: UpdateRecord) -> None:
        """Append the record of an applied push. Call it for each push, in order."""
        led = self._led.get(_key(replica))
        if led is None or led.replica is not replica or led.is_queued:
            return
        if led.waiting is None:
            self._append(led, record)
        elif record.version > led.waiting.version:
            led.waiting.append(record)
        # An earlier version: the image has it.

    def end(self, replica: ShardReplica) -> None:
        """End journaling: this server no longer leads the shard."""
        key = _key(replica)
        led = self._led.get(key)
        if led is not None and led.replica is replica:
            del self._led[key]
            self._for_others.add(key)
            replica.is_journaled = False

    async def _begin(self, led: _JournaledShard) -> None:
        key = _key(led.replica)
        try:
            async with self._one_image:
                if self._led.get(key) is not led:
                    return
                led.is_queued, led.waiting = False, ShardLog(led.replica.state.version)
                version = await self._put(led, await self._take(led.replica))
        except Exception as error:
            # Any error interrupts journaling, even a lack of memory: otherwise durable pushes would
            # wait for ever.
            if not isinstance(error, ShoalError):
                log.exception("image_not_journaled", job=key[0], shard_id=key[1])
            self._interrupt(led, error if isinstance(error, ShoalError) else _no_image(error))
            return
        self._ends.pop(key, None)
        if self._led.get(key) is led:
            self._append_waiting(led, version)
        elif key not in self._led:
            self._for_others.add(key)

    def _append_waiting(self, led: _JournaledShard, version: int) -> None:
        if self._led.get(_key(led.replica)) is not led or led.waiting is None:
            return
        led.pauses = _new_pauses()
        led.replica.why_no_disk = None
        self._on_disk(led.replica, version)
        waiting, led.waiting = led.waiting, None
        for record in waiting.records_after(version):
            self._append(led, record)

    def _interrupt(self, led: _JournaledShard, error: ShoalError) -> None:
        replica = led.replica
        if self._led.get(_key(replica)) is not led or led.why_not is not None:
            return
        log.warning(
            "shard_not_journaled", job=replica.job, shard_id=replica.shard_id, reason=str(error)
        )
        led.why_not, led.waiting = error, None
        led.again_s = asyncio.get_running_loop().time() + led.pauses.pause_s()
        replica.why_no_disk = error
        self._on_failure(replica)

    def _resume(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for led in tuple(self._led.values()):
            if led.why_not is not None and now_s >= led.again_s:
                # A new object: results of the earlier attempt must not affect it.
                self._start(_JournaledShard(led.replica, led.placement_id, led.pauses))

    def _append(self, led: _JournaledShard, record: UpdateRecord) -> None:
        """Append a record, unless an earlier one was refused: none may follow a gap."""
        if led.why_not is not None:
            return
        replica, loop = led.replica, asyncio.get_running_loop()
        done = self._journal.append(replica.job, replica.shard_id, replica.epoch, record)

        def on_disk(result: "Future[None]") -> None:
            loop.call_soon_threadsafe(self._note, led, record.push.version, result)

        refused = done.exception() if done.done() else None
        if isinstance(refused, ShoalError):
            # Interrupt at once: the disk may work again by the next record.
            self._interrupt(led, refused)
            return
        done.add_done_callback(on_disk)

    async def _put(self, led: _JournaledShard, image: ShardImage) -> int:
        replica = led.replica
        ends = self._ended(_key(replica))

        def put() -> int:
            with image:
                if ends is not None:
                    # Without the end entry before it, the image would seem older than records of an
                    # earlier placement with higher versions.
                    ends.result()
                # The epoch of the image: the replica may have entered a later one since.
                self._journal.put_image(
                    replica.job, image.stamp.epoch, image, placement_id=led.placement_id
                )
                return image.version

        return await asyncio.get_running_loop().run_in_executor(self._pool, put)

    def _ended(self, key: Key) -> "Future[None] | None":
        ends = self._ends.get(key)
        if ends is not None and ends.done() and ends.exception() is not None:
            ends = self._ends[key] = self._journal.forget(*key)
        return ends

    def _note(self, led: _JournaledShard, version: int, result: "Future[None]") -> None:
        # Ignore results of an interrupted or earlier attempt.
        if self._led.get(_key(led.replica)) is not led or led.why_not is not None:
            return
        error = result.exception()
        if error is None:
            self._on_disk(led.replica, version)
        elif isinstance(error, ShoalError):
            self._interrupt(led, error)

    async def _look_for_ever(self) -> None:
        """Write new images, at intervals, of shards whose old records fill the disk or whose
        journaling was interrupted."""
        while True:
            await asyncio.sleep(LOOK_EACH_S)
            if self._journal.failure is None:
                self._resume()
            await self._shorten_overdue()

    async def _shorten_overdue(self) -> None:
        overdue, loop = self._journal.overdue(), asyncio.get_running_loop()
        failed, self._not_shortened = self._not_shortened, {}
        for key in overdue:
            pauses, again_s = failed.get(key) or (
                BackOff(LOOK_EACH_S, LONGEST_SHORTEN_PAUSE_S),
                0.0,
            )
            if loop.time() >= again_s:
                try:
                    await self._shorten(key)
                    continue
                except ShoalError as error:
                    log.warning(
                        "journal_not_shortened", job=key[0], shard_id=key[1], reason=str(error)
                    )
                except Exception:
                    # The journal is unchanged; without this task it would fill the disk without a
                    # message.
                    log.exception("journal_not_shortened", job=key[0], shard_id=key[1])
                again_s = loop.time() + pauses.pause_s()
            self._not_shortened[key] = pauses, again_s

    async def _shorten(self, key: Key) -> None:
        if key in self._for_others:
            await self._shorten_kept(key)
            return
        led = self._led.get(key)
        if led is None or led.is_queued or led.waiting is not None:
            return
        async with self._one_image:
            image = await self._take(led.replica)
            if self._led.get(key) is not led:
                image.close()
                return
            await self._put(led, image)
        if key not in self._led:
            # The shard was forgotten while its image was written, and the image brings it back. It
            # must be forgotten once more.
            self._for_others.add(key)

    async def _shorten_kept(self, key: Key) -> None:
        """Write an image in place of the records of a shard that another server leads: the shard
        may have to stay on this disk as long as its primary has no working journal."""
        async with self._one_image:
            if key not in self._for_others:
                return
            # As of now: the shard may be forgotten, and journaled anew, before the image is on
            # disk.
            number = self._journal.next_number
            recovered = await self._read(*key)
            if recovered is not None:
                put = partial(self._put_recovered, recovered, number)
                await asyncio.get_running_loop().run_in_executor(self._pool, put)

    def _put_recovered(self, recovered: RecoveredShard[AnyShard], number: int) -> None:
        job, epoch = recovered.job, recovered.epoch
        with recovered.state.image(epoch=epoch) as image:
            self._journal.put_image(
                job, epoch, image, placement_id=recovered.placement_id, number=number
            )

    # --- shards with another primary ---

    @property
    def all_keys(self) -> Collection[Key]:
        """Shards that this disk has, or will have."""
        return {*self._led, *self._for_others}

    @property
    def failure(self) -> ShoalError | None:
        return self._journal.failure

    @property
    def keeps_for_others(self) -> bool:
        """True if this disk may have the only durable copy of a shard led elsewhere."""
        return bool(self._for_others)

    def keeps(self, job: str, shard_id: int) -> bool:
        """True if this disk may have the shard, which this server does not lead."""
        return (job, shard_id) in self._for_others

    def keep(self, keys: Iterable[Key]) -> None:
        """Note shards that this server's previous process left in the journal."""
        self._for_others.update(keys)

    async def read(self, job: str, shard_id: int) -> RecoveredShard[AnyShard] | None:
        """Read a shard that this server does not serve; None if the journal lacks it, or cannot be
        read."""
        try:
            return await self._read(job, shard_id)
        except (ShoalError, OSError) as error:
            log.error("journal_not_read", job=job, shard_id=shard_id, reason=str(error))
            return None

    async def _read(self, job: str, shard_id: int) -> RecoveredShard[AnyShard] | None:
        read = partial(self._journal.read, job, shard_id, self._make)
        return await asyncio.get_running_loop().run_in_executor(self._pool, read)

    def release_job(self, job: str, but: Collection[int]) -> None:
        """Forget the job's shards that this server does not lead, except those in `but`."""
        for key in [k for k in self._for_others if k[0] == job and k[1] not in but]:
            self._for_others.discard(key)
            self._ends[key] = self._journal.forget(*key)


def _no_image(error: Exception) -> Unavailable:
    return Unavailable(
        "the journal has no image of the shard",
        seen=repr(error),
        expected="memory and a disk to make one",
        fix="The server tries again within seconds. Until then, push with a level below durable.",
    )


def _new_pauses() -> BackOff:
    return BackOff(LOOK_EACH_S, LONGEST_PAUSE_S)


def _key(replica: ShardReplica) -> Key:
    return replica.job, replica.shard_id
