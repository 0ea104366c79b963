"""Stand-ins for parameter servers, which answer a coordinator's questions about segments."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from support.clusters.memory_store import MemoryStore

from shoal_proto.v1 import weights_pb2 as pb
from shoal_proto.v1.weights_pb2_grpc import (
    WeightStoreServicer,
    add_WeightStoreServicer_to_server,
)
from shoal_server.etcd import keys
from shoal_server.serving.rpc import Context, bind, new_server


class SegmentStore(WeightStoreServicer):
    """Registered server that has the segments that a test gives it."""

    def __init__(self, server_id: str) -> None:
        self.server_id = server_id
        self.held: set[bytes] = set()
        self.durable: set[bytes] = set()
        self.writes_to_disk = False
        self.renewed: set[tuple[int, int]] = set()
        """Publications whose segments were to be kept, by epoch and number."""

    async def Holds(
        self, request: pb.HoldsSegmentsRequest, context: Context
    ) -> pb.HoldsSegmentsReply:
        self.renewed.add((request.epoch, request.publication))
        held = [each for each in request.digests if each in self.held]
        return pb.HoldsSegmentsReply(
            held=held,
            durable=[each for each in held if each in self.durable],
            writes_to_disk=self.writes_to_disk,
        )

    async def register(self, store: MemoryStore, address: str, incarnation: str = "1") -> None:
        """Write the registration of this server into etcd, with that incarnation."""
        record = {"address": address, "incarnation": incarnation}
        await store.put(keys.server(self.server_id), json.dumps(record).encode())

    @asynccontextmanager
    async def serving(self, store: MemoryStore) -> AsyncIterator["SegmentStore"]:
        """Serve, and stay registered, while the block runs."""
        server = new_server()
        address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
        add_WeightStoreServicer_to_server(self, server)
        await server.start()
        await self.register(store, address)
        try:
            yield self
        finally:
            await store.delete(keys.server(self.server_id))
            await server.stop(None)
