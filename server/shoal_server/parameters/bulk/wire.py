"""Frames of the bulk transport over a socket."""

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from math import inf

import numpy as np
import structlog

from shoal_proto import bulk
from shoal_proto.bulk import Frame, FrameKind, FrameReader
from shoal_proto.errors import MalformedMessage
from shoal_proto.pieces import Buffer
from shoal_proto.segments.descriptors import receive_into
from shoal_server.parameters.bulk.encryption import PlainBytes, bytes_of

log = structlog.get_logger(__name__)

SMALL_BYTES = 32 * 1024
PAUSE_S = 0.003
"""A pause in reading. Without pauses, each push wakes this process, and the kernel often runs it in
place of the sender."""
MANY_PUSHES = 8
"""Most pushes in one pause: with more, the sender would soon wait for free slots."""
AWAITED_S = 0.1
"""Time without pauses after a push whose sender waits, or after more than MANY_PUSHES at once."""

TakeFrame = Callable[[Frame], bool]
"""Handles a frame without waiting; False if it cannot."""


class PeerHungUp(Exception):
    """The other end closed the connection, or it broke."""


class FrameConnection:
    """A non-blocking connection that one task may read, and any number may write to. Lives on the
    event loop."""

    def __init__(self, connected: socket.socket, *, first: FrameKind | None = None) -> None:
        """`first`: kind of the other end's first frame."""
        self.socket = connected
        self._bytes = bytes_of(connected)
        is_plain = isinstance(self._bytes, PlainBytes)
        self.is_local = is_plain and connected.family == socket.AF_UNIX
        """True if sent data can be read even after this process is gone."""
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(self._buffer_for, first=first)
        self._chunk_buffer: Callable[[int], memoryview] | None = None
        self._writing = asyncio.Lock()
        self._rest: Buffer = b""
        """Rest of a frame that `send_now` could not send whole."""
        self._flushing: set[asyncio.Task[None]] = set()
        self._sent_s = self._loop.time()
        self._take: TakeFrame | None = None
        self.pauses = ReadingPauses()
        """Pauses in reading. The `deliver` function notes here the pushes that it took."""
        self._paused: tuple[asyncio.TimerHandle, asyncio.Future[Frame]] | None = None

    async def next_frame(self) -> Frame:
        """The next frame that the `deliver` function does not take.

        Raises PeerHungUp, MalformedMessage, ChecksumMismatch, or that function's error. Nothing can
        be read after an error.
        """
        while (frame := self._next_untaken()) is None:
            if self._take is not None and isinstance(self._bytes, PlainBytes):
                return await self._await_untaken()
            try:
                count = await self._bytes.receive_into(self._reader.space())
            except OSError as error:
                raise PeerHungUp(repr(error)) from error
            if not count:
                raise PeerHungUp("closed by the other end")
            self._reader.received(count)
        return frame

    def read_chunks_into(self, buffer_for: Callable[[int], memoryview] | None) -> None:
        """Receive the bodies of later PIECE and CHUNK frames into memory from `buffer_for`, which
        gets their size and may raise MalformedMessage. None: receive them into new memory."""
        self._chunk_buffer = buffer_for

    def _buffer_for(self, num_bytes: int) -> memoryview:
        return (self._chunk_buffer or _unset)(num_bytes)

    async def next_descriptor(self) -> int:
        """The descriptor of the next frame, which must be DESCRIPTOR. The caller must close it. Any
        other read would lose the descriptor. The other end sends one only on request.

        Raises PeerHungUp, MalformedMessage, ChecksumMismatch, or Overloaded if this process can
        open no further file.
        """
        descriptors: list[int] = []
        try:
            while (frame := self._reader.next()) is None:
                descriptors += await self._receive_descriptors()
            if frame.kind is not FrameKind.DESCRIPTOR or len(descriptors) != 1:
                raise MalformedMessage(
                    "a segment was expected as a descriptor",
                    seen=f"{frame.kind.name} with {len(descriptors)} descriptors",
                    expected="DESCRIPTOR with 1",
                )
            return descriptors.pop()
        finally:
            for each in descriptors:
                os.close(each)

    async def _receive_descriptors(self) -> list[int]:
        while True:
            try:
                count, descriptors = receive_into(self.socket, self._reader.space())
            except BlockingIOError:
                await self._readiness(self._loop.add_reader, self._loop.remove_reader)
                continue
            except OSError as error:
                raise PeerHungUp(repr(error)) from error
            if not count:
                raise PeerHungUp("closed by the other end")
            self._reader.received(count)
            return descriptors

    async def _readiness(self, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
        ready, number = self._loop.create_future(), self.socket.fileno()
        add(number, _set_ready, ready)
        try:
            await ready
        finally:
            remove(number)

    def deliver(self, take: TakeFrame | None) -> None:
        """Offer frames to `take` on arrival, while a task waits in `next_frame`: waking the task
        costs more. `next_frame` raises an error of `take`. None: offer no further frames."""
        self._take = take

    def _next_untaken(self) -> Frame | None:
        while (frame := self._reader.next()) is not None:
            if self._take is None or not self._take(frame):
                break
        return frame

    async def _await_untaken(self) -> Frame:
        number = self.socket.fileno()
        awaited: asyncio.Future[Frame] = self._loop.create_future()
        self._loop.add_reader(number, self._readable, awaited)
        try:
            return await awaited
        finally:
            if self._paused is not None:
                self._paused[0].cancel()
                self._paused = None
            self._loop.remove_reader(number)

    def _readable(self, awaited: "asyncio.Future[Frame]") -> None:
        if awaited.done():
            return
        try:
            count = self.socket.recv_into(self._reader.space())
            if not count:
                raise PeerHungUp("closed by the other end")
            self._reader.received(count)
            frame = self._next_untaken()
        except BlockingIOError:
            return
        except OSError as error:
            awaited.set_exception(PeerHungUp(repr(error)))
        except Exception as error:  # noqa: BLE001 - raised in the task that waits for a frame
            awaited.set_exception(error)
        else:
            if frame is not None:
                awaited.set_result(frame)
            elif (pause_s := self.pauses.take(self._loop.time())) > 0.0:
                self._pause(pause_s, awaited)

    def _pause(self, pause_s: float, awaited: "asyncio.Future[Frame]") -> None:
        self._loop.remove_reader(self.socket.fileno())
        self._paused = self._loop.call_later(pause_s, self._end_pause), awaited

    def _end_pause(self) -> None:
        if self._paused is not None:
            timer, awaited = self._paused
            self._paused = None
            timer.cancel()
            self._loop.add_reader(self.socket.fileno(), self._readable, awaited)

    def _end_pauses(self) -> None:
        self.pauses.end()
        self._end_pause()

    async def send(self, *parts: Buffer) -> None:
        """Send a frame. Raises PeerHungUp. Close the socket after a cancelled call, which may have
        sent part of the frame."""
        async with self._writing:
            self._sent_s = self._loop.time()
            rest, self._rest = self._rest, b""
            try:
                for run in _runs([rest, *parts] if rest else parts):
                    await self._bytes.send_all(run)
            except OSError as error:
                raise PeerHungUp(repr(error)) from error

    async def send_descriptor(self, descriptor: int) -> None:
        """Send a descriptor over a Unix socket, as a DESCRIPTOR frame. Raises PeerHungUp. Close the
        socket after a cancelled call."""
        async with self._writing:
            self._sent_s = self._loop.time()
            rest, self._rest = self._rest, b""
            head = bulk.header(FrameKind.DESCRIPTOR)
            try:
                if rest:
                    await self._bytes.send_all(rest)
                while True:
                    try:
                        count = socket.send_fds(self.socket, [head], [descriptor])
                        break
                    except BlockingIOError:
                        await self._readiness(self._loop.add_writer, self._loop.remove_writer)
                if count < len(head):
                    await self._bytes.send_all(head[count:])
            except OSError as error:
                raise PeerHungUp(repr(error)) from error

    async def send_file(self, head: bytes, descriptor: int, start: int, num_bytes: int) -> None:
        """`send` a frame with part of an unchanging file as its body."""
        async with self._writing:
            self._sent_s = self._loop.time()
            rest, self._rest = self._rest, b""
            try:
                await self._bytes.send_all(b"".join((rest, head)))
                await self._bytes.send_file(descriptor, start, num_bytes)
            except OSError as error:
                raise PeerHungUp(repr(error)) from error

    def send_now(self, frame: bytes) -> bool:
        """Send a frame without a turn of the event loop. True if it was sent, or its rest is being
        sent. False, with nothing sent, if that is impossible now."""
        if not self.is_idle:
            return False
        try:
            count = self._bytes.send_some(frame)
        except OSError:
            # Unless the buffer is full, the next send or read raises the error.
            return False
        self._sent_s = self._loop.time()
        if count < len(frame):
            self._rest = memoryview(frame)[count:]
            self._flush()
        return True

    def send_soon(self, frame: bytes) -> None:
        """Send a frame now, or after the send in progress. An error is only logged: the next send
        or read raises it."""
        if not self.send_now(frame):
            self._flush(frame)

    def end_reading(self) -> None:
        """Keep the other end from sending further data. What was sent before can still be read: the
        kernel takes one lock for this call and each send (unix(7))."""
        self._end_pauses()
        try:
            self.socket.shutdown(socket.SHUT_RD)
        except OSError as error:
            log.debug("reading_already_ended", reason=str(error))

    def end_sending(self) -> None:
        """End both directions. A waiting send raises PeerHungUp, even if the other end does not
        read. Received data can still be read."""
        self._end_pauses()
        try:
            # SSLSocket.shutdown would end the decryption of unread data.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)
        except OSError as error:
            log.debug("sending_already_ended", reason=str(error))

    @property
    def is_idle(self) -> bool:
        return not self._writing.locked() and not self._rest

    def _flush(self, *frames: bytes) -> None:
        flushing = self._loop.create_task(self._send_rest(*frames), name="flush")
        self._flushing.add(flushing)
        flushing.add_done_callback(self._flushing.discard)

    async def _send_rest(self, *frames: bytes) -> None:
        try:
            await self.send(*frames)
        except PeerHungUp as hung_up:
            log.debug("frame_not_flushed", reason=str(hung_up))

    @property
    def silent_s(self) -> float:
        """Seconds since the last send; 0 during one."""
        return 0.0 if self._writing.locked() else self._loop.time() - self._sent_s


class ReadingPauses:
    """Decides on pauses in reading, for pushes whose sender does not wait."""

    def __init__(self) -> None:
        self._num_read = 0
        self._may_wait = False
        self._awaited_s = -inf

    def read(self, *, may_wait: bool, now_s: float) -> None:
        """Note a push that was read. `may_wait`: its sender does not wait for the answer."""
        self._num_read += 1
        self._may_wait = may_wait
        if not may_wait or self._num_read > MANY_PUSHES:
            self._awaited_s = max(self._awaited_s, now_s)

    def end(self) -> None:
        """Make no further pauses: the connection ends once all data are read."""
        self._awaited_s = inf

    def take(self, now_s: float) -> float:
        """Length of the next pause, for the pushes since the last call. Call it after all received
        data were read."""
        may_pause = self._may_wait and now_s - self._awaited_s >= AWAITED_S
        self._num_read, self._may_wait = 0, False
        return PAUSE_S if may_pause else 0.0


def _set_ready(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


def _runs(parts: Sequence[Buffer]) -> Iterator[Buffer]:
    """Join small parts: a system call costs as much as copying a few KiB."""
    small: list[Buffer] = []
    for part in parts:
        if len(part) <= SMALL_BYTES:
            small.append(part)
            continue
        if small:
            yield b"".join(small)
            small = []
        yield part
    if small:
        yield small[0] if len(small) == 1 else b"".join(small)


def _unset(num_bytes: int) -> memoryview:
    """Memory for a body, not initialised."""
    return np.empty(num_bytes, dtype=np.uint8).data
