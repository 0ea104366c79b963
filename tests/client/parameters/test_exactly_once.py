"""Connections that break at any byte, in either direction, neither lose nor repeat a push."""

import asyncio
import random
from array import array
from contextlib import closing

import pytest
from support.clusters.parameter_servers import ParameterServers

from shoal_client.bulk import bulk_transport
from shoal_client.bulk.bulk_transport import connect
from shoal_client.bulk.connection import BulkConnection
from shoal_client.parameters.dense import ParameterClient
from shoal_client.parameters.table_rows import Gradients, route
from shoal_client.parameters.tables import TableClient
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.parameters_pb2 import OpenBulkReply
from shoal_proto.v1.shards_pb2 import ParameterSpec
from shoal_proto.v1.tables_pb2 import Initialiser, RowOptimizer, TableSpec

NUM_ELEMENTS = 20_000
NUM_PUSHES = 12
SCHEMA = [ParameterSpec(name="w", shape=[NUM_ELEMENTS], dtype="float32")]
MOMENTUM = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0, momentum=0.5)])

NUM_TABLE_SHARDS = 8
TABLE = TableSpec(
    name="t",
    dim=32,
    dtype="float32",
    initialiser=Initialiser(kind="constant", center=0.0),
    optimizer=RowOptimizer(kind="sgd", lr=1.0, momentum=0.5),
    num_shards=NUM_TABLE_SHARDS,
)


class BreakingProxy:
    """Forwards bytes between client and server until a given number has passed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._left_bytes = 1 << 60
        self._tasks: set[asyncio.Task[None]] = set()
        self.target_port = 0
        self.breaks = 0

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def arm(self) -> None:
        """Break after some bytes of the next push; a whole push is about four times 80 kB."""
        self._left_bytes = self._rng.randrange(1, 240_000)

    async def disarm(self) -> None:
        self._left_bytes = 1 << 60

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        try:
            await asyncio.wait(
                [
                    asyncio.create_task(self._pass_on(reader, to_writer)),
                    asyncio.create_task(self._pass_on(to_reader, writer)),
                ],
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            writer.transport.abort()
            to_writer.transport.abort()
            self._tasks.discard(task)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(16384):
                passed = data[: self._left_bytes]
                self._left_bytes -= len(passed)
                writer.write(passed)
                await writer.drain()
                if len(passed) < len(data) or self._left_bytes == 0:
                    self.breaks += 1
                    self._left_bytes = 1 << 60
                    return
        except ConnectionError:
            return


def behind(
    proxy: BreakingProxy,
    servers: ParameterServers,
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Start the only server, reached by one transport only through the proxy."""
    port = servers.run(proxy.start())
    if transport == "grpc":
        proxy.target_port = servers.add("ps-0", advertise=f"127.0.0.1:{port}").port
    else:
        servers.add("ps-0")

    def by_proxy(
        offer: OpenBulkReply, address: str, largest_bytes: int, num_parts: int
    ) -> BulkConnection | None:
        proxy.target_port, offer.port = offer.port, port
        return connect(offer, address, largest_bytes, num_parts)

    monkeypatch.setattr(bulk_transport, "connect", by_proxy)


@pytest.mark.sampled()
@pytest.mark.parametrize("transport", ["grpc", "tcp"])
@pytest.mark.parametrize("seed", range(6))
def test_each_push_counts_once_over_broken_connections(
    seed: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values are those of all pushes applied once, in order."""
    with ParameterServers(0) as servers:
        proxy = BreakingProxy(random.Random(seed))
        behind(proxy, servers, transport, monkeypatch)
        token = servers.admit("w0")
        client = ParameterClient(
            [servers.coordinator], lambda: token, timeout_s=30.0, transport=transport
        )
        client.place(SCHEMA)
        values = memoryview(array("f", [0.0]) * NUM_ELEMENTS).cast("B")
        client.create(MOMENTUM, {"w": values})
        gradient = memoryview(array("f", [-1.0]) * NUM_ELEMENTS).cast("B")
        client.pull({"w": values})
        retries = 0
        expected, speed = 0.0, 0.0
        for _ in range(NUM_PUSHES):
            servers.run(proxy.arm())
            retries += client.push({"w": gradient}, into={"w": values}).retries
            speed = 0.5 * speed + 1.0
            expected += speed
            assert set(values.cast("f")) == {array("f", [expected])[0]}
        servers.run(proxy.disarm())
        client.close()
        servers.run(proxy.stop())
        assert retries > 0
        assert proxy.breaks > 0


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("transport", ["grpc", "tcp"])
@pytest.mark.parametrize("seed", range(3))
def test_each_push_of_rows_counts_once_over_broken_connections(
    seed: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ParameterServers(0) as servers:
        proxy = BreakingProxy(random.Random(seed))
        behind(proxy, servers, transport, monkeypatch)
        token = servers.admit("w0")
        with (
            closing(ParameterClient([servers.coordinator], lambda: token)) as parameters,
            closing(
                TableClient(
                    [servers.coordinator], lambda: token, timeout_s=30.0, transport=transport
                )
            ) as client,
        ):
            parameters.place([], [TABLE])
            client.fetch_map()
            ids = {
                ("t", i): ids.tobytes() for i, ids in route(range(600), NUM_TABLE_SHARDS).items()
            }
            retries = 0
            expected, speed = 0.0, 0.0
            for _ in range(NUM_PUSHES):
                servers.run(proxy.arm())
                found = client.look_up(ids)
                retries += client.push(
                    {
                        where: Gradients(
                            ids=ids[where],
                            births=rows.births,
                            gradients=array("f", [-1.0] * (len(rows.values) // 4)).tobytes(),
                            base_version=rows.version,
                            base_epoch=rows.epoch,
                        )
                        for where, rows in found.items()
                    }
                ).retries
                speed = 0.5 * speed + 1.0
                expected += speed
                seen = {v for rows in client.look_up(ids).values() for v in array("f", rows.values)}
                assert seen == {array("f", [expected])[0]}
            servers.run(proxy.disarm())
            servers.run(proxy.stop())
            assert retries > 0
            assert proxy.breaks > 0
