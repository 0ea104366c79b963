"""A link from this server to a server with backups of its shards.

One stream carries pushes, and a second one images, so that no push waits for gigabytes.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from typing import Protocol
from weakref import ReferenceType, ref

import grpc
import structlog
import torch

from shoal_proto.addresses import split_address
from shoal_proto.errors import InternalError, RetryError, ShoalError
from shoal_proto.pieces import Buffer
from shoal_proto.status import from_rpc_error
from shoal_proto.v1 import replication_pb2 as pb
from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.events import (
    LinkBroken,
    LinkOpened,
    RecordDelivered,
    ReplyReceived,
)
from shoal_server.core.replication.protocol.messages import (
    CopyUpToDate,
    ImageChunk,
    ImageStart,
    Offer,
    Request,
    UpdateMessage,
)
from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts
from shoal_server.parameters.replication.outgoing_record import OutgoingRecord
from shoal_server.parameters.replication.wire import frames, replies
from shoal_server.parameters.replication.wire.streams import open_stream
from shoal_server.parameters.replication.wire.watched_stream import WatchedStream
from shoal_server.serving.tasks import cancel

log = structlog.get_logger(__name__)

REFUSAL_S = 0.2
"""Time within which a running machine refuses a connection to a port without a listener."""


class LinkOwner(Protocol):
    async def find_address(self, holder: Holder) -> str | None:
        """The address of `holder`; None if etcd does not list it. Raises RetryError if etcd must be
        asked and cannot be reached."""
        ...

    def header(self, image: int) -> pb.CutHeader | None:
        """Header of an image; None if it is closed."""
        ...

    def chunk(self, request: ImageChunk) -> Awaitable[Buffer]:
        """Data of a chunk. Raises InternalError if the image is closed."""
        ...

    def submit_event(
        self, event: LinkOpened | LinkBroken | RecordDelivered | ReplyReceived
    ) -> None: ...


_Push = tuple[UpdateMessage, "ReferenceType[OutgoingRecord]"]
"""A record to send. The reference is dead once no backup needs the record."""


class PeerLink:
    def __init__(
        self, me: Holder, to: Holder, number: int, owner: LinkOwner, timeouts: PeerTimeouts
    ) -> None:
        self._me = me
        self._to = to
        self._number = number
        self._owner = owner
        self._timeouts = timeouts
        self._pushes: deque[_Push | Request | pb.FollowRequest] = deque()
        self._images: deque[Request] = deque()
        self._wake = asyncio.Event()
        self._wake_images = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._idle: WatchedStream | None = None
        """The stream for pushes while it is open and idle."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"link-to-{self._to.server_id}")

    async def close(self) -> None:
        if self._task is not None:
            await cancel(self._task)

    def send(self, request: Request) -> None:
        """Send a request over one of the streams. Requests on one stream arrive in order, or the
        link breaks."""
        if isinstance(request, ImageStart | ImageChunk):
            self._images.append(request)
            self._wake_images.set()
        else:
            self._pushes.append(request)
            self._wake.set()

    def send_record(self, request: Request, outgoing: OutgoingRecord) -> None:
        assert isinstance(request, UpdateMessage)
        if not self._send_now(request, outgoing):
            self._pushes.append((request, ref(outgoing)))
            self._wake.set()

    def _send_now(self, request: UpdateMessage, outgoing: OutgoingRecord) -> bool:
        """Send a push without a turn of the event loop, as its sender waits; True if it was
        sent."""
        stream = self._idle
        if stream is None or self._pushes:
            return False
        record = outgoing.get()
        # A push of rows does not count as received: the follower may refuse it for lack of memory.
        is_received = stream.is_received and not record.push.row_ids
        of_record = frames.of_record(
            *request.key,
            request.epoch,
            record,
            stream.inline_bytes,
            answer_may_wait=is_received,
        )
        if not stream.send_now(*of_record, keep=outgoing.set_lent_data):
            return False
        if is_received and stream.is_received:
            key, epoch, version = request.key, request.epoch, request.version
            self._owner.submit_event(RecordDelivered(self._to, self._number, key, epoch, version))
        return True

    def draft(self, data: memoryview) -> memoryview | None:
        """Copy the data of a push that may be sent next to memory shared with the other end; None
        if that is impossible now. The copy is valid until the next draft."""
        return self._idle.draft(data) if self._idle is not None and not self._pushes else None

    def compare(self, digest: pb.FollowRequest) -> None:
        """Send a digest, after all earlier requests on the stream for pushes."""
        self._pushes.append(digest)
        self._wake.set()

    async def _run(self) -> None:
        """Run until the link breaks, and report that to the core. Without the report no other link
        would be opened, and pushes would wait for ever."""
        try:
            broke = await self._carried()
        except Exception:
            log.exception("replication_link_failed", to=self._to.server_id)
            broke = LinkBroken(self._to, self._number, is_gone=False)
        self._owner.submit_event(broke)

    async def _carried(self) -> LinkBroken:
        try:
            address = await self._owner.find_address(self._to)
        except RetryError as error:
            log.warning("server_not_looked_up", server=self._to.server_id, reason=str(error))
            return LinkBroken(self._to, self._number, is_gone=False)
        if address is None:
            return LinkBroken(self._to, self._number, is_gone=True)
        has_replied, reason = False, f"{address} ended the stream"
        try:
            async with open_stream(address) as opened:
                stream = WatchedStream(opened, address, self._timeouts)
                try:
                    await stream.send_hello(self._hello(for_images=False))
                    self._owner.submit_event(LinkOpened(self._to, self._number))
                    stream.deliver(self._replied)
                    images = self._carry_images(address)
                    await stream.run_tasks(self._write(stream), self._read(stream), images)
                finally:
                    has_replied = stream.replied_s > 0.0
        except ShoalError as error:
            reason = str(error)
        except grpc.RpcError as error:
            reason = str(from_rpc_error(error, address))
        log.warning("replication_link_broke", to=self._to.server_id, reason=reason)
        is_gone = await _refuses(address)
        return LinkBroken(self._to, self._number, is_gone=is_gone, has_replied=has_replied)

    def _hello(self, *, for_images: bool) -> pb.Hello:
        return pb.Hello(
            primary=pb.Holder(server_id=self._me.server_id, incarnation=self._me.incarnation),
            link=self._number,
            for_images=for_images,
            torch_version=torch.__version__,
        )

    async def _write(self, stream: WatchedStream) -> None:
        while True:
            while self._pushes:
                for frame in self._frames(self._pushes.popleft(), stream.inline_bytes):
                    await stream.send(frame)
            self._wake.clear()
            self._idle = stream
            try:
                await self._await_or_beat(self._wake, stream)
            finally:
                self._idle = None

    def _frames(
        self, request: _Push | Request | pb.FollowRequest, inline_bytes: int
    ) -> Iterator[frames.Frame]:
        if isinstance(request, pb.FollowRequest):
            yield request
        elif isinstance(request, Offer):
            yield frames.of_offer(request)
        elif isinstance(request, CopyUpToDate):
            yield frames.of_continue(request)
        elif isinstance(request, tuple):
            update, outgoing = request[0], request[1]()
            if outgoing is not None:
                # The send may have to wait. Meanwhile another follower may free the memory of the
                # data.
                record = outgoing.owned()
                yield from frames.of_record(*update.key, update.epoch, record, inline_bytes)

    async def _await_or_beat(self, wake: asyncio.Event, stream: WatchedStream) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeouts.beat_s):
                await wake.wait()
                return
        await stream.send_beat()

    async def _read(self, stream: WatchedStream) -> None:
        async for message in stream.replies():
            self._replied(message)

    def _replied(self, message: pb.FollowReply) -> None:
        self._owner.submit_event(ReplyReceived(self._to, self._number, replies.decode(message)))

    # --- images ---

    async def _carry_images(self, address: str) -> None:
        """Send images over a second stream, which is opened for the first image. Raises the error
        that broke the stream."""
        await self._wake_images.wait()
        async with open_stream(address) as opened:
            stream = WatchedStream(opened, address, self._timeouts)
            await stream.send_hello(self._hello(for_images=True))
            await stream.run_tasks(self._write_images(stream), _drain(stream))

    async def _write_images(self, stream: WatchedStream) -> None:
        while True:
            while self._images:
                await self._send_image(stream, self._images.popleft())
            self._wake_images.clear()
            await self._await_or_beat(self._wake_images, stream)

    async def _send_image(self, stream: WatchedStream, request: Request) -> None:
        if isinstance(request, ImageStart):
            header = self._owner.header(request.image)
            if header is not None:
                await stream.send(frames.of_image_start(request, header))
        elif isinstance(request, ImageChunk):
            try:
                data = await self._owner.chunk(request)
            except InternalError as error:
                log.info("chunk_not_sent", job=request.key[0], reason=str(error))
                return
            for frame in frames.of_chunk(request, data):
                await stream.send(frame)


async def _drain(stream: WatchedStream) -> None:
    """Read the stream for images, on which only heartbeats are answered."""
    async for message in stream.replies():
        log.error("answer_on_wrong_stream", seen=str(message))


async def _refuses(address: str) -> bool:
    """True if the machine refuses the connection. The process is then dead, and waiting for it
    would only delay pushes."""
    try:
        async with asyncio.timeout(REFUSAL_S):
            _, writer = await asyncio.open_connection(*split_address(address))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
