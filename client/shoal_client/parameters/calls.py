"""Create, pull and push at one server: by the bulk transport where there is one, else by gRPC."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import grpc
import structlog

from shoal_client.bulk.connection import Connection
from shoal_client.bulk.opening import connect
from shoal_client.parameters.piece_stub import PieceStub
from shoal_client.shards.blocks import SEND_PIECE_BYTES, encode
from shoal_client.shards.parts import Part
from shoal_proto import pieces
from shoal_proto.errors import InvalidSpec
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.parameters_pb2 import (
    CreateHeader,
    CreateReply,
    CreateRequest,
    OpenBulkRequest,
    PullRequest,
    PushHeader,
    PushReply,
    PushRequest,
    ShardData,
)

log = structlog.get_logger(__name__)

AGAIN_S = 30.0
"""After which time a way is looked for anew where there was none."""


TRANSPORTS = ("auto", "tcp", "grpc")
TRANSPORT_VARIABLE = "SHOAL_TRANSPORT"


def transport_of(asked: str | None) -> str:
    """`auto`: shared memory with a server on this machine, a TCP socket to any other; `tcp`: that
    to all of them; `grpc`, to which the others fall back. None: as the environment says.

    Raises InvalidSpec for another one.
    """
    transport = os.environ.get(TRANSPORT_VARIABLE, "auto") if asked is None else asked
    if transport not in TRANSPORTS:
        raise InvalidSpec(
            "unknown transport",
            seen=repr(transport),
            expected=", ".join(TRANSPORTS),
            fix=f"Set {TRANSPORT_VARIABLE} or `transport` to one of them.",
        )
    return transport


class ParameterCalls:
    """For one thread at a time, but for `close`. Raises grpc.RpcError or a ShoalError."""

    def __init__(
        self,
        address: str,
        channel: grpc.Channel,
        token: Callable[[], Token],
        *,
        transport: str,
    ) -> None:
        self._address = address
        self._stub = PieceStub(channel)
        self._token = token
        self._bulk: Connection | None = None
        self._bulk_bytes = 0
        self._is_local_tried = transport == "auto"
        self._no_bulk_until_s = float("inf") if transport == "grpc" else 0.0

    def create(self, header: CreateHeader, parts: Iterable[Part], timeout_s: float) -> CreateReply:
        requests = _requests(CreateRequest(header=header), parts, pieces.CREATE_REQUEST)
        return self._stub.Create(requests, timeout=timeout_s)

    def pull(
        self, request: PullRequest, parts: Sequence[Part], timeout_s: float
    ) -> Iterator[ShardData | pieces.OnlyPiece]:
        """The parts are the shards of the request, in its order, without pieces."""
        connection = self._connection(parts, timeout_s)
        if connection is not None:
            return connection.pull(request, parts, timeout_s)
        return self._stub.Pull(request, timeout=timeout_s)

    def push(
        self, header: PushHeader, parts: Sequence[Part], timeout_s: float
    ) -> Iterator[PushReply | pieces.OnlyPiece]:
        connection = self._connection(parts, timeout_s)
        request = PushRequest(header=header)
        if connection is not None:
            return connection.push(request, parts, timeout_s)
        requests = _requests(request, parts, pieces.PUSH_REQUEST)
        return self._stub.Push(requests, timeout=timeout_s)

    def _connection(self, parts: Sequence[Part], timeout_s: float) -> Connection | None:
        """The bulk connection, opened now if need be; None: gRPC it is."""
        largest_bytes = max((part.num_bytes for part in parts), default=0)
        if self._bulk is not None and self._bulk.is_usable and largest_bytes <= self._bulk_bytes:
            return self._bulk
        if time.monotonic() < self._no_bulk_until_s:
            return None
        if self._bulk is not None:
            self._bulk.close()
            self._bulk = None
        try:
            offer = self._stub.OpenBulk(OpenBulkRequest(token=self._token()), timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            log.info("no_bulk_transport", address=self._address, reason=error.details())
            self._no_bulk_until_s = float("inf")
            return None
        if not self._is_local_tried:
            offer.local_name = ""
        self._bulk = connect(offer, self._address, largest_bytes)
        self._bulk_bytes = largest_bytes
        if self._bulk is None:
            self._no_bulk_until_s = time.monotonic() + AGAIN_S
        return self._bulk

    @property
    def way(self) -> str:
        """How pulls and pushes went last: `shared-memory`, `unix-socket`, `tcp` or `grpc`."""
        return self._bulk.way if self._bulk is not None else "grpc"

    def close(self) -> None:
        """A call under way on another thread fails."""
        bulk = self._bulk
        if bulk is not None:
            bulk.close()


def _requests(
    first: CreateRequest | PushRequest, parts: Iterable[Part], field: int
) -> Iterator[CreateRequest | PushRequest | bytes]:
    yield first
    for part in parts:
        for offset_bytes, buffers in part.pieces(SEND_PIECE_BYTES):
            yield encode(field, part.shard_id, offset_bytes, buffers)
