"""A shard of a server that does not run, and the frames with which it would replicate it."""

import torch

from shoal_proto.v1.optimizer_pb2 import OptimizerSpec
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.messages import ImageChunk, ImageStart
from shoal_server.parameters.replication.wire import frames
from shoal_server.parameters.shard.dense import DensePush, new_dense_shard
from shoal_server.parameters.shard.record import UpdateRecord

JOB, EPOCH = "job", 3
PRIMARY = Holder("ps-9", "one")


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
