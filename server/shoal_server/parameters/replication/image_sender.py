"""Whole shards on their way to another server, by a stream that carries nothing else.

A shard may have gigabytes. So nothing waits behind one: what is applied to other shards goes by
another stream (`replication_stream.py`). And an image that fails is sent again by itself.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import grpc
import structlog

from shoal_proto.errors import MalformedMessage, ShoalError, Unavailable
from shoal_proto.status import from_detail, from_rpc_error
from shoal_proto.v1 import replication_pb2 as pb
from shoal_server.core.shards.assignments import Holder
from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts
from shoal_server.parameters.replication import frames
from shoal_server.parameters.replication.streams import open_stream
from shoal_server.parameters.replication.watched_stream import WatchedStream
from shoal_server.parameters.shard.image import Image, UpdateRecord
from shoal_server.parameters.shard.replica import ShardReplica, num_bytes_of

log = structlog.get_logger(__name__)

MAX_ATTEMPTS = 3
"""Streams that may break with an image on them before the shard is taken for refused."""

TakeImage = Callable[[ShardReplica], Awaitable[Image]]


class CopyPhase(Enum):
    WAITING = "its image is not taken yet"
    COPYING = "its image is taken, or on its way: what is applied meanwhile is kept"
    FOLLOWING = "told of every push"


@dataclass(slots=True, eq=False)
class ShardCopy:
    """A shard that the other end is to have, from when that is decided until it is no longer."""

    replica: ShardReplica
    phase: CopyPhase = CopyPhase.WAITING
    is_over: bool = False
    """Nobody wants it at the other end any more."""
    image_version: int = 0
    num_attempts: int = 0
    kept: list[UpdateRecord] = field(default_factory=list)

    def keep(self, record: UpdateRecord) -> None:
        """Until the other end has the image."""
        self.kept.append(record)
        self.replica.unreplicated_bytes += num_bytes_of(record)

    def let_go(self) -> None:
        """Forget what was kept."""
        for record in self.kept:
            self.replica.unreplicated_bytes -= num_bytes_of(record)
        self.kept = []

    def take_kept(self) -> list[UpdateRecord]:
        """What is not in the image, to be sent now; it still counts as not replicated."""
        kept, self.kept = self.kept, []
        for record in kept:
            if record.push.version <= self.image_version:
                self.replica.unreplicated_bytes -= num_bytes_of(record)
        return [record for record in kept if record.push.version > self.image_version]


class ImageReceiver(Protocol):
    """What is done about images that have got there, or have not."""

    def arrived(self, copy: ShardCopy) -> None: ...

    def refused(self, copy: ShardCopy, error: ShoalError) -> None: ...


class ImageSender:
    """Lives on the event loop. `take` gives a shard's image without holding the loop up."""

    def __init__(
        self, me: Holder, take: TakeImage, receiver: ImageReceiver, timeouts: PeerTimeouts
    ) -> None:
        self._me = me
        self._take = take
        self._receiver = receiver
        self._timeouts = timeouts
        self._waiting: deque[ShardCopy] = deque()
        self._sent: deque[ShardCopy] = deque()
        """Begun or sent, and not answered."""
        self._wake = asyncio.Event()

    def add(self, copy: ShardCopy) -> None:
        self._waiting.append(copy)
        self._wake.set()

    def clear(self) -> None:
        """Send nothing more of what was added."""
        self._waiting.clear()
        self._sent.clear()

    async def run(self, address: str) -> None:
        """Send what is added to the server there, for ever."""
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            try:
                await self._send_all(address)
                continue
            except ShoalError as error:
                self._again(error)
            except grpc.RpcError as error:
                self._again(from_rpc_error(error, address))
            await asyncio.sleep(self._timeouts.reconnect_s / 10)

    async def _send_all(self, address: str) -> None:
        """By one stream, until nothing waits and all is answered. Raises what broke the stream."""
        async with open_stream(address) as opened:
            stream = WatchedStream(opened, address, self._timeouts)
            await stream.carry(self._write(stream), self._read(stream))
        if self._sent:
            raise Unavailable(f"{address} ended the stream", seen=f"{len(self._sent)} unanswered")

    def _again(self, error: ShoalError) -> None:
        """A stream broke: what was not answered is sent once more, from an image of then."""
        unanswered, self._sent = self._sent, deque()
        # One is looked at after the other: it broke with the first.
        for copy in list(unanswered)[:1]:
            copy.num_attempts += 1
            log.warning(
                "image_not_sent",
                job=copy.replica.job,
                shard_id=copy.replica.shard_id,
                attempt=copy.num_attempts,
                reason=str(error),
            )
        for copy in reversed(unanswered):
            copy.let_go()
            if copy.num_attempts < MAX_ATTEMPTS:
                copy.phase = CopyPhase.WAITING
                self._waiting.appendleft(copy)
            elif not copy.is_over:
                self._receiver.refused(copy, error)

    async def _write(self, stream: WatchedStream) -> None:
        await stream.greet(self._me)
        while self._waiting or self._sent:
            while self._waiting:
                copy = self._waiting.popleft()
                if not copy.is_over:
                    self._sent.append(copy)
                    await self._send(stream, copy)
            self._wake.clear()
            try:
                async with asyncio.timeout(self._timeouts.beat_s):
                    await self._wake.wait()
            except TimeoutError:
                await stream.beat()

    async def _send(self, stream: WatchedStream, copy: ShardCopy) -> None:
        copy.phase = CopyPhase.COPYING
        image = await self._taken(stream, copy)
        copy.image_version = image.version
        for frame in frames.of_image(copy.replica.job, copy.replica.epoch, image):
            await stream.send(frame)

    async def _taken(self, stream: WatchedStream, copy: ShardCopy) -> Image:
        """The shard's image; the other end hears something while it is taken."""
        taking = asyncio.ensure_future(self._take(copy.replica))
        try:
            while not (await asyncio.wait({taking}, timeout=self._timeouts.beat_s))[0]:
                await stream.beat()
            return taking.result()
        finally:
            taking.cancel()

    async def _read(self, stream: WatchedStream) -> None:
        async for reply in stream.replies():
            copy = self._answered(reply)
            self._wake.set()
            if copy.is_over:
                continue
            if reply.HasField("error"):
                copy.let_go()
                self._receiver.refused(copy, from_detail(reply.error))
            else:
                self._receiver.arrived(copy)

    def _answered(self, reply: pb.FollowReply) -> ShardCopy:
        """Which image is answered: each is, once, and in order."""
        first = self._sent[0].replica if self._sent else None
        if first is None or (first.job, first.shard_id) != (reply.job, reply.shard_id):
            raise MalformedMessage(
                "an image is answered that is not the next one",
                seen=f"shard {reply.shard_id} of job {reply.job}",
                expected=f"shard {first.shard_id} of job {first.job}" if first else "no answer",
            )
        return self._sent.popleft()
