"""Shards that are built from chunks as the chunks arrive."""

import asyncio
from dataclasses import dataclass, field
from functools import partial

import structlog

from shoal_proto.errors import InternalError, Overloaded, ShoalError
from shoal_proto.v1 import replication_pb2 as pb
from shoal_server.core.replication.protocol.effects import AdoptImage, DropImage
from shoal_server.core.replication.protocol.events import ChunkStored, ImageFailed, ImageRestored
from shoal_server.core.replication.protocol.messages import ImageChunk, ImageStart, Key
from shoal_server.parameters.replication.core_driver import CoreDriver
from shoal_server.parameters.replication.throttle import LARGE, run_throttled
from shoal_server.parameters.replication.wire.frames import ArrivedRequest
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica
from shoal_server.parameters.shard.versioned import AnyShard
from shoal_server.parameters.shard.workers import Runner
from shoal_server.parameters.tables.builder import ShardBuilder, bytes_to_build
from shoal_server.serving.tasks import SupervisedTasks

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _IncomingImage:
    key: Key
    image: int
    header: pb.CutHeader
    chunks: "asyncio.Queue[ArrivedRequest]" = field(default_factory=asyncio.Queue)
    state: AnyShard | None = None
    is_adopted: bool = False
    task: "asyncio.Task[None] | None" = None


class IncomingImages:
    """Builds shards from images, one image of a shard at a time."""

    def __init__(
        self, driver: CoreDriver, *, catalog: Catalog, memory: Memory, run: Runner
    ) -> None:
        self._driver = driver
        self._catalog = catalog
        self._memory = memory
        self.run = run
        self._coming: dict[Key, _IncomingImage] = {}
        self._tasks = SupervisedTasks()

    async def close(self) -> None:
        await self._tasks.close()

    def is_receiving(self, key: Key, image: int) -> bool:
        coming = self._coming.get(key)
        return coming is not None and coming.image == image

    def begin_image(self, start: ImageStart, arrived: ArrivedRequest) -> None:
        assert arrived.header is not None
        coming = self._coming[start.key] = _IncomingImage(start.key, start.image, arrived.header)
        coming.task = self._tasks.start(self._receive(coming))

    def store_chunk(self, chunk: ImageChunk, arrived: ArrivedRequest) -> None:
        coming = self._coming.get(chunk.key)
        if coming is not None and coming.image == chunk.image:
            coming.chunks.put_nowait(arrived)

    def drop_image(self, effect: DropImage) -> None:
        coming = self._coming.get(effect.key)
        if coming is not None and coming.image == effect.image:
            del self._coming[effect.key]
            if coming.task is not None:
                coming.task.cancel()

    async def _receive(self, coming: _IncomingImage) -> None:
        try:
            await self._build(coming)
        except ShoalError as error:
            self._failed(coming, str(error), is_full=isinstance(error, Overloaded))
        except Exception as error:
            # Bad data from another process concern this image alone.
            log.exception("image_failed", job=coming.key[0], shard_id=coming.key[1])
            self._failed(coming, repr(error), is_full=False)

    def _failed(self, coming: _IncomingImage, detail: str, *, is_full: bool) -> None:
        if self._coming.get(coming.key) is coming:
            del self._coming[coming.key]
            self._driver.submit_event(ImageFailed(coming.key, coming.image, is_full, detail))

    async def _build(self, coming: _IncomingImage) -> None:
        job, shard_id = coming.key
        before = self._catalog.find(job, shard_id)
        more_bytes = bytes_to_build(coming.header)
        more_bytes -= before.state.memory_bytes if before is not None else 0
        what = f"a copy of shard {shard_id} of job {job}"
        with self._memory.reserve(more_bytes, what) as claim:
            builder = await self.run(LARGE, partial(ShardBuilder, coming.header))
            while not builder.is_complete:
                arrived = await coming.chunks.get()
                index = builder.next_chunk
                await run_throttled(self.run, partial(_add, builder, arrived))
                if not builder.is_complete:
                    self._driver.submit_event(ChunkStored(coming.key, coming.image, index))
            coming.state = await self.run(LARGE, builder.finish)
            self._driver.submit_event(ImageRestored(coming.key, coming.image))
            if coming.is_adopted:
                claim.move_to_shard(more_bytes)

    def take(self, effect: AdoptImage) -> ShardReplica:
        """Remove a complete image, and return a backup with its shard. Raises InternalError if the
        image is incomplete."""
        coming = self._coming.pop(effect.key)
        if coming.state is None:
            raise InternalError("an incomplete image is to be adopted", seen=str(effect))
        coming.is_adopted = True
        return ShardReplica(effect.key[0], coming.state, ReplicaRole.BACKUP, effect.epoch)


def _add(builder: ShardBuilder, arrived: ArrivedRequest) -> None:
    parts = arrived.parts
    builder.add(parts[0] if len(parts) == 1 else b"".join(parts))
