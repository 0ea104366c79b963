"""A job's shard map, and calls to the servers that it names."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Generic

import grpc
import structlog

from shoal_client.connection.coordinators import OUTLASTED, Coordinators
from shoal_client.connection.log_limit import LogLimit
from shoal_client.parameters.servers import Attempt, ShardServers, Stub
from shoal_client.shards.layouts import keep_addresses
from shoal_proto.errors import Fenced, InternalError
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.shards_pb2 import GetMapRequest, PlaceRequest, ShardMap
from shoal_proto.v1.shards_pb2_grpc import ShardsStub

log = structlog.get_logger(__name__)

MAP_TIMEOUT_S = 2.0
"""Time that a call in progress spends on fetching a newer map: there may be no coordinator."""


class JobShards(Generic[Stub]):
    """Shard map of a job and calls to its servers. For one thread at a time, except `close`."""

    def __init__(
        self,
        coordinators: Sequence[str],
        token: Callable[[], Token],
        timeout_s: float,
        *,
        stub_of: Callable[[str, grpc.Channel], Stub],
        close_stub: Callable[[Stub], None],
        adopt: Callable[[ShardMap], ShardMap],
    ) -> None:
        """`adopt` gets each map that arrives, and returns the one to use. `stub_of` makes the stub
        for a server, from its address and a channel to it."""
        self._coordinators = Coordinators(coordinators)
        self._token = token
        self._timeout_s = timeout_s
        self._adopt = adopt
        self._servers = ShardServers(stub_of, timeout_s, close_stub)
        self._map: ShardMap | None = None
        self._log = LogLimit(log)

    def token(self) -> Token:
        """The caller's token for a call to a server. It names the run of the known shard map."""
        token = self._token()
        if self._map is None or not self._map.run:
            return token
        named = Token()
        named.CopyFrom(token)
        named.run = self._map.run
        return named

    def place(self, request: PlaceRequest) -> ShardMap:
        """Return the job's shard map; make it if this is the first call for the job."""
        return self._accept_map(
            self._coordinators.call(
                lambda channel: ShardsStub(channel).Place, request, timeout_s=self._timeout_s
            )
        )

    def fetch_map(self, wait_s: float = 0.0, timeout_s: float | None = None) -> ShardMap:
        """Fetch the newest shard map. If there is none yet, waits for up to `wait_s`, and never
        longer than the coordinator's limit of a call; then raises DeadlineExceeded. `timeout_s`:
        limit of the whole call; None: the sum of `wait_s` and the client's `timeout_s`. Raises
        Fenced if the job was started over since the last map."""
        request = GetMapRequest(token=self._token(), wait_s=wait_s)
        limit_s = self._timeout_s + wait_s if timeout_s is None else timeout_s
        return self._accept_map(
            self._coordinators.call(
                lambda channel: ShardsStub(channel).GetMap, request, timeout_s=limit_s
            )
        )

    def _accept_map(self, received: ShardMap) -> ShardMap:
        known = self._map.run if self._map is not None else ""
        if known and received.run and known != received.run:
            raise Fenced(
                f"job {received.job} was started over",
                seen=f"a shard map of run {received.run}",
                expected=f"run {known}, whose values this process has",
                fix="Join again to continue.",
                details={"run": received.run},
            )
        adopted = self._adopt(received)
        keep_addresses(adopted, self._map)
        self._map = adopted
        return adopted

    def _refetch_map(self) -> None:
        try:
            self.fetch_map(timeout_s=MAP_TIMEOUT_S)
        except OUTLASTED as error:
            # Go on with the known map; servers refuse calls if it is out of date.
            self._log.info("shard_map_not_fetched", reason=str(error))

    def cached_map(self) -> ShardMap:
        """The map received last. Raises InternalError if there is none."""
        if self._map is None:
            raise InternalError(
                "no shard map was fetched yet", expected="place() or fetch_map() first"
            )
        return self._map

    def run(
        self,
        attempt: Attempt[Stub],
        ready_by_s: float = math.inf,
        shard_ids: Collection[int] | None = None,
    ) -> int:
        """Run attempts at every server until each shard is done; return the number of rounds beyond
        the first. See `ShardServers.run`."""
        return self._servers.run(self.cached_map, self._refetch_map, attempt, ready_by_s, shard_ids)

    def connect_ahead(self, address: str, connect: Callable[[Stub], None]) -> None:
        """Connect, in the background, to a server that is about to be called."""
        self._servers.connect_ahead(address, connect)

    def wait_for_lost(self, wait_s: float) -> None:
        """Make later calls wait for lost shards to come back, for at most `wait_s` each."""
        self._servers.lost_wait_s = wait_s

    @property
    def stubs(self) -> dict[str, Stub]:
        """Stubs by address, for the connected servers."""
        return self._servers.stubs

    def close(self) -> None:
        """Close every connection; a call in progress on another thread fails."""
        self._servers.close()
        self._coordinators.close()
