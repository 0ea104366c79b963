"""Writing of received values into the caller's buffers."""

from collections.abc import Mapping

from shoal_client.shards.blocks import Buffers, ShardBlocks
from shoal_proto import pieces
from shoal_proto.errors import MalformedMessage
from shoal_proto.v1.parameters_pb2 import PushReply, ShardData, ShardVersion


class Receiver:
    """Writes the values of shards as they arrive. A shard is done when its last byte is written."""

    def __init__(
        self,
        blocks: Mapping[int, ShardBlocks],
        into: Buffers,
        versions: dict[int, int],
        todo: set[int],
    ) -> None:
        self._blocks = blocks
        self._into = into
        self._versions = versions
        self._todo = todo
        self._version = ShardVersion()
        self._left_bytes = 0

    def take(self, reply: ShardData | PushReply | pieces.OnlyPiece) -> None:
        if not isinstance(reply, pieces.OnlyPiece) and reply.HasField("version"):
            self._version.CopyFrom(reply.version)
            self._left_bytes = reply.version.num_bytes
            return
        piece = reply.piece
        if piece.shard_id != self._version.shard_id or piece.shard_id not in self._blocks:
            raise MalformedMessage(
                "a piece of another shard than the one announced",
                seen=f"shard {piece.shard_id}",
                expected=f"shard {self._version.shard_id}",
            )
        self._blocks[piece.shard_id].scatter(piece, self._into)
        self._left_bytes -= len(piece.data)
        if self._left_bytes == 0:
            self._versions[piece.shard_id] = self._version.version
            self._todo.discard(piece.shard_id)
