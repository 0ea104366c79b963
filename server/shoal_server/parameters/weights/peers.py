"""Transfer of segments to and from other parameter servers, in threads."""

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from typing import TypeVar

import grpc
import grpc.aio
import structlog

from shoal_proto.errors import Unavailable
from shoal_proto.segments.sealed import Segment
from shoal_proto.segments.transfer import SegmentConnection, StagedSegment
from shoal_proto.status import from_rpc_error
from shoal_proto.tls.channels import open_aio_channel
from shoal_proto.tls.names import SERVER_NAME
from shoal_proto.v1.parameters_pb2 import OpenBulkReply
from shoal_proto.v1.weights_pb2 import (
    FetchSegmentRequest,
    HoldsSegmentsReply,
    HoldsSegmentsRequest,
    OpenSegmentsRequest,
    PutSegmentReply,
    PutSegmentRequest,
    StoreServer,
)
from shoal_proto.v1.weights_pb2_grpc import WeightStoreStub
from shoal_server.serving.rpc import PEER_OPTIONS

OPEN_S = 3.0
TRANSFER_S = 3600.0

MAX_IDLE = 8

Destination = tuple[str, str]
"""Address of a server, and a series: a connection carries calls about one series."""
T = TypeVar("T")
log = structlog.get_logger(__name__)


class WeightPeers:
    """Sends segments to other servers, and fetches segments from them. Lives on the event loop."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._idle: dict[Destination, SegmentConnection] = {}
        self._is_closed = False

    async def pass_on(
        self, to: StoreServer, request: PutSegmentRequest, segment: Segment
    ) -> PutSegmentReply:
        """Send a segment to a server, and through it to the rest of the chain. Raises the error of
        the call OpenBulk, or what `SegmentConnection` raises."""

        def put(connection: SegmentConnection) -> PutSegmentReply:
            return connection.put(request, segment, TRANSFER_S)

        return await self._on_connection(to, request.series, put)

    async def fetch(self, source: StoreServer, series: str, digest: bytes) -> Segment:
        """Fetch a segment from another server. Raises the error of the call OpenBulk, or what
        `SegmentConnection` raises."""

        def fetch(connection: SegmentConnection) -> Segment:
            staged = StagedSegment(digest)
            try:
                request = FetchSegmentRequest(series=series, digest=digest)
                return connection.fetch(request, staged, TRANSFER_S)
            except BaseException:
                staged.close()
                raise

        return await self._on_connection(source, series, fetch)

    async def held(
        self, server: StoreServer, series: str, digests: Collection[bytes]
    ) -> set[bytes]:
        """Return those of the segments that another server has, in memory or on its disk. Raises
        the error of the call."""
        request = HoldsSegmentsRequest(series=series, digests=digests)
        try:
            async with open_aio_channel(server.address, SERVER_NAME, PEER_OPTIONS) as channel:
                reply: HoldsSegmentsReply = await WeightStoreStub(channel).Holds(
                    request, timeout=OPEN_S
                )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, server.address) from error
        return {*reply.held, *reply.durable}

    def close(self) -> None:
        """Close idle connections now, and those in use after their calls."""
        self._is_closed = True
        idle, self._idle = self._idle, {}
        for connection in idle.values():
            connection.close()

    async def _on_connection(
        self, server: StoreServer, series: str, call: Callable[[SegmentConnection], T]
    ) -> T:
        destination = server.address, series
        idle = self._idle.pop(destination, None)
        if idle is not None and idle.is_open:
            try:
                return await self._called(destination, idle, call)
            except Unavailable as error:
                # The server may have closed the connection, or have been restarted.
                log.info("peer_called_again", to=server.id, reason=str(error))
        elif idle is not None:
            idle.close()
        connection = await self._opened(server, series)
        return await self._called(destination, connection, call)

    async def _opened(self, server: StoreServer, series: str) -> SegmentConnection:
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
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The thread continues: close the connection that it opens.
            opening.add_done_callback(_discard)
            raise

    async def _called(
        self,
        destination: Destination,
        connection: SegmentConnection,
        call: Callable[[SegmentConnection], T],
    ) -> T:
        """Make the call on a thread. Unless it fails, its connection may be used again."""

        def kept() -> tuple[T, SegmentConnection]:
            # Runs even if the caller is cancelled first: the call then fails on the aborted
            # connection.
            try:
                return call(connection), connection
            except BaseException:
                connection.close()
                raise

        calling = asyncio.get_running_loop().run_in_executor(self._threads, kept)
        try:
            found, _ = await asyncio.shield(calling)
        except asyncio.CancelledError:
            connection.abort()
            calling.add_done_callback(_discard_answered)
            raise
        if self._is_closed or destination in self._idle or len(self._idle) >= MAX_IDLE:
            connection.close()
        else:
            self._idle[destination] = connection
        return found


def _discard(opening: "asyncio.Future[SegmentConnection]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _discard_answered(calling: "asyncio.Future[tuple[T, SegmentConnection]]") -> None:
    if not calling.cancelled() and calling.exception() is None:
        calling.result()[1].close()
