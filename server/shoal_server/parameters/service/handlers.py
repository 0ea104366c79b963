"""gRPC handlers of the services whose messages carry pieces, which are decoded without copies."""

from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from shoal_proto import pieces
from shoal_proto.v1 import parameters_pb2 as pb
from shoal_proto.v1.replication_pb2 import IdentifyRequest, OpenFollowRequest
from shoal_server.parameters.replication.replication_servicer import ReplicationServicer
from shoal_server.parameters.replication.wire import frames
from shoal_server.parameters.service.parameters_servicer import ParametersServicer

PARAMETERS, REPLICATION = "shoal.v1.Parameters", "shoal.v1.Replication"


def add_replication(replication: ReplicationServicer, server: grpc.aio.Server) -> None:
    """Register the Replication service with the server."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Follow": grpc.stream_stream_rpc_method_handler(
            replication.Follow,
            request_deserializer=frames.DECODER,
            response_serializer=_serialize,
        ),
        "OpenBulk": grpc.unary_unary_rpc_method_handler(
            replication.OpenBulk,
            request_deserializer=OpenFollowRequest.FromString,
            response_serializer=_serialize,
        ),
        "Identify": grpc.unary_unary_rpc_method_handler(
            replication.Identify,
            request_deserializer=IdentifyRequest.FromString,
            response_serializer=_serialize,
        ),
    }
    _register(server, REPLICATION, handlers)


def add_parameters(servicer: ParametersServicer, server: grpc.aio.Server) -> None:
    """Register the Parameters service with the server."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Create": grpc.stream_unary_rpc_method_handler(
            servicer.Create,
            request_deserializer=pieces.PieceDecoder(
                pieces.CREATE_REQUEST, pb.CreateRequest.FromString
            ),
            response_serializer=_serialize,
        ),
        "Pull": grpc.unary_stream_rpc_method_handler(
            servicer.Pull,
            request_deserializer=pb.PullRequest.FromString,
            response_serializer=_serialize,
        ),
        "Push": grpc.stream_stream_rpc_method_handler(
            servicer.Push,
            request_deserializer=pieces.PieceDecoder(
                pieces.PUSH_REQUEST, pb.PushRequest.FromString
            ),
            response_serializer=_serialize,
        ),
        "Describe": grpc.unary_unary_rpc_method_handler(
            servicer.Describe,
            request_deserializer=pb.DescribeRequest.FromString,
            response_serializer=_serialize,
        ),
        "OpenBulk": grpc.unary_unary_rpc_method_handler(
            servicer.OpenBulk,
            request_deserializer=pb.OpenBulkRequest.FromString,
            response_serializer=_serialize,
        ),
        "Drop": grpc.unary_unary_rpc_method_handler(
            servicer.Drop,
            request_deserializer=pb.DropRequest.FromString,
            response_serializer=_serialize,
        ),
    }
    _register(server, PARAMETERS, handlers)


def _register(
    server: grpc.aio.Server, service: str, handlers: "dict[str, grpc.RpcMethodHandler[Any, Any]]"
) -> None:
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_registered_method_handlers(service, handlers)


def _serialize(reply: Message) -> bytes:
    return reply.SerializeToString()
