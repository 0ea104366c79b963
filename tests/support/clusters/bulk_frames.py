"""A connection of the bulk transport, frame by frame, for tests that break its protocol."""

import socket
from typing import Self

import grpc
from support.clusters.parameter_servers import ParameterServers

from shoal_proto import bulk
from shoal_proto.bulk import Frame, FrameKind, FrameReader
from shoal_proto.status import from_detail
from shoal_proto.v1.identity_pb2 import ErrorDetail, Token
from shoal_proto.v1.parameters_pb2 import OpenBulkReply, OpenBulkRequest
from shoal_proto.v1.parameters_pb2_grpc import ParametersStub


class RawConnection:
    """A connection of the bulk transport, frame by frame."""

    def __init__(
        self, offer: OpenBulkReply, *, key: bytes | None = None, greeting: bytes | None = None
    ) -> None:
        """`greeting`: bytes that are sent instead of a HELLO with the key."""
        self._reader = FrameReader()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(20.0)
        self.socket.connect(f"\0{offer.local_name}")
        self.key = offer.key if key is None else key
        self.socket.sendall(
            bulk.message(FrameKind.HELLO, self.key) if greeting is None else greeting
        )

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def next(self) -> Frame | None:
        """Return the next frame except BEATs, or None once the server has closed the socket."""
        while True:
            frame = self._reader.next()
            if frame is not None and frame.kind is not FrameKind.BEAT:
                return frame
            if frame is None:
                count = self.socket.recv_into(self._reader.space())
                if not count:
                    return None
                self._reader.received(count)

    def error(self) -> Exception:
        frame = self.next()
        assert frame is not None
        assert frame.kind is FrameKind.ERROR
        return from_detail(ErrorDetail.FromString(bytes(frame.body)))

    @classmethod
    def admitted(cls, offer: OpenBulkReply) -> Self:
        """Open a connection that the server has admitted."""
        raw = cls(offer)
        answer = raw.next()
        assert answer is not None
        assert answer.kind is FrameKind.HELLO
        return raw


def bulk_offer(servers: ParameterServers, token: Token) -> OpenBulkReply:
    """Ask the first server for a connection that carries a member's pushes and pulls."""
    with grpc.insecure_channel(servers.servers["ps-0"].address) as channel:
        return ParametersStub(channel).OpenBulk(OpenBulkRequest(token=token), timeout=10.0)
