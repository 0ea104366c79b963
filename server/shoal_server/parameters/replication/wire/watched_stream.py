"""A stream to another server that fails once the other end is silent for too long."""

import asyncio
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
import structlog

from shoal_proto.errors import ShoalError, Unavailable
from shoal_proto.status import from_rpc_error
from shoal_proto.v1 import replication_pb2 as pb
from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts
from shoal_server.parameters.cluster.silence import Silence
from shoal_server.parameters.replication.wire import frames
from shoal_server.parameters.replication.wire.streams import Keep, PeerStream
from shoal_server.serving.tasks import cancel

log = structlog.get_logger(__name__)

CALL_IS_OVER = (asyncio.InvalidStateError, grpc.aio.UsageError, grpc.aio.InternalError)
"""Raised by grpcio for a write to a call that is over."""


class WatchedStream:
    """A stream with one task that writes and one that reads. Lives on the event loop."""

    def __init__(self, stream: PeerStream, address: str, timeouts: PeerTimeouts) -> None:
        self._stream = stream
        self._address = address
        self._timeouts = timeouts
        self._silence = Silence(timeouts)
        self._reads_to_end = False
        self.replied_s = 0.0
        """Time of the last message, by the event loop's clock; 0 before the first."""

    async def send_hello(self, hello: pb.Hello) -> None:
        """Send the stream's first message."""
        await self._stream.write(pb.FollowRequest(hello=hello))

    async def send(self, frame: frames.Frame) -> None:
        """Send a frame. Raises what `PeerStream` raises."""
        self._silence.start_counting()
        await self._stream.write(frame)

    @property
    def inline_bytes(self) -> int:
        """See `PeerStream.inline_bytes`."""
        return self._stream.inline_bytes

    def draft(self, data: memoryview) -> memoryview | None:
        """See `PeerStream.draft`."""
        return self._stream.draft(data)

    def send_now(self, *of_record: frames.Frame, keep: Keep) -> bool:
        """Send a record without waiting. False if that is not possible."""
        if not self._stream.write_now(*of_record, keep=keep):
            return False
        self._silence.start_counting()
        return True

    async def send_beat(self) -> None:
        """Send a heartbeat. The other end answers it."""
        await self.send(pb.FollowRequest(beat=pb.FollowBeat()))

    async def replies(self) -> AsyncIterator[pb.FollowReply]:
        """Yield the replies that `deliver` did not pass on, except answers to heartbeats."""
        async for reply in self._stream.replies():
            self._note_reply(reply)
            if reply.job:
                yield reply

    def deliver(self, take: Callable[[pb.FollowReply], None]) -> None:
        """Pass replies, except answers to heartbeats, to `take`."""

        def noted(reply: pb.FollowReply) -> None:
            self._note_reply(reply)
            if reply.job:
                take(reply)

        self._stream.deliver(noted)

    @property
    def is_received(self) -> bool:
        """True if the other process will read all sent data even if this process dies now."""
        return self._reads_to_end and self._stream.is_in_memory

    def _note_reply(self, reply: pb.FollowReply) -> None:
        self._reads_to_end |= reply.reads_to_end
        self.replied_s = asyncio.get_running_loop().time()
        self._silence.note_message()

    async def run_tasks(self, *work: Coroutine[Any, Any, None]) -> None:
        """Run tasks until one ends; then cancel the others. Raises a ShoalError for an error of a
        task, and Unavailable after too long a silence."""
        tasks = [asyncio.create_task(each) for each in (*work, self._await_silence())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=FIRST_COMPLETED)
        finally:
            await cancel(*tasks)
        errors = [error for task in done if (error := task.exception()) is not None]
        # If the writer failed because the call is over, the reader's error gives the reason.
        for error in sorted(errors, key=lambda error: not isinstance(error, ShoalError)):
            raise self._why(error)

    def _why(self, error: BaseException) -> ShoalError:
        if isinstance(error, ShoalError):
            return error
        if isinstance(error, grpc.RpcError):
            return from_rpc_error(error, self._address)
        if not isinstance(error, CALL_IS_OVER):
            log.error("stream_failed", address=self._address, exc_info=error)
        return Unavailable(f"writing to {self._address} failed", seen=repr(error))

    async def _await_silence(self) -> None:
        await self._silence.wait()
        raise Unavailable(
            f"{self._address} has fallen silent",
            seen=f"no answer for {self._timeouts.silence_s:g} s",
        )
