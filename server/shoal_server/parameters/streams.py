"""The stream that a link writes to: a bulk connection where there is one, else a gRPC call."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from shoal_proto import bulk
from shoal_proto.bulk import Kind
from shoal_proto.errors import MalformedMessage, ShoalError, Unavailable
from shoal_proto.status import from_detail
from shoal_proto.v1.identity_pb2 import ErrorDetail
from shoal_proto.v1.parameters_pb2 import OpenBulkReply
from shoal_proto.v1.replication_pb2 import FollowReply, OpenFollowRequest
from shoal_proto.v1.replication_pb2_grpc import ReplicationStub
from shoal_server.parameters import frames
from shoal_server.parameters.bulk.wire import HungUp, Wire
from shoal_server.parameters.frames import Chunk, Frame
from shoal_server.parameters.patience import PEER_OPTIONS

log = structlog.get_logger(__name__)

FOLLOW = "/shoal.v1.Replication/Follow"
OPEN_S = 2.0
CONNECT_S = 1.0


class Stream(Protocol):
    """What is written by one task arrives in order. Either method raises what broke the stream: a
    ShoalError, grpc.RpcError, or what grpcio raises for a call that is over."""

    async def write(self, frame: Frame) -> None: ...

    def replies(self) -> AsyncIterator[FollowReply]: ...


@asynccontextmanager
async def open_stream(address: str) -> AsyncIterator[Stream]:
    """A stream to the server there, for as long as the block runs. Raises grpc.RpcError."""
    async with grpc.aio.insecure_channel(address, options=PEER_OPTIONS) as channel:
        connected = await _connect(channel, address)
        if connected is not None:
            with connected:
                yield await BulkStream.begin(Wire(connected), address)
            return
        call: _Call = channel.stream_stream(
            FOLLOW,
            request_serializer=frames.serialize,
            response_deserializer=FollowReply.FromString,
        )()
        try:
            yield GrpcStream(call)
        finally:
            call.cancel()


_Call = grpc.aio.StreamStreamCall[Any, Any]


class GrpcStream:
    def __init__(self, call: _Call) -> None:
        self._call = call

    async def write(self, frame: Frame) -> None:
        await self._call.write(frame)

    async def replies(self) -> AsyncIterator[FollowReply]:
        async for reply in self._call:
            yield reply


class BulkStream:
    def __init__(self, wire: Wire, address: str) -> None:
        self._wire = wire
        self._address = address

    @classmethod
    async def begin(cls, wire: Wire, address: str) -> "BulkStream":
        stream = cls(wire, address)
        await stream._send(bulk.header(Kind.FOLLOW))
        return stream

    async def write(self, frame: Frame) -> None:
        if isinstance(frame, Chunk):
            head = bulk.header(
                Kind.PIECE,
                offset_bytes=frame.offset_bytes,
                num_bytes=len(frame.data),
                checksum=frame.checksum,
            )
            await self._send(head, frame.data)
        else:
            await self._send(bulk.message(Kind.MESSAGE, frame.SerializeToString()))

    async def _send(self, *parts: bytes | memoryview) -> None:
        try:
            await self._wire.send(*parts)
        except HungUp as error:
            raise self._broken(error) from error

    async def replies(self) -> AsyncIterator[FollowReply]:
        while True:
            try:
                frame = await self._wire.next_frame()
            except HungUp as error:
                raise self._broken(error) from error
            try:
                if frame.kind is Kind.MESSAGE:
                    yield FollowReply.FromString(bytes(frame.body))
                elif frame.kind is Kind.ERROR:
                    raise from_detail(ErrorDetail.FromString(bytes(frame.body)))
                elif frame.kind is Kind.END:
                    return
            except DecodeError as error:
                raise MalformedMessage(
                    f"a reply of {self._address} does not parse", seen=repr(error)
                ) from error

    def _broken(self, error: HungUp) -> ShoalError:
        return Unavailable(
            f"the bulk connection to {self._address} broke",
            seen=str(error),
            expected="a stream that goes on",
        )


async def _connect(channel: grpc.aio.Channel, address: str) -> socket.socket | None:
    """A connection on which a call may begin; None where there is no way but gRPC."""
    try:
        offer: OpenBulkReply = await ReplicationStub(channel).OpenBulk(
            OpenFollowRequest(), timeout=OPEN_S
        )
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        return None
    if not offer.port:
        return None
    local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected = await _reached(local, f"\0{offer.local_name}")
    if connected is None:
        connected = await _remote(address.rpartition(":")[0].strip("[]"), offer.port)
    if connected is None:
        log.info("bulk_port_unreachable", address=address, port=offer.port)
        return None
    return await _greeted(connected, offer.key, address)


async def _remote(host: str, port: int) -> socket.socket | None:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    family, kind, protocol, _, where = found[0]
    connected = await _reached(socket.socket(family, kind, protocol), where)
    if connected is not None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


async def _reached(fresh: socket.socket, where: Any) -> socket.socket | None:
    """The socket, connected to that address; None, and it is closed, if nobody takes it there."""
    try:
        fresh.setblocking(False)
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().sock_connect(fresh, where)
    except (OSError, TimeoutError):
        fresh.close()
        return None
    except BaseException:
        fresh.close()
        raise
    return fresh


async def _greeted(connected: socket.socket, key: bytes, address: str) -> socket.socket | None:
    wire = Wire(connected)
    try:
        async with asyncio.timeout(CONNECT_S):
            await wire.send(bulk.message(Kind.HELLO, key))
            frame = await wire.next_frame()
    except (HungUp, ShoalError, TimeoutError) as error:
        log.info("bulk_connection_failed", address=address, reason=repr(error))
        connected.close()
        return None
    except BaseException:
        connected.close()
        raise
    if frame.kind is not Kind.HELLO:
        connected.close()
        return None
    return connected


__all__ = ["Stream", "open_stream"]
