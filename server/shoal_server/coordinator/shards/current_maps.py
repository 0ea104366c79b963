"""Current shard maps, read once for all concurrent callers."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from shoal_proto.v1.shards_pb2 import ShardMap
from shoal_server.etcd.api import Keyspace
from shoal_server.etcd.records import shard_map

MAX_JOBS = 16


@dataclass(slots=True)
class _Read:
    """The newest reading of one job."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    begun: int = 0
    done: int = 0
    """Number of the newest reading that was completed."""
    layout: ShardMap | None = None


class CurrentMaps:
    """Reader of current shard maps, on the event loop. A call gets no map that was read before it.

    A map of thousands of shards takes a while to read, and all workers of a large job ask at once,
    when they start and when servers fail. Calls that arrive during a reading share the next one.
    """

    def __init__(self, store: Keyspace) -> None:
        self._store = store
        self._layouts = shard_map.ShardMapReader(store)
        self._reads: OrderedDict[str, _Read] = OrderedDict()

    async def read(self, job: str) -> ShardMap | None:
        """The layout with each shard's primary; None if there is none. It is shared: do not change
        it. Raises what `ShardMapReader.read` and `shard_map.fill` raise."""
        read = self._reads.setdefault(job, _Read())
        self._reads.move_to_end(job)
        begun_before = read.begun
        async with read.lock:
            if read.done <= begun_before:
                read.begun += 1
                layout = await self._layouts.read(job)
                read.layout = layout and await shard_map.fill(self._store, layout)
                read.done = read.begun
            current = read.layout
        self._forget_oldest()
        return current

    def _forget_oldest(self) -> None:
        for job in [name for name, read in self._reads.items() if not read.lock.locked()]:
            if len(self._reads) <= MAX_JOBS:
                return
            del self._reads[job]
