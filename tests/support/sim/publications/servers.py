"""Parameter servers as stores of segments: the real store and upkeep, without shared memory."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

from support.sim.event_loop import LoopProcess, remote
from support.sim.publications.etcd import SimEtcd, SimKeyspace
from support.sim.publications.segments import SimSegment
from support.sim.publications.shards import SimShardHost

from shoal_proto.errors import Unavailable, VersionGone
from shoal_proto.v1 import weights_pb2 as pb
from shoal_server.etcd import keys
from shoal_server.etcd.api import Delete, Put
from shoal_server.parameters.weights.records import SeriesRecords
from shoal_server.parameters.weights.store import Position, SegmentOrigin, SegmentStore
from shoal_server.parameters.weights.upkeep import WeightUpkeep

LISTED_FOR_S = 5.0
"""Time for which a server stays listed without contact to etcd."""
BEAT_S = 1.0
CALL_S = 3.0


class SimServer:
    """A server's process."""

    def __init__(
        self,
        etcd: SimEtcd,
        server_id: str,
        incarnation: int,
        peers: "dict[str, SimServer]",
        is_live: Callable[[str], bool],
    ) -> None:
        """`is_live`: True for a session whose worker may push again."""
        self.etcd = etcd
        self.server_id = server_id
        self.incarnation = str(incarnation)
        self.process = LoopProcess(etcd.clock, f"{server_id}#{incarnation}")
        self.store = SegmentStore()
        self.shards = SimShardHost(self, is_live)
        self.peers = peers
        self.received_s = etcd.clock.now_s
        holdings = cast("Any", SimHoldings(self))
        keyspace = cast("Any", SimKeyspace(etcd, self.process))
        directory = cast("Any", SimDirectory(self))
        self._upkeep = WeightUpkeep(server_id, holdings, directory, cast("Any", None), None)
        self._records = SeriesRecords(keyspace, holdings, self._upkeep)

    def start(self) -> None:
        self.process.start(self._serve())

    async def _serve(self) -> None:
        async with self._records:
            await asyncio.gather(self._upkeep.work_for_ever(), self._sweep(), self._register())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(5.0)
            self.store.sweep(self.process.now_s)

    async def _register(self) -> None:
        record = json.dumps({"address": self.server_id, "incarnation": self.incarnation}).encode()
        key = keys.server(self.server_id)
        while True:
            if self.etcd.reaches(self.process):
                self.received_s = self.etcd.clock.now_s
                if self.peers.get(self.server_id) is self:
                    self.etcd.put_if_absent(Put(key, record))
            await asyncio.sleep(BEAT_S)

    def look_listed(self) -> None:
        """End the registration if the server has had no contact to etcd for LISTED_FOR_S."""
        if self.etcd.clock.now_s - self.received_s > LISTED_FOR_S:
            self.unlist()

    def unlist(self) -> None:
        key = keys.server(self.server_id)
        self.etcd.do(lambda: self.etcd.memory.transact((), (Delete(key),)))

    def has(self, series: str, digest: bytes) -> bool:
        return self.store.get(series, digest) is not None

    def call(
        self, caller: LoopProcess, make: Callable[[], Any], timeout_s: float
    ) -> Awaitable[Any]:
        """Call this server from another process."""
        return remote(self.etcd.network, caller, self.process, make, timeout_s)

    # --- calls that the server answers ---

    async def put(
        self,
        series: str,
        segment: SimSegment,
        origin: SegmentOrigin,
        chain: list[str],
        *,
        replaces: bool = False,
    ) -> list[str]:
        """Store a segment, and pass it on along the chain. Returns the servers that have it.

        With `replaces`, segments of the rank for the same publication are released first.
        """
        if replaces:
            earlier = frozenset([origin.publication])
            self.store.abandon(series, origin.rank, origin.epoch, earlier)
        self.store.admit(series, segment.digest, origin)
        await asyncio.sleep(self.etcd.clock.random.random() * 0.3)
        self.store.admit(series, segment.digest, origin)
        self.store.insert(series, cast("Any", segment), origin, self.process.now_s)
        holders = [self.server_id]
        if chain:
            peer = self.peers.get(chain[0])
            if peer is not None:
                with suppress(Unavailable):  # the reply lists the servers that have it
                    holders += await peer.call(
                        self.process,
                        lambda: peer.put(series, segment, origin, chain[1:], replaces=replaces),
                        CALL_S,
                    )
        return holders

    async def fetch(self, series: str, digest: bytes) -> SimSegment:
        await asyncio.sleep(self.etcd.clock.random.random() * 0.2)
        found = self.store.get(series, digest)
        if found is None:
            raise VersionGone(f"{self.server_id} has no such segment")
        return cast("SimSegment", found)

    async def holds(self, request: pb.HoldsSegmentsRequest) -> pb.HoldsSegmentsReply:
        held = [each for each in request.digests if self.has(request.series, each)]
        return pb.HoldsSegmentsReply(held=held)


class SimHoldings:
    """Holdings of a server, for its records and upkeep."""

    def __init__(self, server: SimServer) -> None:
        self._server = server

    def follow(self, series: str, newest: Position, named: dict[bytes, Position]) -> None:
        self._server.store.follow(series, newest, named, self._server.process.now_s)

    def forget(self, series: str) -> None:
        self._server.store.forget(series)

    def holds(self, series: str, digest: bytes) -> bool:
        return self._server.has(series, digest)

    async def copy(
        self, series: str, digest: bytes, num_bytes: int, source: pb.StoreServer
    ) -> None:
        server = self._server
        peer = server.peers.get(source.id)
        if peer is None:
            raise Unavailable(f"{source.id} is not there")
        segment = await peer.call(server.process, lambda: peer.fetch(series, digest), CALL_S)
        server.store.insert(series, segment, None, server.process.now_s)


class SimDirectory:
    """Directory of servers, whose addresses are their ids."""

    def __init__(self, server: SimServer) -> None:
        self._server = server

    def address_of(self, server_id: str) -> str | None:
        return server_id if server_id in self._server.peers else None


class SimCalls:
    """`ServerCalls` of a coordinator's process."""

    def __init__(self, process: LoopProcess, servers: "dict[str, SimServer]") -> None:
        self._process = process
        self._servers = servers

    async def call_on(
        self, service: object, address: str, method: object, request: Any, timeout_s: float
    ) -> Any:
        server = self._found(address)
        return await server.call(self._process, lambda: server.holds(request), timeout_s)

    async def call(
        self, address: str, method: Callable[[Any], str], request: Any, timeout_s: float
    ) -> Any:
        """Call a method of a server's `ShardSnapshots`."""
        server = self._found(address)
        name = method(_MethodNames()).lower()
        # A copy, as over the wire: the caller may change its own message later.
        sent = type(request).FromString(request.SerializeToString())
        return await server.call(
            self._process, lambda: getattr(server.shards, name)(sent), timeout_s
        )

    def _found(self, address: str) -> SimServer:
        server = self._servers.get(address)
        if server is None:
            raise Unavailable(f"no server listens at {address}")
        return server


class _MethodNames:
    """A stub whose methods are their own names."""

    def __getattr__(self, name: str) -> str:
        return name
