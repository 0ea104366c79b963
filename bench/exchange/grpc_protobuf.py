"""gRPC with one protobuf message for each tensor, as `repeated float` or as `bytes`."""

import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import grpc
import numpy as np
import torch
from exchange.model import SHAPES, Exchange, Parameters, await_end, new_gradients
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from torch import Tensor

# Received buffers are only read.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

METHOD = "/bench.Parameters/Push"
OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


def _message() -> Any:
    """message Tensor { repeated float values = 1; bytes data = 2; }"""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="bench.proto",
        package="bench",
        syntax="proto3",
        message_type=[
            descriptor_pb2.DescriptorProto(
                name="Tensor",
                field=[
                    field(
                        name="values",
                        number=1,
                        type=field.TYPE_FLOAT,
                        label=field.LABEL_REPEATED,
                    ),
                    field(name="data", number=2, type=field.TYPE_BYTES, label=field.LABEL_OPTIONAL),
                ],
            )
        ],
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("bench.Tensor"))


_Tensor = _message()


def _encode(tensor: Tensor, *, as_bytes: bool) -> Any:
    if as_bytes:
        return _Tensor(data=tensor.numpy().tobytes())
    return _Tensor(values=tensor.numpy().reshape(-1))


def _decode(message: Any, shape: Sequence[int], *, as_bytes: bool) -> Tensor:
    if as_bytes:
        return torch.frombuffer(message.data, dtype=torch.float32).view(shape)
    return torch.from_numpy(np.array(message.values, dtype=np.float32)).view(shape)


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, *, as_bytes: bool) -> None:
        self._as_bytes = as_bytes
        self._parameters = Parameters()

    def service(self, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(
            self._push,
            request_deserializer=_Tensor.FromString,
            response_serializer=_Tensor.SerializeToString,
        )

    def _push(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        gradients = [
            _decode(request, shape, as_bytes=self._as_bytes)
            for request, shape in zip(requests, SHAPES.values(), strict=True)
        ]
        with self._parameters.lock:
            self._parameters.apply(gradients)
            for value in self._parameters.values:
                yield _encode(value, as_bytes=self._as_bytes)


def serve(owner: Connection, num_workers: int, *, as_bytes: bool = False) -> None:
    server = grpc.server(ThreadPoolExecutor(num_workers), options=OPTIONS)
    server.add_generic_rpc_handlers((_Handler(as_bytes=as_bytes),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    owner.send(f"127.0.0.1:{port}")
    await_end(owner)
    server.stop(None)


def connect(address: str, number: int, num_workers: int, *, as_bytes: bool = False) -> Exchange:
    channel = grpc.insecure_channel(address, options=OPTIONS)
    push = channel.stream_stream(
        METHOD,
        request_serializer=_Tensor.SerializeToString,
        response_deserializer=_Tensor.FromString,
    )
    gradients = new_gradients()

    def exchange() -> None:
        replies = push(_encode(gradient, as_bytes=as_bytes) for gradient in gradients)
        for reply, shape in zip(replies, SHAPES.values(), strict=True):
            _decode(reply, shape, as_bytes=as_bytes)

    return exchange
