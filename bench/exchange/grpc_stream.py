"""gRPC with raw bytes in messages of at most 1 MiB: no protobuf, no names, no checks."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import grpc
import torch
from exchange.model import (
    NUM_BYTES,
    Exchange,
    Parameters,
    await_end,
    flat_parts,
    new_gradients,
)
from torch import Tensor

METHOD = "/bench.Parameters/Stream"
MESSAGE_BYTES = 1024 * 1024


def _messages(tensors: list[Tensor]) -> Iterator[bytes]:
    for tensor in tensors:
        data = tensor.numpy().data.cast("B")
        for start in range(0, len(data), MESSAGE_BYTES):
            yield bytes(data[start : start + MESSAGE_BYTES])


def _receive(messages: Iterator[bytes], into: memoryview) -> None:
    at = 0
    for message in messages:
        into[at : at + len(message)] = message
        at += len(message)
    if at != len(into):
        raise ConnectionError(f"received {at} bytes, expected {len(into)}")


class _Handler(grpc.GenericRpcHandler):
    def __init__(self) -> None:
        self._parameters = Parameters()

    def service(self, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._push)

    def _push(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        received = bytearray(NUM_BYTES)
        _receive(requests, memoryview(received))
        with self._parameters.lock:
            self._parameters.apply(flat_parts(received))
            yield from _messages(self._parameters.values)


def serve(owner: Connection, num_workers: int) -> None:
    torch.set_num_threads(1)
    server = grpc.server(ThreadPoolExecutor(num_workers))
    server.add_generic_rpc_handlers((_Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    owner.send(f"127.0.0.1:{port}")
    await_end(owner)
    server.stop(None)


def connect(address: str, number: int, num_workers: int) -> Exchange:
    push = grpc.insecure_channel(address).stream_stream(METHOD)
    gradients, values = new_gradients(), bytearray(NUM_BYTES)

    def exchange() -> None:
        _receive(push(_messages(gradients)), memoryview(values))

    return exchange
