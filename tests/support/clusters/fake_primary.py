"""A shard of a server that does not run, the frames with which it would replicate it, and the
server that they reach."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import torch
from support.clusters.assignment_records import write_assignments
from support.clusters.memory_store import MemoryStore

from shoal_proto.v1.optimizer_pb2 import OptimizerSpec
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.messages import ImageChunk, ImageStart
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment
from shoal_server.parameters.process import RunningServer
from shoal_server.parameters.replication.wire import frames
from shoal_server.parameters.shard.dense import DensePush, new_dense_shard
from shoal_server.parameters.shard.record import UpdateRecord
from shoal_server.parameters.shard.replica import ShardReplica

JOB, EPOCH = "job", 3
PRIMARY = Holder("ps-9", "one")
ANSWER_S = 30.0


class FakePrimary:
    """The primary of shard 0 of JOB, in EPOCH."""

    def __init__(self, num_elements: int, optimizer: OptimizerSpec) -> None:
        self._num_elements = num_elements
        block = Block(parameter="p", num_elements=num_elements)
        spec = Shard(
            shard_id=0, server_id=PRIMARY.server_id, epoch=EPOCH, dtype="float32", blocks=[block]
        )
        self.shard = new_dense_shard(spec, optimizer, bytearray(4 * num_elements))
        self._records: list[UpdateRecord] = []
        self.shard.subscribe(self._records.append)
        self._image = 0

    def push(self) -> UpdateRecord:
        """Apply a push, and return its record; the gradients of push n are n."""
        sequence = len(self._records) + 1
        gradient = torch.full((self._num_elements,), float(sequence)).numpy().tobytes()
        push = DensePush(
            session="s",
            sequence=sequence,
            epoch=EPOCH,
            base_version=sequence,
            lr=None,
            blocks=[0],
            gradient=gradient,
        )
        self.shard.push(push, lambda session: True)
        return self._records[-1]

    def frames_of(self, record: UpdateRecord, epoch: int = EPOCH) -> list[frames.Frame]:
        return list(frames.of_record(JOB, 0, epoch, record))

    def image(self, epoch: int = EPOCH, job: str = JOB, begin: int = 0) -> list[frames.Frame]:
        """Return the frames of a new image, or those from chunk `begin` on of the last one."""
        self._image += not begin
        with self.shard.image() as image:
            key, number = (job, 0), self._image
            start = ImageStart(key, epoch, 1, number, image.version, image.num_chunks, begin)
            parts: list[frames.Frame] = [frames.of_image_start(start, image.header)]
            for index in range(begin, image.num_chunks):
                parts += frames.of_chunk(ImageChunk(key, number, index), bytes(image.chunk(index)))
        return parts


@dataclass(kw_only=True)
class Backup:
    """A server that is to hold a copy of the fake primary's shard."""

    server: RunningServer
    store: MemoryStore

    @property
    def me(self) -> Holder:
        return self.server.replicas.me

    @property
    def version(self) -> int:
        """Version of the server's copy; 0 without one."""
        replica = self.server.catalog.find(JOB, 0)
        return 0 if replica is None else replica.state.version

    def copy(self) -> ShardReplica:
        replica = self.server.catalog.find(JOB, 0)
        assert replica is not None
        return replica

    def record(self) -> ShardAssignment:
        found = self.server.replicas.assignment(JOB, 0)
        assert found is not None
        return found

    async def write(self, assignment: ShardAssignment) -> None:
        """Write the record, and make the server read it."""
        record = JobAssignments(job=JOB, copies=2, shards=(assignment,))
        await write_assignments(self.store, record)
        await self.server.replicas.refresh(JOB)

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(ANSWER_S):
            while not is_so():  # noqa: ASYNC110 - the state of a server, which sends no event
                await asyncio.sleep(0.01)
