"""The Parameters service as a stub whose pieces are written and read in place."""

from collections.abc import Callable, Iterator
from typing import Protocol

import grpc
from google.protobuf.message import Message

from shoal_proto import pieces
from shoal_proto.v1.parameters_pb2 import (
    CreateReply,
    DescribeReply,
    DescribeRequest,
    OpenBulkReply,
    OpenBulkRequest,
    PullRequest,
    PushReply,
    ShardData,
)

SERVICE = "/shoal.v1.Parameters/"


class _Creating(Protocol):
    def __call__(
        self, requests: Iterator[Message | bytes], /, *, timeout: float
    ) -> CreateReply: ...


class _Pulling(Protocol):
    def __call__(
        self, request: PullRequest, /, *, timeout: float
    ) -> Iterator[ShardData | pieces.OnlyPiece]: ...


class _Pushing(Protocol):
    def __call__(
        self, requests: Iterator[Message | bytes], /, *, timeout: float
    ) -> Iterator[PushReply | pieces.OnlyPiece]: ...


class _Opening(Protocol):
    def __call__(self, request: OpenBulkRequest, /, *, timeout: float) -> OpenBulkReply: ...


class _Describing(Protocol):
    def __call__(self, request: DescribeRequest, /, *, timeout: float) -> DescribeReply: ...


class PieceStub:
    """Five calls of the Parameters service. A request may also be serialized bytes."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.Create: _Creating = channel.stream_unary(
            SERVICE + "Create",
            request_serializer=_serialize,
            response_deserializer=CreateReply.FromString,
        )
        self.Pull: _Pulling = channel.unary_stream(
            SERVICE + "Pull",
            request_serializer=_serialize,
            response_deserializer=_decoder(pieces.SHARD_DATA, ShardData.FromString),
        )
        self.Push: _Pushing = channel.stream_stream(
            SERVICE + "Push",
            request_serializer=_serialize,
            response_deserializer=_decoder(pieces.PUSH_REPLY, PushReply.FromString),
        )
        self.Describe: _Describing = channel.unary_unary(
            SERVICE + "Describe",
            request_serializer=_serialize,
            response_deserializer=DescribeReply.FromString,
        )
        self.OpenBulk: _Opening = channel.unary_unary(
            SERVICE + "OpenBulk",
            request_serializer=_serialize,
            response_deserializer=OpenBulkReply.FromString,
        )


def _decoder(
    field: int, parse: Callable[[bytes], pieces.Whole]
) -> Callable[[bytes], pieces.Whole | pieces.OnlyPiece]:
    return pieces.PieceDecoder(field, parse)


def _serialize(request: Message | bytes) -> bytes:
    return request if isinstance(request, bytes) else request.SerializeToString()
