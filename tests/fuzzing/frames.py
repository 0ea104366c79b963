"""Frames of the bulk transport, from an admitted client and from an unknown one."""

import asyncio
import random
import struct

from fuzzing.findings import Findings, Input
from fuzzing.messages import NEAR, MessageMaker

from shoal_proto import bulk
from shoal_proto.bulk import FrameKind
from shoal_proto.v1 import parameters_pb2, replication_pb2
from shoal_proto.v1.parameters_pb2 import OpenBulkReply

ANSWER_S = 0.1
MESSAGES = {
    FrameKind.PUSH: parameters_pb2.PushRequest,
    FrameKind.PULL: parameters_pb2.PullRequest,
    FrameKind.LOOKUP: parameters_pb2.LookupRequest,
    FrameKind.MESSAGE: replication_pb2.FollowRequest,
}


class FrameFuzzer:
    def __init__(self, maker: MessageMaker, draw: random.Random) -> None:
        self._maker = maker
        self._draw = draw

    def draw_input(self) -> Input:
        parts = [self._frame() for _ in range(self._draw.choice((1, 2, 3, 8)))]
        if self._draw.random() < 0.3:
            at = self._draw.randrange(len(parts))
            parts[at] = self._maker.spoilt(parts[at])
        return Input(surface="bulk", to="key" if self._draw.random() < 0.9 else "none", parts=parts)

    def _frame(self) -> bytes:
        kind = self._draw.choice(list(FrameKind))
        if kind in MESSAGES and self._draw.random() < 0.8:
            data = self._maker.make(MESSAGES[kind].DESCRIPTOR).SerializeToString()
            return bulk.message(kind, data)
        body = self._maker.noise()
        sizes = [self._number(2**64 - 1) for _ in range(3)]
        if self._draw.random() < 0.7:
            sizes[1] = len(body)
        head = bulk.header(
            kind,
            shard_id=self._number(2**32 - 1),
            offset_bytes=sizes[0],
            num_bytes=sizes[1],
            at=sizes[2],
            checksum=self._number(2**32 - 1),
        )
        return head + body

    def _number(self, most: int) -> int:
        return min(self._draw.choice(NEAR), most)

    async def send(self, sent: Input, offer: OpenBulkReply, findings: Findings) -> None:
        """Send the input over a connection of its own, which the server may end."""
        reader, writer = await asyncio.open_unix_connection(f"\0{offer.local_name}")
        outcome = "hung up"
        try:
            if sent.to == "key":
                writer.write(bulk.message(FrameKind.HELLO, offer.key))
            writer.write(b"".join(sent.parts))
            async with asyncio.timeout(ANSWER_S):
                while await reader.read(65536):
                    pass
        except (TimeoutError, ConnectionError, struct.error):
            outcome = "open"
        finally:
            writer.close()
        findings.note(sent, outcome)
