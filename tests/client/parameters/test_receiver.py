"""Received values: each piece continues the one before it, and its data are read once."""

import pytest

from shoal_client.parameters.job_shards import Receiver
from shoal_client.shards.blocks import ShardBlocks
from shoal_proto.checksum import crc32
from shoal_proto.errors import MalformedMessage
from shoal_proto.pieces import OnlyPiece, ReadPiece
from shoal_proto.v1.parameters_pb2 import ShardData, ShardVersion
from shoal_proto.v1.shards_pb2 import Block, Shard

VALUES = bytes(range(16))
SHARD = Shard(shard_id=3, dtype="float32", blocks=[Block(parameter="w", num_elements=4)])


class CountedPiece:
    """A piece of a gRPC call: each access to its data copies them."""

    shard_id, offset_bytes, checksum = 3, 0, crc32(VALUES)

    def __init__(self) -> None:
        self.num_copies = 0

    @property
    def data(self) -> bytes:
        self.num_copies += 1
        return VALUES


class World:
    def __init__(self) -> None:
        self.values = bytearray(16)
        self.versions: dict[int, int] = {}
        self.todo = {3}
        blocks = {3: ShardBlocks(SHARD)}
        self.receiver = Receiver(blocks, {"w": memoryview(self.values)}, self.versions, self.todo)
        version = ShardVersion(shard_id=3, version=7, num_bytes=16)
        self.receiver.take(ShardData(version=version))

    def take(self, offset_bytes: int, data: bytes) -> None:
        piece = ReadPiece(3, offset_bytes, memoryview(data), crc32(data))
        self.receiver.take(OnlyPiece(piece))


def test_a_shard_is_done_with_its_last_piece() -> None:
    world = World()
    world.take(0, VALUES[:8])
    assert world.todo == {3} and not world.versions
    world.take(8, VALUES[8:])
    assert bytes(world.values) == VALUES
    assert not world.todo and world.versions == {3: 7}


@pytest.mark.parametrize("offset_bytes", [0, 12])
def test_a_piece_that_does_not_continue_the_values_is_refused(offset_bytes: int) -> None:
    """A shard whose values have a gap does not count as received."""
    world = World()
    world.take(0, VALUES[:8])
    with pytest.raises(MalformedMessage, match="does not continue"):
        world.take(offset_bytes, VALUES[8:12])
    assert world.todo == {3} and not world.versions


def test_the_data_of_a_piece_are_copied_once() -> None:
    world, piece = World(), CountedPiece()
    world.receiver.take(OnlyPiece(piece))  # type: ignore[arg-type]
    assert piece.num_copies == 1
    assert bytes(world.values) == VALUES and not world.todo
