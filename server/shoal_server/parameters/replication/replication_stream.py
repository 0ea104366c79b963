"""The stream from this server to one that keeps copies of its shards."""

import asyncio
from collections import deque
from typing import Protocol

import grpc
import structlog

from shoal_proto.errors import MalformedMessage, ShoalError
from shoal_proto.status import from_detail, from_rpc_error
from shoal_server.core.shards.assignments import Holder
from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts
from shoal_server.parameters.replication import frames
from shoal_server.parameters.replication.image_sender import (
    CopyPhase,
    ImageSender,
    ShardCopy,
    TakeImage,
)
from shoal_server.parameters.replication.streams import open_stream
from shoal_server.parameters.replication.watched_stream import WatchedStream
from shoal_server.parameters.shard.image import UpdateRecord
from shoal_server.parameters.shard.replica import ShardReplica, num_bytes_of
from shoal_server.serving.tasks import cancel

log = structlog.get_logger(__name__)

REFUSAL_S = 0.2
"""A machine that is up refuses at once."""


class StreamOwner(Protocol):
    """What a replication stream asks of its owner."""

    async def address(self, holder: Holder) -> str | None:
        """Where the holder is reached; None if that process is gone."""
        ...

    def caught_up(self, stream: "ReplicationStream", replica: ShardReplica) -> None:
        """The other end has the shard, and is told of every push from here on."""
        ...

    def refused(
        self, stream: "ReplicationStream", replica: ShardReplica, error: ShoalError
    ) -> None:
        """The other end does not take the shard."""
        ...

    def lost(self, stream: "ReplicationStream", reason: str) -> None:
        """The other end is gone, or silent; the stream is over."""
        ...


class ReplicationStream:
    """Lives on the event loop. `take` gives a shard's image without holding the loop up.

    Images go by a stream of their own (`image_sender.py`); a shard's pushes follow once its image
    has got there. This stream, when it breaks, is opened again for a while, and then
    everything is sent anew: what the old one lost, nobody knows.
    """

    def __init__(
        self, me: Holder, to: Holder, peers: StreamOwner, take: TakeImage, timeouts: PeerTimeouts
    ) -> None:
        self.me = me
        self.to = to
        self._peers = peers
        self._timeouts = timeouts
        self._copies: dict[tuple[str, int], ShardCopy] = {}
        self._images = ImageSender(me, take, self, timeouts)
        self._records: deque[tuple[ShardCopy, UpdateRecord]] = deque()
        self._told: deque[ShardCopy] = deque()
        """Of which a record was sent that is not answered yet: one for each record."""
        self._wake = asyncio.Event()
        self._heard_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"replicate-to-{self.to.server_id}")

    async def close(self) -> None:
        if self._task is not None:
            await cancel(self._task)
        self.end()

    @property
    def shards(self) -> list[ShardReplica]:
        """Those that the other end has, or is getting."""
        return [copy.replica for copy in self._copies.values()]

    def follows(self, replica: ShardReplica) -> bool:
        copy = self._copies.get((replica.job, replica.shard_id))
        return copy is not None and copy.replica is replica

    def is_sending(self, replica: ShardReplica) -> bool:
        """Whether the shard's image is on its way, or arrived."""
        copy = self._copies.get((replica.job, replica.shard_id))
        return copy is not None and copy.replica is replica and copy.phase is not CopyPhase.WAITING

    def follow(self, replica: ShardReplica) -> None:
        """Send the shard, then every push that is applied to it."""
        self.unfollow(replica.job, replica.shard_id)
        replica.receipts.restart(self.to)
        copy = self._copies[replica.job, replica.shard_id] = ShardCopy(replica)
        self._images.add(copy)

    def unfollow(self, job: str, shard_id: int) -> None:
        copy = self._copies.pop((job, shard_id), None)
        if copy is not None:
            copy.is_over = True
            copy.let_go()

    def tell(self, replica: ShardReplica, record: UpdateRecord) -> None:
        """A push was applied. To be called for each, in order."""
        copy = self._copies.get((replica.job, replica.shard_id))
        # What is applied before the image is taken is in the image, also if news of it comes later.
        if copy is None or copy.replica is not replica or copy.phase is CopyPhase.WAITING:
            return
        if copy.phase is CopyPhase.COPYING:
            copy.keep(record)
        elif record.push.version > copy.image_version:
            replica.unreplicated_bytes += num_bytes_of(record)
            self._records.append((copy, record))
            self._wake.set()

    def end(self) -> list[ShardReplica]:
        """Follow nothing any more; what was followed."""
        shards = self.shards
        for copy, record in self._records:
            copy.replica.unreplicated_bytes -= num_bytes_of(record)
        self._records.clear()
        self._told.clear()
        self._images.clear()
        for replica in shards:
            self.unfollow(replica.job, replica.shard_id)
        return shards

    # What becomes of images.

    def arrived(self, copy: ShardCopy) -> None:
        """The other end has the shard as of its image: what came since follows."""
        copy.phase = CopyPhase.FOLLOWING
        self._records.extend((copy, record) for record in copy.take_kept())
        self._wake.set()
        copy.replica.receipts.received(self.to, copy.image_version)
        self._peers.caught_up(self, copy.replica)

    def refused(self, copy: ShardCopy, error: ShoalError) -> None:
        """The other end does not take the shard, or its pushes."""
        self.unfollow(copy.replica.job, copy.replica.shard_id)
        self._peers.refused(self, copy.replica, error)

    # The stream.

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        give_up_s: float | None = None
        while True:
            address = await self._peers.address(self.to)
            if address is None:
                self._peers.lost(self, "its process is gone")
                return
            opened_s = loop.time()
            reason = await self._stream(address)
            log.warning("replication_stream_broke", to=self.to.server_id, reason=reason)
            if give_up_s is None or self._heard_s > opened_s:
                give_up_s = loop.time() + self._timeouts.reconnect_s
            if loop.time() >= give_up_s or await _refuses(address):
                self._peers.lost(self, reason)
                return
            for replica in self.end():
                self.follow(replica)
            await asyncio.sleep(self._timeouts.reconnect_s / 10)

    async def _stream(self, address: str) -> str:
        """Carry everything until it breaks; why it did."""
        try:
            async with open_stream(address) as opened:
                stream = WatchedStream(opened, address, self._timeouts)
                try:
                    images = self._images.run(address)
                    await stream.carry(self._write(stream), self._read(stream), images)
                finally:
                    self._heard_s = max(self._heard_s, stream.heard_s)
        except ShoalError as error:
            return str(error)
        except grpc.RpcError as error:
            return str(from_rpc_error(error, address))
        return f"{address} ended the stream"

    async def _write(self, stream: WatchedStream) -> None:
        await stream.greet(self.me)
        while True:
            while self._records:
                await self._send(stream, *self._records.popleft())
            self._wake.clear()
            try:
                async with asyncio.timeout(self._timeouts.beat_s):
                    await self._wake.wait()
            except TimeoutError:
                await stream.beat()

    async def _send(self, stream: WatchedStream, copy: ShardCopy, record: UpdateRecord) -> None:
        replica = copy.replica
        replica.unreplicated_bytes -= num_bytes_of(record)
        if not copy.is_over:
            self._told.append(copy)
            for frame in frames.of_record(replica.job, replica.shard_id, replica.epoch, record):
                await stream.send(frame)

    async def _read(self, stream: WatchedStream) -> None:
        async for reply in stream.replies():
            # Each record is answered, once, and in order: a shard may have been let go of since,
            # and have begun anew.
            if not self._told:
                raise MalformedMessage("a record is answered that was not sent", seen=str(reply))
            copy = self._told.popleft()
            if copy.is_over:
                continue
            if reply.HasField("error"):
                self.refused(copy, from_detail(reply.error))
            else:
                copy.replica.receipts.received(self.to, reply.version)


async def _refuses(address: str) -> bool:
    """Whether that machine says that nobody listens there: then the process is gone, and to wait
    for it would hold up every push that it is to receive."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(REFUSAL_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
