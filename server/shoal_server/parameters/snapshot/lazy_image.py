"""A shard as of one moment, copied only when somebody needs the copy."""

import threading
from dataclasses import dataclass

from shoal_server.parameters.shard.image import Image
from shoal_server.parameters.shard.replica import ShardReplica
from shoal_server.parameters.shard.versioned import AnyShard
from shoal_server.parameters.shard.workers import Runner


@dataclass(frozen=True, order=True)
class Stamp:
    """A state of a shard."""

    shard_id: int
    epoch: int
    version: int


class LazyImage:
    """A shard as of now, copied when it is first asked for. Any thread."""

    def __init__(self, replica: ShardReplica) -> None:
        self.stamp = Stamp(replica.shard_id, replica.epoch, replica.state.version)
        self._state: AnyShard | None = replica.state
        self._replica = replica
        self._lock = threading.Lock()
        self._image: Image | None = None

    def take(self) -> Image | None:
        """The copy; None if nobody wants it any more."""
        with self._lock:
            if self._state is not None:
                self._image, self._state = self._state.image(), None
            return self._image

    async def take_in_turn(self, run: Runner) -> None:
        """Copy the shard now, without holding up the event loop or what waits on it."""
        await self._replica.in_turn(run, self._replica.state.memory_bytes, self.take)

    def drop(self) -> None:
        with self._lock:
            self._image = self._state = None
