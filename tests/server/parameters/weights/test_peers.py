"""Transfer of segments between parameter servers."""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress

import grpc.aio

from shoal_proto import bulk
from shoal_proto.bulk import FrameKind
from shoal_proto.v1.parameters_pb2 import OpenBulkReply
from shoal_proto.v1.weights_pb2 import OpenSegmentsRequest, StoreServer
from shoal_proto.v1.weights_pb2_grpc import WeightStoreServicer, add_WeightStoreServicer_to_server
from shoal_server.parameters.weights.peers import WeightPeers

LIMIT_S = 10.0


class Offering(WeightStoreServicer):
    """A server that offers bulk connections to a socket of the test."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def OpenBulk(
        self, request: OpenSegmentsRequest, context: grpc.aio.ServicerContext
    ) -> OpenBulkReply:
        return OpenBulkReply(port=self._port, key=b"key")


@asynccontextmanager
async def offering(port: int) -> AsyncIterator[StoreServer]:
    server = grpc.aio.server()
    add_WeightStoreServicer_to_server(Offering(port), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield StoreServer(id="ps-1", address=address)
    finally:
        await server.stop(None)


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep what is only referred to by itself, as a server between two collections does."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def test_a_transfer_cancelled_while_it_connects_leaves_no_connection_open() -> None:
    with (
        ThreadPoolExecutor(1) as threads,
        socket.create_server(("127.0.0.1", 0)) as listener,
        without_collection(),
    ):
        async with offering(listener.getsockname()[1]) as server:
            fetching = asyncio.create_task(WeightPeers(threads).fetch(server, "j/w", b"digest"))
            connected, _ = await asyncio.to_thread(listener.accept)
            with connected:
                connected.settimeout(LIMIT_S)
                assert await asyncio.to_thread(connected.recv, 4096), "the key is presented"
                fetching.cancel()
                with suppress(asyncio.CancelledError):
                    await fetching
                connected.sendall(bulk.message(FrameKind.HELLO, b""))
                assert await asyncio.to_thread(connected.recv, 1) == b"", "it is closed"
