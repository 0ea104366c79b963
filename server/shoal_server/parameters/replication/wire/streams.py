"""The stream to another server: a bulk connection if possible, else a gRPC call."""

import asyncio
import mmap
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from shoal_proto import bulk
from shoal_proto.bulk import FrameKind
from shoal_proto.bulk_opening import connect_to_offer, present_key
from shoal_proto.errors import MalformedMessage, ShoalError, Unavailable
from shoal_proto.status import from_detail
from shoal_proto.tls.channels import open_aio_channel
from shoal_proto.tls.names import SERVER_NAME
from shoal_proto.tls.sockets import secured
from shoal_proto.v1.identity_pb2 import ErrorDetail
from shoal_proto.v1.parameters_pb2 import OpenBulkReply
from shoal_proto.v1.replication_pb2 import FollowReply, FollowRequest, OpenFollowRequest
from shoal_proto.v1.replication_pb2_grpc import ReplicationStub
from shoal_server.parameters.bulk.arena_slots import NUM_SLOTS, SLOT_BYTES, ArenaSlots
from shoal_server.parameters.bulk.wire import FrameConnection, PeerHungUp
from shoal_server.parameters.replication.wire import frames
from shoal_server.parameters.replication.wire.frames import Frame, Piece
from shoal_server.serving.rpc import PEER_OPTIONS

log = structlog.get_logger(__name__)

OPEN_S = 2.0
INLINE_BYTES = 4 * 1024
"""Bound on a record's data within its message if there is shared memory."""


Keep = Callable[[memoryview], Callable[[], None]]
"""Called with the memory of a written record's data. Returns the function to call before that
memory is reused."""


class PeerStream(Protocol):
    """A stream to another server; messages of one task arrive in order. `write` and `replies` raise
    the error that broke the stream: a ShoalError, grpc.RpcError, or an error of grpcio for a call
    that is over."""

    inline_bytes: int
    """Bound on a record's data within its message."""

    async def write(self, frame: Frame) -> None: ...

    def draft(self, data: memoryview) -> memoryview | None:
        """Copy the data of a record that may be written next to shared memory. Return the copy,
        valid until the next draft; None if that is not possible now."""
        ...

    def write_now(self, *of_record: Frame, keep: Keep) -> bool:
        """Write a whole record without waiting. False if that is not possible. `keep` is called for
        data in shared memory."""
        ...

    def replies(self) -> AsyncIterator[FollowReply]:
        """Yield the replies that the function given to `deliver` did not take."""
        ...

    def deliver(self, take: Callable[[FollowReply], None]) -> None:
        """Pass replies to `take` while `replies` is waiting, if possible without a turn of the
        event loop. `replies` raises the errors of `take`."""
        ...

    @property
    def is_in_memory(self) -> bool:
        """True if the other process can read all written data even if this process dies now."""
        ...


@asynccontextmanager
async def open_stream(address: str) -> AsyncIterator[PeerStream]:
    """Open a stream to a server during the block. Raises grpc.RpcError or Unavailable."""
    async with open_aio_channel(address, SERVER_NAME, PEER_OPTIONS) as channel:
        stream = await _connect(channel, address)
        if stream is not None:
            with closing(stream):
                yield stream
            return
        call: _Call = ReplicationStub(channel).Follow()
        try:
            yield GrpcStream(call)
        finally:
            call.cancel()


_Call = grpc.aio.StreamStreamCall[Any, Any]


class GrpcStream:
    inline_bytes = frames.INLINE_BYTES

    def __init__(self, call: _Call) -> None:
        self._call = call

    async def write(self, frame: Frame) -> None:
        await self._call.write(frames.as_message(frame))

    def draft(self, data: memoryview) -> memoryview | None:
        return None

    def write_now(self, *of_record: Frame, keep: Keep) -> bool:
        return False

    async def replies(self) -> AsyncIterator[FollowReply]:
        async for reply in self._call:
            yield reply

    def deliver(self, take: Callable[[FollowReply], None]) -> None:
        """Do nothing: all replies come from `replies`."""

    @property
    def is_in_memory(self) -> bool:
        return False


class BulkStream:
    def __init__(self, wire: FrameConnection, address: str, slots: ArenaSlots | None) -> None:
        self._wire = wire
        self._address = address
        self._slots = slots
        self.inline_bytes = INLINE_BYTES if slots is not None else frames.INLINE_BYTES

    async def begin(self) -> None:
        await self._send(bulk.header(FrameKind.FOLLOW))

    def close(self) -> None:
        self._wire.socket.close()

    async def write(self, frame: Frame) -> None:
        if isinstance(frame, Piece) and self._slots is not None:
            at = await self._slots.fill(frame.data)
            await self._send(_placed(frame, at))
        elif isinstance(frame, Piece):
            head = bulk.header(
                FrameKind.PIECE,
                offset_bytes=frame.offset_bytes,
                num_bytes=len(frame.data),
                checksum=frame.checksum,
            )
            await self._send(head, frame.data)
        else:
            await self._send(bulk.message(FrameKind.MESSAGE, frame.SerializeToString()))

    def draft(self, data: memoryview) -> memoryview | None:
        slots = self._slots
        if slots is None or not self.inline_bytes < len(data) <= frames.PIECE_BYTES:
            return None
        return slots.draft(data) if self._wire.is_idle else None

    def write_now(self, *of_record: Frame, keep: Keep) -> bool:
        start, *rest = of_record
        if len(rest) > 1 or not isinstance(start, FollowRequest):
            return False
        message = bulk.message(FrameKind.MESSAGE, start.SerializeToString())
        if not rest:
            return self._wire.send_now(message)
        slots, piece = self._slots, rest[0]
        if slots is None or not isinstance(piece, Piece) or not self._wire.is_idle:
            return False
        at = slots.fill_now(piece.data)
        if at is None:
            return False
        if self._wire.send_now(message + _placed(piece, at)):
            slots.lend(at, len(piece.data), keep)
            return True
        slots.free(at)
        return False

    async def _send(self, *parts: bytes | memoryview) -> None:
        try:
            await self._wire.send(*parts)
        except PeerHungUp as error:
            raise self._broken(error) from error

    async def replies(self) -> AsyncIterator[FollowReply]:
        while True:
            try:
                frame = await self._wire.next_frame()
            except PeerHungUp as error:
                raise self._broken(error) from error
            if frame.kind is FrameKind.MESSAGE:
                yield self._reply(frame)
            elif frame.kind is FrameKind.ERROR:
                raise self._error(frame)
            elif frame.kind is FrameKind.FREE_SLOT and self._slots is not None:
                self._slots.free(frame.at)
            elif frame.kind is FrameKind.END:
                return

    def deliver(self, take: Callable[[FollowReply], None]) -> None:
        def taken(frame: bulk.Frame) -> bool:
            if frame.kind is FrameKind.MESSAGE:
                take(self._reply(frame))
            elif frame.kind is FrameKind.FREE_SLOT and self._slots is not None:
                self._slots.free(frame.at)
            else:
                return False
            return True

        self._wire.deliver(taken)

    @property
    def is_in_memory(self) -> bool:
        return self._wire.is_local and self._wire.is_idle

    def _reply(self, frame: bulk.Frame) -> FollowReply:
        try:
            return FollowReply.FromString(bytes(frame.body))
        except DecodeError as error:
            raise self._unreadable(error) from error

    def _error(self, frame: bulk.Frame) -> ShoalError:
        try:
            return from_detail(ErrorDetail.FromString(bytes(frame.body)))
        except DecodeError as error:
            return self._unreadable(error)

    def _unreadable(self, error: DecodeError) -> MalformedMessage:
        return MalformedMessage(f"a reply of {self._address} does not parse", seen=repr(error))

    def _broken(self, error: PeerHungUp) -> ShoalError:
        return Unavailable(
            f"the bulk connection to {self._address} broke",
            seen=str(error),
            expected="an open stream",
        )


def _placed(piece: Piece, at: int) -> bytes:
    return bulk.header(
        FrameKind.PLACED,
        offset_bytes=piece.offset_bytes,
        num_bytes=len(piece.data),
        at=at,
    )


async def _connect(channel: grpc.aio.Channel, address: str) -> "BulkStream | None":
    """Return a new bulk stream; None if only gRPC is possible."""
    offer: OpenBulkReply = await ReplicationStub(channel).OpenBulk(
        OpenFollowRequest(), timeout=OPEN_S
    )
    if not offer.port:
        return None
    opening = asyncio.get_running_loop().run_in_executor(None, _open, offer, address)
    try:
        opened = await asyncio.shield(opening)
    except asyncio.CancelledError:
        # The thread continues: close the connection that it opens.
        opening.add_done_callback(_discard)
        raise
    except (OSError, ShoalError) as error:
        log.info("bulk_connection_failed", address=address, reason=repr(error))
        return None
    connected, mapped = opened
    slots = ArenaSlots(mapped) if mapped is not None else None
    stream = BulkStream(FrameConnection(connected), address, slots)
    try:
        await stream.begin()
    except BaseException:
        connected.close()
        raise
    return stream


def _open(offer: OpenBulkReply, address: str) -> tuple[socket.socket, mmap.mmap | None]:
    connected = secured(connect_to_offer(offer, address))
    try:
        mapped = present_key(connected, offer.key, NUM_SLOTS * SLOT_BYTES)
        connected.setblocking(False)
    except BaseException:
        connected.close()
        raise
    return connected, mapped


def _discard(opening: "asyncio.Future[tuple[socket.socket, mmap.mmap | None]]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[0].close()
