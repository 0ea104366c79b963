"""Transfer of segments to and from other parameter servers. It blocks, so it runs on threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

import grpc
import grpc.aio

from shoal_proto.segments.sealed import Segment
from shoal_proto.segments.transfer import SegmentConnection, StagedSegment
from shoal_proto.status import from_rpc_error
from shoal_proto.tls.channels import open_aio_channel
from shoal_proto.tls.names import SERVER_NAME
from shoal_proto.v1.parameters_pb2 import OpenBulkReply
from shoal_proto.v1.weights_pb2 import (
    FetchSegmentRequest,
    OpenSegmentsRequest,
    PutSegmentReply,
    PutSegmentRequest,
    StoreServer,
)
from shoal_proto.v1.weights_pb2_grpc import WeightStoreStub
from shoal_server.parameters.cluster.peer_timeouts import PEER_OPTIONS

OPEN_S = 3.0
TRANSFER_S = 3600.0
"""Longest transfer of one segment. If the other server falls silent, the transfer fails much
earlier."""

T = TypeVar("T")


class WeightPeers:
    """Sends segments to other servers, and fetches segments from them. Lives on the event loop."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads

    async def pass_on(
        self, to: StoreServer, request: PutSegmentRequest, segment: Segment
    ) -> PutSegmentReply:
        """Send a segment to another server, which forwards it to the rest of the chain. Raises the
        error of the call OpenBulk, or what `SegmentConnection.open` and `put` raise."""

        def put(connection: SegmentConnection) -> PutSegmentReply:
            return connection.put(request, segment, TRANSFER_S)

        return await self._on_connection(to, request.series, put)

    async def fetch(self, source: StoreServer, series: str, digest: bytes) -> Segment:
        """Fetch a segment from another server. Raises the error of the call OpenBulk, or what
        `SegmentConnection.open` and `fetch` raise."""

        def fetch(connection: SegmentConnection) -> Segment:
            staged = StagedSegment(digest)
            try:
                request = FetchSegmentRequest(series=series, digest=digest)
                return connection.fetch(request, staged, TRANSFER_S)
            except BaseException:
                staged.close()
                raise

        return await self._on_connection(source, series, fetch)

    async def _on_connection(
        self, server: StoreServer, series: str, call: Callable[[SegmentConnection], T]
    ) -> T:
        try:
            async with open_aio_channel(server.address, SERVER_NAME, PEER_OPTIONS) as channel:
                offer: OpenBulkReply = await WeightStoreStub(channel).OpenBulk(
                    OpenSegmentsRequest(series=series), timeout=OPEN_S
                )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, server.address) from error
        loop = asyncio.get_running_loop()
        opening = loop.run_in_executor(self._threads, SegmentConnection.open, offer, server.address)
        try:
            connection = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The thread continues: close the connection that it opens.
            opening.add_done_callback(_discard)
            raise
        try:
            # Even if this is cancelled before a thread is free, the thread closes the connection.
            calling = loop.run_in_executor(self._threads, partial(_closing, connection, call))
            return await asyncio.shield(calling)
        except asyncio.CancelledError:
            connection.abort()
            raise


def _discard(opening: "asyncio.Future[SegmentConnection]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _closing(connection: SegmentConnection, call: Callable[[SegmentConnection], T]) -> T:
    with connection:
        return call(connection)
