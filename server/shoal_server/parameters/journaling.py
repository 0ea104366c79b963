"""The shards that this server leads, in its journal from the first moment on."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial

import structlog

from shoal_proto.errors import ShoalError, Unavailable
from shoal_server.core.holdings import Holder
from shoal_server.parameters.held import Held
from shoal_server.parameters.image import Image, Record
from shoal_server.parameters.journal import Journal

log = structlog.get_logger(__name__)

DISK = Holder("disk", "")
"""Stands for the disk among those who have received a version."""
LOOK_EACH_S = 1.0

Take = Callable[[Held], Awaitable[Image]]


class Journaling:
    """Lives on the event loop; files are written in `pool`. `take` gives a shard's image."""

    def __init__(self, journal: Journal, pool: Executor, take: Take) -> None:
        self._journal = journal
        self._pool = pool
        self._take = take
        self._held: dict[tuple[str, int], Held] = {}
        self._kept: dict[tuple[str, int], list[Record]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Journaling":
        self._looking = asyncio.create_task(self._look_for_ever(), name="journal")
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = [*self._tasks, *filter(None, [self._looking])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check_room(self) -> None:
        """Raise Overloaded while the disk is behind. One that failed is no reason to take no
        pushes: only those that wait for it are told."""
        with suppress(Unavailable):
            self._journal.check_room()

    def lead(self, held: Held) -> None:
        """Keep a shard from here on. What is applied before its image is on disk is kept back, and
        follows it."""
        key = held.job, held.shard_id
        self._held[key] = held
        self._kept[key] = []
        held.disk.require([DISK])
        held.check_disk = self._check_room
        task = asyncio.create_task(self._begin(held))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _begin(self, held: Held) -> None:
        key = held.job, held.shard_id
        try:
            image = await self._take(held)
            await self._put(held, image)
        except ShoalError as error:
            log.error("shard_not_journaled", job=held.job, shard_id=held.shard_id, why=str(error))
            held.disk.end(error)
            if self._held.get(key) is held:
                del self._held[key], self._kept[key]
            return
        if self._held.get(key) is not held:
            return
        held.disk.received(DISK, image.version)
        for record in self._kept.pop(key):
            if record.push.version > image.version:
                self._append(held, record)

    async def _put(self, held: Held, image: Image) -> None:
        put = partial(self._journal.put_image, held.job, held.epoch, image)
        await asyncio.get_running_loop().run_in_executor(self._pool, put)

    def tell(self, held: Held, record: Record) -> None:
        """A push was applied. To be called for each, in order."""
        key = held.job, held.shard_id
        if self._held.get(key) is not held:
            return
        if key in self._kept:
            self._kept[key].append(record)
        else:
            self._append(held, record)

    def _append(self, held: Held, record: Record) -> None:
        loop = asyncio.get_running_loop()
        done = self._journal.append(held.job, held.shard_id, held.epoch, record)

        def on_disk(result: "Future[None]") -> None:
            loop.call_soon_threadsafe(_note, held, record.push.version, result)

        done.add_done_callback(on_disk)

    def end(self, held: Held) -> None:
        """The shard is not led here any more."""
        key = held.job, held.shard_id
        if self._held.get(key) is held:
            del self._held[key]
            self._kept.pop(key, None)
            self._journal.forget(*key)

    async def _look_for_ever(self) -> None:
        """Put new images of shards whose old records fill the disk."""
        while True:
            await asyncio.sleep(LOOK_EACH_S)
            for key in self._journal.overdue():
                held = self._held.get(key)
                if held is None or key in self._kept:
                    continue
                try:
                    await self._put(held, await self._take(held))
                except Unavailable as error:
                    log.error("journal_not_shortened", job=key[0], why=str(error))


def _note(held: Held, version: int, result: "Future[None]") -> None:
    error = result.exception()
    if error is None:
        held.disk.received(DISK, version)
    elif isinstance(error, ShoalError):
        held.disk.end(error)


__all__ = ["DISK", "Journaling"]
