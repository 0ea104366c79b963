"""The server's end of a bulk connection, which answers one client's calls, one after the other."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog
from google.protobuf.message import DecodeError, Message

from shoal_proto import CHUNK_BYTES, bulk
from shoal_proto.bulk import BEAT_S, Frame, FrameKind
from shoal_proto.errors import MalformedMessage, ShoalError
from shoal_proto.pieces import OnlyPiece, ReadPiece
from shoal_proto.segments.digests import num_chunks
from shoal_proto.segments.sealed import Segment, SegmentWriter
from shoal_proto.status import to_detail
from shoal_proto.tls.bulk_offers import PermittedUse, Purpose
from shoal_proto.v1.parameters_pb2 import LookupRequest, PullRequest, PushRequest
from shoal_proto.v1.replication_pb2 import FollowReply, FollowRequest
from shoal_proto.v1.weights_pb2 import FetchSegmentRequest, PutSegmentRequest
from shoal_server.parameters.bulk.arena import SharedArena, in_frames, writer_into
from shoal_server.parameters.bulk.arena_slots import SLOT_BYTES
from shoal_server.parameters.bulk.deferred_frames import DeferredFrames
from shoal_server.parameters.bulk.wire import FrameConnection, PeerHungUp
from shoal_server.parameters.replication.replication_servicer import ReplicationServicer
from shoal_server.parameters.replication.wire.frames import Arriving
from shoal_server.parameters.service.parameters_servicer import ParametersServicer
from shoal_server.parameters.shard.reply_writer import CopyOut
from shoal_server.parameters.weights.servicer import WeightsServicer
from shoal_server.serving.access.checks import check_request
from shoal_server.serving.message_bounds import MessageBounds
from shoal_server.serving.rpc import refusal_of
from shoal_server.serving.tasks import cancel

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BulkServices:
    """The services that answer the calls of a connection."""

    parameters: ParametersServicer
    replication: ReplicationServicer
    weights: WeightsServicer


_CALLS: Mapping[Purpose, Sequence[FrameKind]] = {
    Purpose.CALLS: (FrameKind.PUSH, FrameKind.PULL, FrameKind.LOOKUP),
    Purpose.REPLICATION: (FrameKind.FOLLOW,),
    Purpose.SEGMENTS: (FrameKind.SEGMENT_PUT, FrameKind.SEGMENT_FETCH),
}


def _unreadable(frame: Frame, error: DecodeError, expected: str) -> MalformedMessage:
    return MalformedMessage(
        f"a message of a bulk connection, {frame.kind.name}, does not parse",
        seen=f"{frame.num_bytes} bytes ({error})",
        expected=expected,
    )


M = TypeVar("M", bound=Message)
_BOUNDS = MessageBounds()


def _checked(message: M) -> M:
    _BOUNDS.check(message)
    return message


def _frame(reply: Message | bytes) -> bytes:
    if isinstance(reply, bytes):
        return reply
    return bulk.message(FrameKind.MESSAGE, reply.SerializeToString())


async def _one_by_one(
    replies: AsyncGenerator[Message, None],
) -> AsyncGenerator[Sequence[Message | bytes], None]:
    async with aclosing(replies):
        async for reply in replies:
            yield [reply]


def _exactly(buffer: memoryview, num_bytes: int) -> memoryview:
    if num_bytes != len(buffer):
        raise MalformedMessage(
            "a chunk of a segment has the wrong size",
            seen=f"{num_bytes} bytes",
            expected=f"{len(buffer)}",
        )
    return buffer


class BulkServerConnection:
    """Serves one client's connection. Lives on the event loop."""

    def __init__(
        self,
        wire: FrameConnection,
        calls: BulkServices,
        arena: SharedArena | None,
        use: PermittedUse,
    ) -> None:
        """`use`: what the connection's key permits."""
        self._wire = wire
        self._calls = calls
        self._arena = arena
        self._use = use
        self._caller = use.caller
        self._is_in_call = False

    async def serve(self) -> None:
        """Answer calls until the client hangs up or a call fails."""
        answering = asyncio.create_task(self._answer_calls(), name="bulk-answers")
        beating = asyncio.create_task(self._beat(), name="bulk-beats")
        waits = {answering, beating}
        if self._use.purpose is Purpose.REPLICATION:
            # Records that were sent count as received: read them even when their sender is gone.
            waits.remove(beating)
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            await cancel(answering, beating)

    async def _answer_calls(self) -> None:
        try:
            while True:
                await self._answer(await self._wire.next_frame())
        except PeerHungUp as hung_up:
            log.debug("bulk_connection_ended", reason=str(hung_up))
        except ShoalError as error:
            log.warning("bulk_connection_ended", kind=type(error).__name__, reason=str(error))
            await self._fail(error)

    async def _answer(self, opening: Frame) -> None:
        call = BulkCall(self._wire, self._arena)
        self._is_in_call, is_ended = True, False
        try:
            async with aclosing(self._replies(opening, call)) as replies:
                async for batch in replies:
                    is_ended = call.ends_now
                    end = (bulk.header(FrameKind.END),) if is_ended else ()
                    await self._wire.send(*map(_frame, batch), *end)
            if is_ended:
                return
            await call.finish()
            await self._wire.send(bulk.header(FrameKind.END))
        except PeerHungUp:
            raise
        except Exception as error:
            await self._fail(refusal_of(f"bulk {opening.kind.name}", error))
            raise PeerHungUp("the call failed") from error
        finally:
            self._is_in_call = False
            call.close()

    def _replies(
        self, opening: Frame, call: "BulkCall"
    ) -> AsyncGenerator[Sequence[Message | bytes], None]:
        try:
            if opening.kind not in _CALLS[self._use.purpose]:
                raise MalformedMessage(
                    "a frame that begins no call of this connection",
                    seen=opening.kind.name,
                    expected=" or ".join(kind.name for kind in _CALLS[self._use.purpose]),
                )
            if self._use.purpose is Purpose.SEGMENTS:
                return self._segment_replies(opening, call)
            if opening.kind is FrameKind.PUSH:
                push = self._checked(PushRequest.FromString(bytes(opening.body)))
                return self._calls.parameters.push(push, call.pieces(), call)
            if opening.kind is FrameKind.PULL:
                return self._calls.parameters.pull(
                    self._checked(PullRequest.FromString(bytes(opening.body))), call
                )
            if opening.kind is FrameKind.LOOKUP:
                lookup = self._checked(LookupRequest.FromString(bytes(opening.body)))
                return self._calls.parameters.look_up(lookup, call.pieces(), call)
        except DecodeError as error:
            raise _unreadable(opening, error, f"the request of a {opening.kind.name}") from error
        assert opening.kind is FrameKind.FOLLOW
        return _one_by_one(self._calls.replication.follow(call.follow_requests(), call))

    def _segment_replies(
        self, opening: Frame, call: "BulkCall"
    ) -> AsyncGenerator[Sequence[Message | bytes], None]:
        if opening.kind is FrameKind.SEGMENT_PUT:
            put = self._checked(PutSegmentRequest.FromString(bytes(opening.body)))
            return self._calls.weights.put(put, self._use, call)
        fetch = self._checked(FetchSegmentRequest.FromString(bytes(opening.body)))
        return self._calls.weights.fetch(fetch, self._use, call)

    def _checked(self, request: M) -> M:
        _checked(request)
        if self._caller is not None:
            check_request(self._caller, request)
        return request

    async def _fail(self, error: ShoalError) -> None:
        """Send the error to the client. Nothing may be sent after it."""
        try:
            await self._wire.send(
                bulk.message(FrameKind.ERROR, to_detail(error).SerializeToString())
            )
        except PeerHungUp as hung_up:
            log.info("bulk_error_not_sent", error=str(error), reason=str(hung_up))

    async def _beat(self) -> None:
        """Send heartbeats during a call; return when the client has hung up. Between a call's last
        frame and its last answer, only a failed send shows that."""
        while True:
            await asyncio.sleep(BEAT_S)
            if self._is_in_call and self._wire.silent_s >= BEAT_S:
                try:
                    await self._wire.send(bulk.header(FrameKind.BEAT))
                except PeerHungUp as hung_up:
                    log.debug("bulk_connection_ended", reason=str(hung_up))
                    return


class BulkCall:
    """The frames of one call: a `DirectStream` for replication, a `SegmentTransport` for
    segments."""

    def __init__(self, wire: FrameConnection, arena: SharedArena | None) -> None:
        self._wire = wire
        self._arena = arena
        self._reply_slots: dict[int, tuple[memoryview, int]] = {}
        self._is_over = False
        self._end_follows = False
        num_slots = arena.num_bytes // SLOT_BYTES if arena is not None else 0
        # Freed together, so that the sender can go on with the other half.
        self._deferred = DeferredFrames(wire, max(num_slots // 2, 1))

    async def pieces(self) -> AsyncIterator[ReadPiece]:
        """Yield the pieces of the call, until its end."""
        while (piece := await self._next_piece()) is not None:
            yield piece

    async def follow_requests(self) -> AsyncIterator[Arriving]:
        """Yield another server's requests that `deliver` does not take."""
        while True:
            frame = await self._wire.next_frame()
            arriving = self._arriving(frame)
            if arriving is None:
                self._note(frame)
                if self._is_over:
                    return
                continue
            yield arriving
            self._free_slot(frame)

    def deliver(self, take: Callable[[Arriving], bool] | None) -> None:
        """Offer each request to `take` as soon as it is read; `take` returns True if it handled
        it."""

        def given(frame: Frame) -> bool:
            arriving = self._arriving(frame)
            if arriving is None or take is None or not take(arriving):
                return False
            self._free_slot(frame)
            return True

        self._wire.deliver(None if take is None else given)

    def has_read(self, *, may_wait: bool) -> None:
        """See `DirectStream`."""
        self._wire.pauses.read(may_wait=may_wait, now_s=asyncio.get_running_loop().time())

    def send_now(self, reply: FollowReply) -> bool:
        """See `DirectStream`."""
        return self._deferred.send_now(_frame(reply))

    def send_soon(self, reply: FollowReply) -> bool:
        """See `DirectStream`."""
        self._deferred.queue_frame((reply.job, reply.shard_id), _frame(reply))
        return True

    def close(self) -> None:
        """Stop the timer of deferred frames."""
        self._deferred.close()

    @property
    def reads_to_end(self) -> bool:
        """True if this server can read all sent data even if their sender dies."""
        return self._wire.is_local

    def end_reading(self) -> None:
        """See `DirectStream`."""
        self._wire.end_reading()

    def end_sending(self) -> None:
        """See `DirectStream`."""
        self._wire.end_sending()

    def _arriving(self, frame: Frame) -> Arriving | None:
        if frame.kind is FrameKind.PIECE:
            return OnlyPiece(
                ReadPiece(frame.shard_id, frame.offset_bytes, frame.body, frame.checksum)
            )
        if frame.kind is FrameKind.PLACED:
            return OnlyPiece(self._placed(frame))
        if frame.kind is not FrameKind.MESSAGE:
            return None
        try:
            return _checked(FollowRequest.FromString(bytes(frame.body)))
        except DecodeError as error:
            raise _unreadable(frame, error, "FollowRequest") from error

    def _free_slot(self, frame: Frame) -> None:
        """Call this once the frame's data have been applied or copied."""
        if frame.kind is FrameKind.PLACED:
            self._deferred.free(bulk.header(FrameKind.FREE_SLOT, at=frame.at))

    @property
    def is_local(self) -> bool:
        """See `SegmentTransport`."""
        return self._wire.is_local

    async def receive_descriptor(self) -> int:
        """See `SegmentTransport`."""
        return await self._wire.next_descriptor()

    async def receive_chunks(self, writer: SegmentWriter) -> AsyncGenerator[memoryview, None]:
        """See `SegmentTransport`."""
        try:
            for index in range(num_chunks(writer.num_bytes)):
                start = index * CHUNK_BYTES
                chunk = writer.buffer[start : start + CHUNK_BYTES]
                self._wire.read_chunks_into(partial(_exactly, chunk))
                frame = await self._wire.next_frame()
                if frame.kind is not FrameKind.CHUNK or frame.offset_bytes != start:
                    raise MalformedMessage(
                        "a chunk of a segment is not the next one",
                        seen=f"{frame.kind.name} at {frame.offset_bytes}",
                        expected=f"CHUNK at {start}",
                    )
                yield chunk
        finally:
            self._wire.read_chunks_into(None)

    def end(self) -> None:
        """See `SegmentTransport`."""
        self._wire.end_sending()

    async def send_descriptor(self, segment: Segment) -> None:
        """See `SegmentTransport`."""
        await self._wire.send_descriptor(segment.descriptor)

    async def send_chunk(self, index: int, segment: Segment) -> None:
        """See `SegmentTransport`."""
        start = index * CHUNK_BYTES
        size = min(CHUNK_BYTES, segment.num_bytes - start)
        head = bulk.header(FrameKind.CHUNK, offset_bytes=start, num_bytes=size)
        await self._wire.send_file(head, segment.descriptor, start, size)

    async def finish(self) -> None:
        """Read the remaining frames of the call. Raises MalformedMessage for a piece."""
        while not self._is_over:
            if await self._next_piece() is not None:
                raise MalformedMessage(
                    "a piece that is not expected", seen="a piece", expected="the end of the call"
                )

    async def _next_piece(self) -> ReadPiece | None:
        while not self._is_over:
            frame = await self._wire.next_frame()
            if frame.kind is FrameKind.PIECE:
                return ReadPiece(frame.shard_id, frame.offset_bytes, frame.body, frame.checksum)
            if frame.kind is FrameKind.PLACED:
                return self._placed(frame)
            self._note(frame)
        return None

    def _note(self, frame: Frame) -> None:
        if frame.kind is FrameKind.FREE_SLOT:
            self._reply_slots[frame.shard_id] = self._view(frame), frame.at
        elif frame.kind is FrameKind.END:
            self._is_over = True
        else:
            raise MalformedMessage(
                "a frame that does not belong to a call",
                seen=frame.kind.name,
                expected="PIECE, PLACED, FREE_SLOT or END",
            )

    def _placed(self, frame: Frame) -> ReadPiece:
        data = self._view(frame)
        return ReadPiece(frame.shard_id, frame.offset_bytes, data, None, is_shared=True)

    def _view(self, frame: Frame) -> memoryview:
        if self._arena is None:
            raise MalformedMessage(
                "a frame refers to shared memory",
                seen=f"{frame.kind.name} at {frame.at}",
                expected="pieces in the stream: this connection has no shared memory",
            )
        return self._arena.view(frame.at, frame.num_bytes)

    @property
    def ends_now(self) -> bool:
        """True if the END frame is to be sent with the current replies: the client wakes only
        once."""
        return self._end_follows and self._is_over

    def end_follows(self) -> None:
        self._end_follows = True

    async def await_slot(self, shard_id: int) -> None:
        if self._arena is None:
            return
        while shard_id not in self._reply_slots:
            self._note(await self._wire.next_frame())
            if self._is_over:
                raise MalformedMessage(
                    f"the call ended without a slot for shard {shard_id}",
                    seen=f"slots for {len(self._reply_slots)} shards",
                    expected="a FREE_SLOT for each shard that is pulled",
                )

    def writer(self, shard_id: int, num_bytes: int) -> CopyOut:
        slot, at = self._reply_slots.pop(shard_id, (memoryview(b""), 0))
        if num_bytes > len(slot) or self._arena is None:
            return in_frames
        return writer_into(slot, at)
