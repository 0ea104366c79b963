"""Servers that leave hand over the segments of published versions."""

import asyncio
from contextlib import closing, suppress
from dataclasses import replace

import grpc
from structlog.testing import capture_logs
from support.clusters.parameter_servers import ParameterServers, servers_fixture
from support.weights.segments import segment_of

from shoal_client.weights.stores import WeightStores
from shoal_proto.v1.weights_pb2 import HoldsSegmentsRequest, PutSegmentRequest, StoreServer
from shoal_proto.v1.weights_pb2 import Segment as Described
from shoal_proto.v1.weights_pb2_grpc import WeightStoreStub
from shoal_server.core.publications.records import PublishedSegment, PublishedVersion
from shoal_server.etcd import keys
from shoal_server.etcd.records.series import encode_version
from shoal_server.parameters.process import RunningServer, hand_over

SERIES = "job/policy"
LIMIT_S = 20.0

servers = servers_fixture(2)


def published(servers: ParameterServers, *holders: str) -> PublishedVersion:
    """Publish a version whose one segment only ps-0 has; its record names these holders."""
    with closing(segment_of(bytes(1000))) as segment, closing(WeightStores(SERIES)) as stores:
        described = Described(digest=segment.digest, num_bytes=segment.num_bytes)
        request = PutSegmentRequest(series=SERIES, epoch=1, publication=1, segment=described)
        server = StoreServer(id="ps-0", address=servers.servers["ps-0"].address)
        stores.put(server, request, segment, LIMIT_S)
        named = PublishedSegment(
            digest=segment.digest, num_bytes=segment.num_bytes, holders=holders
        )
    version = PublishedVersion(
        number=1,
        epoch=1,
        publication=1,
        step=1,
        layout_digest=b"",
        segments=(named,),
        created_unix_s=0.0,
    )
    servers.run(write(servers, version))
    servers.run(until_known(servers.servers["ps-0"]))
    return version


async def write(servers: ParameterServers, version: PublishedVersion) -> None:
    await servers.store.put(keys.series_version(SERIES, 1), encode_version(version))


async def until_known(server: RunningServer) -> None:
    """Return once the server has read that it is to hold the segment."""
    async with asyncio.timeout(LIMIT_S):
        while not server.weights.sole_copies:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await server.weights.wait_copied(server.replicas.me)


def holds(server: RunningServer, digest: bytes) -> bool:
    with grpc.insecure_channel(server.address) as channel:
        request = HoldsSegmentsRequest(series=SERIES, digests=[digest])
        return bool(WeightStoreStub(channel).Holds(request, timeout=LIMIT_S).held)


def test_a_server_leaves_once_another_has_its_published_weights(servers: ParameterServers) -> None:
    """The coordinator names the other server only after the first has begun to leave."""
    version = published(servers, "ps-0")
    (segment,) = version.segments
    other = replace(version, segments=(replace(segment, holders=("ps-0", "ps-1")),))

    async def leave() -> None:
        async with asyncio.TaskGroup() as tasks:
            leaving = tasks.create_task(hand_over(servers.servers["ps-0"], LIMIT_S))
            done, _ = await asyncio.wait([leaving], timeout=1.0)
            assert not done
            await write(servers, other)

    with capture_logs() as lines:
        servers.run(leave())
    assert not [line for line in lines if line["event"].startswith("server_stopped")]
    servers.stop("ps-0")
    assert holds(servers.servers["ps-1"], segment.digest)


def test_a_server_that_leaves_with_the_only_published_weights_names_them(
    servers: ParameterServers,
) -> None:
    """Its time is over before another server has them; later there is no other server."""
    (segment,) = published(servers, "ps-0").segments
    for _ in range(2):
        with capture_logs() as lines:
            servers.run(hand_over(servers.servers["ps-0"], 0.5))
        (line,) = [each for each in lines if each["event"] == "server_stopped_with_sole_segments"]
        assert (line["series"], line["digests"]) == (SERIES, [segment.digest.hex()])
        if "ps-1" in servers.running:
            servers.stop("ps-1")
