"""Transfer of segments between parameter servers."""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress

import grpc.aio
from support.weights.segments import segment_of

from shoal_proto import bulk
from shoal_proto.bulk import FrameKind
from shoal_proto.v1.parameters_pb2 import OpenBulkReply
from shoal_proto.v1.weights_pb2 import (
    SEGMENT_TRANSFER_CHUNKS,
    FetchSegmentReply,
    OpenSegmentsRequest,
    StoreServer,
)
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


SEGMENT = segment_of(b"weights")


def serve_fetches(connected: socket.socket, count: int, *, drops_next: bool = False) -> None:
    """Accept a key, and answer `count` fetches with the segment. Then close the connection; with
    `drops_next`, not before another request has arrived."""
    with connected:
        connected.settimeout(LIMIT_S)
        assert connected.recv(4096), "the key is presented"
        connected.sendall(bulk.message(FrameKind.HELLO, b""))
        reply = FetchSegmentReply(
            num_bytes=SEGMENT.num_bytes,
            chunk_digests=SEGMENT.chunk_digests,
            transfer=SEGMENT_TRANSFER_CHUNKS,
        )
        for _ in range(count):
            if not connected.recv(4096):
                return
            chunk = bulk.header(FrameKind.CHUNK, num_bytes=SEGMENT.num_bytes) + SEGMENT.view()
            answer = bulk.message(FrameKind.MESSAGE, reply.SerializeToString()) + chunk
            connected.sendall(answer + bulk.header(FrameKind.END))
        if drops_next:
            assert connected.recv(4096)


async def test_a_connection_is_used_again_and_replaced_once_it_is_closed() -> None:
    """A segment of each version goes to the same server: a new connection for each would delay it
    by several round trips."""
    with (
        ThreadPoolExecutor(1) as threads,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        async with offering(listener.getsockname()[1]) as server:
            peers = WeightPeers(threads)
            for _ in range(2):
                fetching = asyncio.create_task(_fetch_twice(peers, server))
                connected, _ = await asyncio.to_thread(listener.accept)
                await asyncio.to_thread(serve_fetches, connected, 2)
                assert await fetching == [b"weights", b"weights"]
            peers.close()


async def test_a_kept_connection_that_breaks_in_a_call_is_replaced() -> None:
    with (
        ThreadPoolExecutor(1) as threads,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        async with offering(listener.getsockname()[1]) as server:
            peers = WeightPeers(threads)
            fetching = asyncio.create_task(_fetch_twice(peers, server))
            first, _ = await asyncio.to_thread(listener.accept)
            serving = asyncio.create_task(
                asyncio.to_thread(serve_fetches, first, 1, drops_next=True)
            )
            second, _ = await asyncio.to_thread(listener.accept)
            await serving
            await asyncio.to_thread(serve_fetches, second, 1)
            assert await fetching == [b"weights", b"weights"]
            peers.close()


async def _fetch_twice(peers: WeightPeers, server: StoreServer) -> list[bytes]:
    found = [await peers.fetch(server, "j/w", SEGMENT.digest) for _ in range(2)]
    return [bytes(each.view()) for each in found]
