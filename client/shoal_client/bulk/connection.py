"""A bulk connection to one server, for one call at a time."""

import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from google.protobuf.message import DecodeError

from shoal_client.bulk.arena import Arena
from shoal_client.bulk.sending import Sending
from shoal_client.shards.parts import GradientPart
from shoal_proto import bulk
from shoal_proto.bulk import SILENCE_S, Frame, FrameKind, FrameReader
from shoal_proto.errors import DeadlineExceeded, MalformedMessage, Unavailable
from shoal_proto.pieces import OnlyPiece, ReadPiece
from shoal_proto.status import from_detail
from shoal_proto.v1.identity_pb2 import ErrorDetail
from shoal_proto.v1.parameters_pb2 import (
    LookupReply,
    LookupRequest,
    PullRequest,
    PushReply,
    PushRequest,
    ShardData,
)

LOOKS_S = 0.0003
"""Time for which a large call polls for an answer before its thread sleeps: the kernel would wake a
sleeping thread on the server's processor, although another one is idle."""
LARGE_BYTES = 4 * 1024 * 1024
"""Calls that copied fewer bytes do not poll: their answers come soon anyway."""

Parsed = TypeVar("Parsed")
Reply = TypeVar("Reply", PushReply, ShardData, LookupReply)


class BulkConnection:
    """Connection for one thread at a time; any thread may call `close`. An error in a call ends the
    connection; so does an iterator that is closed before its end."""

    def __init__(self, connected: socket.socket, address: str, arena: Arena | None) -> None:
        """Take ownership of the socket."""
        connected.setblocking(False)
        self._socket = connected
        self._address = address
        self._arena = arena
        self._has_processors = len(os.sched_getaffinity(0)) > 1
        self._reader = FrameReader(_Scratch())
        self._lock = threading.Lock()
        self._is_in_call = False
        self._is_closed = False

    @property
    def transport(self) -> str:
        """Transport of tensors, as `BulkTransport.name`."""
        if self._arena is not None:
            return "shared-memory"
        if isinstance(self._socket, ssl.SSLSocket):
            return "tls"
        return "unix-socket" if self._socket.family == socket.AF_UNIX else "tcp"

    @property
    def is_usable(self) -> bool:
        """True if another call may begin."""
        return not (self._is_in_call or self._is_closed)

    def pull(
        self, request: PullRequest, parts: Iterable[GradientPart], timeout_s: float
    ) -> Iterator[ShardData | OnlyPiece]:
        """Pull shards. `parts`: the requested shards, in order. The iterator raises the server's
        error, MalformedMessage, ChecksumMismatch, Unavailable or DeadlineExceeded. A yielded piece
        is valid until the next request."""
        opening = bulk.message(FrameKind.PULL, request.SerializeToString())
        return self._call(opening, parts, timeout_s, ShardData.FromString, _announced_values)

    def push(
        self, request: PushRequest, parts: Iterable[GradientPart], timeout_s: float
    ) -> Iterator[PushReply | OnlyPiece]:
        """Push gradients or rows, like `pull`; the parts hold the data to send."""
        opening = bulk.message(FrameKind.PUSH, request.SerializeToString())
        return self._call(opening, parts, timeout_s, PushReply.FromString, _announced_outcomes)

    def look_up(
        self, request: LookupRequest, parts: Iterable[GradientPart], timeout_s: float
    ) -> Iterator[LookupReply | OnlyPiece]:
        """Look up rows of tables, like `pull`; the parts hold ids, item by item, and space for the
        rows."""
        opening = bulk.message(FrameKind.LOOKUP, request.SerializeToString())
        return self._call(opening, parts, timeout_s, LookupReply.FromString, _announced_rows)

    def _call(
        self,
        opening: bytes,
        parts: Iterable[GradientPart],
        timeout_s: float,
        parse: Callable[[bytes], Reply],
        announced: "Callable[[Reply], Iterable[tuple[int, int]]]",
    ) -> Iterator[Reply | OnlyPiece]:
        """`announced`: returns (part id, bytes that follow) for each part of a reply."""
        give_up_s = time.monotonic() + timeout_s
        self._begin()
        try:
            if self._arena is not None:
                self._arena.clear()
            sending = Sending(self._socket, opening, parts, self._arena)
            bytes_left: dict[int, int] = {}
            while (frame := self._next_frame(sending, give_up_s)).kind is not FrameKind.END:
                reply = self._read(frame, parse)
                if reply is None:
                    continue
                if isinstance(reply, OnlyPiece):
                    piece = reply.piece
                    changed = [piece.shard_id]
                    bytes_left[piece.shard_id] = bytes_left.get(piece.shard_id, 0) - len(piece.data)
                else:
                    new_parts = dict(announced(reply))
                    bytes_left |= new_parts
                    changed = list(new_parts)
                yield reply
                # The caller has read this reply's data.
                for part_id in changed:
                    if not bytes_left[part_id]:
                        sending.record_answer(part_id)
                        if self._arena is not None:
                            sending.send_between_answers()
            self._is_in_call = False
        except OSError as error:
            raise self._broken(repr(error)) from error
        finally:
            self._end()

    def _begin(self) -> None:
        with self._lock:
            if not self.is_usable:
                raise self._broken("closed")
            self._is_in_call = True

    def _end(self) -> None:
        with self._lock:
            if self._is_in_call or self._is_closed:
                self._is_in_call, self._is_closed = False, True
                self._socket.close()

    def _next_frame(self, sending: Sending, give_up_s: float) -> Frame:
        received_s = time.monotonic()
        while (frame := self._reader.next()) is None:
            try:
                sending.send_available()
            except OSError:
                # A server that refuses a call sends the reason before it closes the connection.
                if not self._receive():
                    raise
                received_s = time.monotonic()
                continue
            if self._receive():
                received_s = time.monotonic()
                continue
            now_s = time.monotonic()
            if now_s >= give_up_s:
                raise DeadlineExceeded(f"the server at {self._address} did not answer in time")
            if now_s - received_s >= SILENCE_S:
                raise self._broken(f"no data for {SILENCE_S:g} s")
            if self._poll_briefly():
                received_s = time.monotonic()
                continue
            events = select.POLLIN | (select.POLLOUT if sending.is_stuck else 0)
            waiting = select.poll()
            waiting.register(self._socket, events)
            until_s = min(give_up_s, received_s + SILENCE_S)
            waiting.poll(max(until_s - now_s, 0.0) * 1000 + 1)
        return frame

    def _poll_briefly(self) -> bool:
        arena = self._arena
        if arena is None or not self._has_processors or arena.copied_bytes < LARGE_BYTES:
            return False
        soon_s = time.monotonic() + LOOKS_S
        while time.monotonic() < soon_s:
            os.sched_yield()
            if self._receive():
                return True
        return False

    def _receive(self) -> bool:
        """Read data that has arrived; False if there is none. Raises Unavailable if the server has
        closed the connection."""
        try:
            count = self._socket.recv_into(self._reader.space())
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        if not count:
            raise self._broken("the server closed it")
        self._reader.received(count)
        return True

    def _read(self, frame: Frame, parse: Callable[[bytes], Reply]) -> Reply | OnlyPiece | None:
        if frame.kind is FrameKind.BEAT:
            return None
        if frame.kind is FrameKind.ERROR:
            raise from_detail(self._parsed(frame, ErrorDetail.FromString))
        if frame.kind is FrameKind.MESSAGE:
            return self._parsed(frame, parse)
        checksum: int | None = frame.checksum
        if frame.kind is FrameKind.PIECE:
            data = frame.body
        elif frame.kind is FrameKind.PLACED and self._arena is not None:
            data = self._arena.view(frame.at, frame.num_bytes)
            checksum = None
        else:
            raise self._malformed(f"a frame of kind {frame.kind.name}")
        return OnlyPiece(ReadPiece(frame.shard_id, frame.offset_bytes, data, checksum))

    def _parsed(self, frame: Frame, parse: Callable[[bytes], Parsed]) -> Parsed:
        try:
            return parse(bytes(frame.body))
        except DecodeError as error:
            raise self._malformed(f"a reply that does not parse ({error})") from error

    def _malformed(self, seen: str) -> MalformedMessage:
        return MalformedMessage(
            f"the answer of the server at {self._address} is malformed",
            seen=seen,
            expected="replies to the call",
        )

    def _broken(self, seen: str) -> Unavailable:
        return Unavailable(
            f"the bulk connection to {self._address} broke", seen=seen, expected="a reply"
        )

    def close(self) -> None:
        """Close the connection; a call in progress fails."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if not self._is_in_call:
                self._socket.close()
                return
            try:
                # Wakes the other thread, which closes the socket. `SSLSocket.shutdown` would also
                # turn TLS off, and the other thread would read encrypted bytes.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            except OSError:
                # The server closed first, which wakes the other thread.
                return


def _announced_values(reply: ShardData) -> Iterable[tuple[int, int]]:
    return [(reply.version.shard_id, reply.version.num_bytes)]


def _announced_outcomes(reply: PushReply) -> Iterable[tuple[int, int]]:
    announced = [(outcome.shard_id, 0) for outcome in reply.outcomes]
    if reply.HasField("version"):
        announced.append((reply.version.shard_id, reply.version.num_bytes))
    return announced


def _announced_rows(reply: LookupReply) -> Iterable[tuple[int, int]]:
    return [(rows.item, rows.num_bytes) for rows in reply.rows]


class _Scratch:
    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def __call__(self, num_bytes: int) -> memoryview:
        if len(self._memory) < num_bytes:
            self._memory = memoryview(bytearray(num_bytes))
        return self._memory[:num_bytes]
