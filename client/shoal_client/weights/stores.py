"""Connections to the holders of a series' segments: servers or relays."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import grpc
import structlog

from shoal_client.connection.coordinators import Channels, chance, close_channels
from shoal_client.connection.tls_refusals import explained
from shoal_client.connection.transport import transport_of
from shoal_proto.errors import CorruptError, RetryError, ShoalError, Unavailable
from shoal_proto.segments.sealed import Segment
from shoal_proto.segments.transfer import SegmentConnection, StagedSegment
from shoal_proto.status import from_rpc_error
from shoal_proto.tls.names import READER_NAME, SERVER_NAME
from shoal_proto.v1.weights_pb2 import (
    DifferenceReply,
    DifferenceRequest,
    FetchSegmentRequest,
    OpenSegmentsRequest,
    PutSegmentReply,
    PutSegmentRequest,
    StoreServer,
)
from shoal_proto.v1.weights_pb2_grpc import WeightStoreStub

log = structlog.get_logger(__name__)

OPEN_S = 3.0
MAX_IDLE = 4
CHUNK_WITHIN_S = 10.0
"""Limit for a relay to send a chunk, or a beat."""

T = TypeVar("T")


class WeightStores:
    """Connections to the servers of one series. Thread-safe."""

    def __init__(
        self, series: str, *, may_be_local: bool | None = None, of_relays: bool = False
    ) -> None:
        """`may_be_local`: False to use TCP to servers on this host too; None: as SHOAL_TRANSPORT
        says. `of_relays`: connect to relays instead of servers. Raises InvalidSpec for an unknown
        transport."""
        self._series = series
        self._name = READER_NAME if of_relays else SERVER_NAME
        self._chunk_within_s = CHUNK_WITHIN_S if of_relays else None
        if may_be_local is None:
            may_be_local = transport_of(None) == "auto"
        self._may_be_local = may_be_local
        self._lock = threading.Lock()
        self._is_closed = False
        self._channels = Channels(self._name)
        self._idle: dict[str, list[SegmentConnection]] = {}
        self._in_use: set[SegmentConnection] = set()
        self._local: set[str] = set()
        self._checked: set[str] = set()

    def put(
        self, server: StoreServer, request: PutSegmentRequest, segment: Segment, timeout_s: float
    ) -> PutSegmentReply:
        """Send a segment to a server, which passes it along the request's chain. Raises the
        server's error, CertificateRefused, MalformedMessage, Unavailable or DeadlineExceeded."""
        return self._call(server.address, lambda c: c.put(request, segment, timeout_s))

    def fetch(
        self, holders: Sequence[StoreServer], staged: StagedSegment, timeout_s: float
    ) -> Segment:
        """Fetch a segment from one of these servers, local ones first. If a server fails, the next
        one sends what is missing. `timeout_s`: longest time until the next chunk, of each server.
        Raises the last server's error, or a refusal at once."""
        request = FetchSegmentRequest(series=self._series, digest=staged.digest)
        failure: ShoalError = Unavailable(
            f"no server holds a segment of series {self._series}",
            seen="none of the servers in the version's record is registered",
            expected="at least one",
        )
        for holder in self._nearest_first(holders):

            def fetched(connection: SegmentConnection) -> Segment:
                return connection.fetch(request, staged, timeout_s)

            try:
                return self._call(holder.address, fetched)
            except (RetryError, CorruptError) as error:
                log.info(
                    "segment_not_fetched",
                    series=self._series,
                    server=holder.id,
                    reason=str(error),
                )
                failure = error
        raise failure

    def is_local(self, holders: Sequence[StoreServer]) -> bool:
        """True if one of these servers is on this host, and shares its memory. The first call
        connects to each server; one that is not reached counts as remote until a later call
        connects to it."""
        for holder in holders:
            if holder.address not in self._checked:
                self._checked.add(holder.address)
                try:
                    self.check_reached(holder)
                except ShoalError as error:
                    log.info("server_not_reached", server=holder.id, reason=str(error))
        return any(holder.address in self._local for holder in holders)

    def check_reached(self, holder: StoreServer) -> None:
        """Connect unless an idle connection is open, and keep it. Raises Unavailable,
        DeadlineExceeded, or the server's refusal."""
        self._call(holder.address, lambda connection: None)

    def difference(
        self, holder: StoreServer, request: DifferenceRequest, timeout_s: float
    ) -> DifferenceReply:
        """Ask a server to compute a difference. Raises the server's error, Unavailable or
        DeadlineExceeded."""
        stub = self._stub(holder.address)
        try:
            return stub.Difference(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, holder.address) from error

    def close(self) -> None:
        """Close every connection; calls in progress fail."""
        with self._lock:
            self._is_closed = True
            idle = [each for kept in self._idle.values() for each in kept]
            for connection in self._in_use:
                connection.abort()
            channels = self._channels.pop_all()
            self._idle.clear()
        for connection in idle:
            connection.close()
        close_channels(channels)

    def _nearest_first(self, holders: Sequence[StoreServer]) -> list[StoreServer]:
        if len(holders) > 1 and self._may_be_local:
            self.is_local(holders)
        # Spreads readers on other hosts over the servers.
        return sorted(holders, key=lambda h: (h.address not in self._local, chance()))

    def _call(self, address: str, call: Callable[[SegmentConnection], T]) -> T:
        connection = self._connection(address)
        try:
            answer = call(connection)
        except BaseException:
            self._end(connection)
            raise
        with self._lock:
            self._in_use.discard(connection)
            idle = self._idle.setdefault(address, [])
            if len(idle) < MAX_IDLE and not self._is_closed:
                idle.append(connection)
                return answer
        connection.close()
        return answer

    def _end(self, connection: SegmentConnection) -> None:
        with self._lock:
            self._in_use.discard(connection)
        connection.close()

    def _connection(self, address: str) -> SegmentConnection:
        with self._lock:
            idle = self._idle.get(address, [])
            while idle:
                connection = idle.pop()
                if connection.is_open:
                    self._in_use.add(connection)
                    return connection
                connection.close()
        stub = self._stub(address)
        try:
            offer = stub.OpenBulk(OpenSegmentsRequest(series=self._series), timeout=OPEN_S)
        except grpc.RpcError as error:
            found = from_rpc_error(error, address)
            raise explained(found, address, self._name) from error
        connection = SegmentConnection.open(
            offer,
            address,
            may_be_local=self._may_be_local,
            name=self._name,
            chunk_within_s=self._chunk_within_s,
        )
        with self._lock:
            self._in_use.add(connection)
            if connection.is_local:
                self._local.add(address)
            is_late = self._is_closed
        if is_late:
            self._end(connection)
            raise _closed()
        return connection

    def _stub(self, address: str) -> WeightStoreStub:
        # Under the lock: gRPC crashes the process if a stub is made on a closed channel.
        with self._lock:
            if self._is_closed:
                raise _closed()
            return WeightStoreStub(self._channels.channel_to(address))


class RelaySource:
    """The relay to fetch segments from, until it fails. Thread-safe."""

    def __init__(self, series: str, address: str, *, may_be_local: bool | None) -> None:
        self._stores = WeightStores(series, may_be_local=may_be_local, of_relays=True)
        self._relay = StoreServer(id=f"relay {address}", address=address)
        self._has_failed = False

    @property
    def is_local(self) -> bool:
        """True if the relay shares its memory with this process."""
        return self._stores.is_local([self._relay])

    def fetch(
        self, staged: StagedSegment, timeout_s: float, *, is_difference: bool = False
    ) -> Segment | None:
        """Fetch a segment from the relay. None: fetch the rest from a server."""
        if self._has_failed:
            return None
        try:
            return self._stores.fetch([self._relay], staged, timeout_s)
        except ShoalError as error:
            # A relay that lacks a difference has not failed: it may have another base.
            self._has_failed = not (is_difference and "digest" in error.details)
            log.info("segment_not_relayed", relay=self._relay.address, reason=str(error))
            return None

    def close(self) -> None:
        self._stores.close()


def _closed() -> Unavailable:
    return Unavailable("the connections to the series' servers were closed")
