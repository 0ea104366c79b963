"""Calls to one server about shards: over the bulk transport, or else gRPC."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import grpc

from shoal_client.bulk.bulk_transport import BulkTransport
from shoal_client.bulk.connection import BulkConnection
from shoal_client.shards.parts import PIECE_BYTES, GradientPart
from shoal_proto.checksum import crc32
from shoal_proto.errors import InvalidSpec
from shoal_proto.pieces import OnlyPiece
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.parameters_pb2 import (
    CreateHeader,
    CreateReply,
    CreateRequest,
    DescribeRequest,
    LookupHeader,
    LookupReply,
    LookupRequest,
    Piece,
    PullRequest,
    PushHeader,
    PushReply,
    PushRequest,
    ShardData,
)
from shoal_proto.v1.parameters_pb2_grpc import ParametersStub

CONNECT_AHEAD_S = 2.0
"""Time limit of a call that connects ahead."""


class ParameterCalls:
    """Calls to one server, for one thread at a time, except `close`. Raises grpc.RpcError or a
    ShoalError. `parts`: the data of shards or items, in the header's order."""

    def __init__(
        self,
        address: str,
        channel: grpc.Channel,
        token: Callable[[], Token],
        *,
        transport: str,
        slot_bytes_for: Callable[[int], int],
    ) -> None:
        self._stub = ParametersStub(channel)
        self._address = address
        self._token = token
        self._codecs: frozenset[str] | None = None
        self._bulk = BulkTransport(
            address,
            self._stub.OpenBulk,
            token,
            transport=transport,
            slot_bytes_for=slot_bytes_for,
        )

    def connect(self, largest_bytes: int, num_parts: int) -> None:
        """Connect ahead of calls with about `num_parts` parts of at most `largest_bytes` each.
        Raises grpc.RpcError."""
        if self._bulk.connection(largest_bytes, num_parts, CONNECT_AHEAD_S) is None:
            # Makes gRPC connect.
            self._stub.Describe(DescribeRequest(job=self._token().job), timeout=CONNECT_AHEAD_S)

    def create(
        self, header: CreateHeader, parts: Iterable[GradientPart], timeout_s: float
    ) -> CreateReply:
        def requests() -> Iterator[CreateRequest]:
            yield CreateRequest(header=header)
            for piece in _pieces(parts):
                yield CreateRequest(piece=piece)

        return self._stub.Create(requests(), timeout=timeout_s)

    def pull(
        self, request: PullRequest, parts: Sequence[GradientPart], timeout_s: float
    ) -> Iterator[ShardData | OnlyPiece]:
        """Pull shards. The parts have no data."""
        connection = self._connection(parts, timeout_s)
        if connection is not None:
            return connection.pull(request, parts, timeout_s)
        return self._stub.Pull(request, timeout=timeout_s)

    def look_up(
        self, header: LookupHeader, parts: Sequence[GradientPart], timeout_s: float
    ) -> Iterator[LookupReply | OnlyPiece]:
        """Look up rows, whose ids the parts have."""
        connection = self._connection(parts, timeout_s)
        if connection is not None:
            return connection.look_up(LookupRequest(header=header), parts, timeout_s)

        def requests() -> Iterator[LookupRequest]:
            yield LookupRequest(header=header)
            for piece in _pieces(parts):
                yield LookupRequest(piece=piece)

        return self._stub.Lookup(requests(), timeout=timeout_s)

    def push(
        self, header: PushHeader, parts: Sequence[GradientPart], timeout_s: float
    ) -> Iterator[PushReply | OnlyPiece]:
        """Push gradients or rows."""
        connection = self._connection(parts, timeout_s)
        if connection is not None:
            return connection.push(PushRequest(header=header), parts, timeout_s)

        def requests() -> Iterator[PushRequest]:
            yield PushRequest(header=header)
            for piece in _pieces(parts):
                yield PushRequest(piece=piece)

        return self._stub.Push(requests(), timeout=timeout_s)

    def check_codecs(self, kinds: Collection[str], timeout_s: float) -> None:
        """Raise InvalidSpec unless the server reads gradients of all these codecs."""
        if kinds and self._codecs is None:
            request = DescribeRequest(job=self._token().job)
            self._codecs = frozenset(self._stub.Describe(request, timeout=timeout_s).codecs)
        for kind in kinds:
            if kind not in (self._codecs or ()):
                raise InvalidSpec(
                    f"the parameter server at {self._address} does not read compressed gradients"
                    f" of kind {kind!r}",
                    seen=", ".join(sorted(self._codecs or ())) or "none that it names",
                    expected=repr(kind),
                    fix="Bring the servers to the worker's release, or train without compression.",
                )

    def _connection(self, parts: Sequence[GradientPart], timeout_s: float) -> BulkConnection | None:
        largest_bytes = max((part.num_bytes for part in parts), default=0)
        return self._bulk.connection(largest_bytes, len(parts), timeout_s)

    @property
    def transport(self) -> str:
        """See `BulkTransport.name`."""
        return self._bulk.name

    def close(self) -> None:
        """Close the connection; a call in progress fails."""
        self._bulk.close()


def _pieces(parts: Iterable[GradientPart]) -> Iterator[Piece]:
    for part in parts:
        for offset_bytes, buffers in part.pieces(PIECE_BYTES):
            yield _piece(part.shard_id, offset_bytes, buffers)


def _piece(shard_id: int, offset_bytes: int, buffers: Sequence[memoryview]) -> Piece:
    data = b"".join(buffers)
    return Piece(shard_id=shard_id, offset_bytes=offset_bytes, data=data, checksum=crc32(data))
