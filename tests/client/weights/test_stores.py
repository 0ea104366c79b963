"""Segments to and from real parameter servers, by descriptor and over sockets."""

import os
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import grpc
import pytest
from support.clusters.bulk_frames import RawConnection
from support.clusters.parameter_servers import ParameterServers, servers_fixture
from support.weights.segments import segment_of

from shoal_client.weights.stores import WeightStores
from shoal_proto import CHUNK_BYTES, bulk
from shoal_proto.bulk import FrameKind
from shoal_proto.errors import (
    AccessDenied,
    ChecksumMismatch,
    MalformedMessage,
    Overloaded,
    Unavailable,
)
from shoal_proto.segments.digests import DIGEST_BYTES
from shoal_proto.segments.sealed import Segment
from shoal_proto.segments.transfer import SegmentConnection, StagedSegment
from shoal_proto.v1.weights_pb2 import (
    OpenSegmentsRequest,
    PutSegmentReply,
    PutSegmentRequest,
    StoreServer,
)
from shoal_proto.v1.weights_pb2 import Segment as Described
from shoal_proto.v1.weights_pb2_grpc import WeightStoreStub
from shoal_server.parameters.process import WEIGHT_THREADS

SERIES = "job/policy"
LIMIT_S = 30.0
WAYS = {"descriptor": True, "socket": False}


servers = servers_fixture(3, "module")


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def stores(request: pytest.FixtureRequest) -> Iterator[WeightStores]:
    with closing(WeightStores(SERIES, may_be_local=request.param)) as stores:
        yield stores


def drawn(num_bytes: int) -> Segment:
    return segment_of((os.urandom(1 << 16) * (num_bytes // (1 << 16) + 1))[:num_bytes])


def at(servers: ParameterServers, *numbers: int) -> list[StoreServer]:
    return [StoreServer(id=f"ps-{n}", address=servers.servers[f"ps-{n}"].address) for n in numbers]


def request(segment: Segment, chain: list[StoreServer], **fields: Any) -> PutSegmentRequest:
    """A put request; by default of a rank without earlier puts."""
    described = Described(digest=segment.digest, num_bytes=segment.num_bytes)
    rank = {"rank": int.from_bytes(segment.digest[:3])}
    named: dict[str, Any] = {"series": SERIES, "epoch": 1, "publication": 1} | rank | fields
    return PutSegmentRequest(segment=described, chain=chain, **named)


def put(
    stores: WeightStores, segment: Segment, chain: list[StoreServer], **fields: Any
) -> PutSegmentReply:
    return stores.put(chain[0], request(segment, chain[1:], **fields), segment, LIMIT_S)


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 17])
def test_a_segment_arrives_as_it_was_sent(
    servers: ParameterServers, stores: WeightStores, num_bytes: int
) -> None:
    segment, chain = drawn(num_bytes), at(servers, 0)
    assert put(stores, segment, chain).holders == ["ps-0"]
    found = stores.fetch(chain, StagedSegment(segment.digest), LIMIT_S)
    assert found.view() == segment.view()
    assert found.digest == segment.digest
    assert found.is_whole


def test_a_chain_passes_a_segment_on(servers: ParameterServers, stores: WeightStores) -> None:
    segment, chain = drawn(CHUNK_BYTES + 1), at(servers, 0, 1, 2)
    assert put(stores, segment, chain).holders == ["ps-0", "ps-1", "ps-2"]
    for holder in chain:
        found = stores.fetch([holder], StagedSegment(segment.digest), LIMIT_S)
        assert found.view() == segment.view()


def test_servers_pass_on_to_one_another_at_once(
    servers: ParameterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each server gets puts of as many ranks as it has threads, and none waits for another. The
    first servers have the segments already, so that all begin to pass them on together."""
    opened = SegmentConnection.open.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        SegmentConnection,
        "open",
        classmethod(
            lambda of, *args, **named: opened(of, *args, **{**named, "may_be_local": False})
        ),
    )
    # Servers keep their connections for further calls about the same series.
    series = "job/socket"
    ranks = [rank % 3 for rank in range(3 * WEIGHT_THREADS)]
    together = threading.Barrier(len(ranks))

    def put_along(first: int) -> list[str]:
        segment, chain = drawn(CHUNK_BYTES), at(servers, first, (first + 1) % 3, (first + 2) % 3)
        with closing(segment), closing(WeightStores(series, may_be_local=False)) as stores:
            put(stores, segment, chain[:1], series=series)
            together.wait(LIMIT_S)
            return list(put(stores, segment, chain, series=series).holders)

    with ThreadPoolExecutor(len(ranks)) as threads:
        assert all(len(holders) == 3 for holders in threads.map(put_along, ranks))


def test_a_put_may_be_repeated_along_another_chain(
    servers: ParameterServers, stores: WeightStores
) -> None:
    segment = drawn(CHUNK_BYTES)
    assert put(stores, segment, at(servers, 0)).holders == ["ps-0"]
    assert put(stores, segment, at(servers, 0, 1)).holders == ["ps-0", "ps-1"]


def test_a_lost_server_of_a_chain_is_not_among_the_holders(
    servers: ParameterServers, stores: WeightStores
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    gone = StoreServer(id="ps-9", address=f"127.0.0.1:{port}")
    assert put(stores, drawn(10), [*at(servers, 0), gone]).holders == ["ps-0"]


def test_one_host_shares_the_memory_of_a_segment(servers: ParameterServers) -> None:
    """Inodes are equal: no byte was copied in either direction."""
    segment, chain = drawn(CHUNK_BYTES), at(servers, 0, 1)
    with closing(WeightStores(SERIES)) as stores:
        put(stores, segment, chain)
        for holder in chain:
            found = stores.fetch([holder], StagedSegment(segment.digest), LIMIT_S)
            assert os.path.sameopenfile(found.descriptor, segment.descriptor)


def test_only_the_requested_chunks_are_sent_over_a_socket(servers: ParameterServers) -> None:
    segment, chain = drawn(4 * CHUNK_BYTES), at(servers, 0)
    with closing(WeightStores(SERIES, may_be_local=False)) as stores:
        put(stores, segment, chain)
        staged = StagedSegment(segment.digest, [range(1, 2), range(3, 4)])
        found = stores.fetch(chain, staged, LIMIT_S)
    assert staged.received_bytes == 2 * CHUNK_BYTES
    assert not found.is_whole
    for index in (1, 3):
        chunk = slice(index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES)
        assert found.view()[chunk] == segment.view()[chunk]


def test_a_segment_missing_at_one_holder_is_fetched_from_another(
    servers: ParameterServers, stores: WeightStores
) -> None:
    segment = drawn(CHUNK_BYTES)
    put(stores, segment, at(servers, 1))
    found = stores.fetch(at(servers, 0, 2, 1), StagedSegment(segment.digest), LIMIT_S)
    assert found.view() == segment.view()
    with pytest.raises(Unavailable, match="does not hold"):
        stores.fetch(at(servers, 0, 2), StagedSegment(segment.digest), LIMIT_S)


def test_bytes_that_do_not_match_the_digest_are_refused(
    servers: ParameterServers, stores: WeightStores
) -> None:
    segment, other = drawn(CHUNK_BYTES), drawn(CHUNK_BYTES)
    with pytest.raises(ChecksumMismatch):
        stores.put(at(servers, 0)[0], request(segment, []), other, LIMIT_S)
    for digest in (segment.digest, other.digest):
        with pytest.raises(Unavailable, match="does not hold"):
            stores.fetch(at(servers, 0), StagedSegment(digest), LIMIT_S)


def test_digests_are_computed_once_on_one_host_and_checked_on_each_arrival_by_network(
    servers: ParameterServers,
) -> None:
    """Sealed memory cannot change on its way, so servers on its publisher's host use the digests
    that the publisher has computed. Bytes that arrive through a socket are digested again."""
    segment = drawn(CHUNK_BYTES)
    claimed = Segment(os.dup(segment.descriptor), CHUNK_BYTES, b"\1" * DIGEST_BYTES)
    with closing(WeightStores(SERIES)) as stores:
        assert put(stores, claimed, at(servers, 0, 1)).holders == ["ps-0", "ps-1"]
    with (
        closing(WeightStores(SERIES, may_be_local=False)) as stores,
        pytest.raises(ChecksumMismatch),
    ):
        put(stores, claimed, at(servers, 2))


def test_digests_for_another_number_of_chunks_are_refused(servers: ParameterServers) -> None:
    segment = drawn(CHUNK_BYTES)
    claimed = Segment(os.dup(segment.descriptor), CHUNK_BYTES, bytes(2 * DIGEST_BYTES))
    with (
        closing(WeightStores(SERIES)) as stores,
        pytest.raises(MalformedMessage, match="do not match the segment's size"),
    ):
        put(stores, claimed, at(servers, 0))


def test_writable_memory_is_refused(servers: ParameterServers) -> None:
    """A publisher that could write to verified memory would make the server serve other bytes."""
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 100)
    unsealed = Segment(descriptor, 100, bytes(DIGEST_BYTES))
    with (
        closing(WeightStores(SERIES)) as stores,
        pytest.raises(MalformedMessage, match="can still be changed"),
    ):
        put(stores, unsealed, at(servers, 0))


def test_a_put_without_free_memory_is_overloaded(stores: WeightStores) -> None:
    with ParameterServers(1, memory_limit_bytes=3 * CHUNK_BYTES) as servers:
        first, second = drawn(2 * CHUNK_BYTES), drawn(2 * CHUNK_BYTES)
        put(stores, first, at(servers, 0))
        with pytest.raises(Overloaded, match="no memory left for published weights"):
            put(stores, second, at(servers, 0), publication=2)
        # The held segment stays.
        found = stores.fetch(at(servers, 0), StagedSegment(first.digest), LIMIT_S)
        assert found.view() == first.view()


def test_a_put_along_a_chain_without_free_memory_is_overloaded(
    servers: ParameterServers, stores: WeightStores
) -> None:
    segment = drawn(2 * CHUNK_BYTES)
    with (
        ParameterServers(1, memory_limit_bytes=CHUNK_BYTES) as small,
        pytest.raises(Overloaded, match="no memory left for published weights"),
    ):
        put(stores, segment, [*at(servers, 0), *at(small, 0)])
    assert put(stores, segment, at(servers, 0, 1)).holders == ["ps-0", "ps-1"]


def test_a_rank_with_too_many_undecided_puts_is_overloaded(
    servers: ParameterServers, stores: WeightStores
) -> None:
    rank = random.getrandbits(30)
    for publication in (11, 12):
        put(stores, drawn(10), at(servers, 0), publication=publication, rank=rank)
    with pytest.raises(Overloaded, match="publications \\[11, 12\\], which no version names yet"):
        put(stores, drawn(10), at(servers, 0), publication=13, rank=rank)
    # Publications that the publisher reports as abandoned do not count.
    put(stores, drawn(10), at(servers, 0), publication=13, rank=rank, abandoned=[11, 12])


def test_a_key_is_valid_only_for_its_own_series(servers: ParameterServers) -> None:
    with (
        closing(WeightStores("job/other")) as stores,
        pytest.raises(AccessDenied, match="connection is for another series"),
    ):
        put(stores, drawn(10), at(servers, 0))


def test_a_connection_closed_in_a_transfer_is_unavailable(
    servers: ParameterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that arrived are kept, and only the rest comes from another holder."""
    segment, chain = drawn(4 * CHUNK_BYTES), at(servers, 0, 1)
    open_connection, opened = SegmentConnection.open, list[SegmentConnection]()

    def noted(*given: Any, **options: Any) -> SegmentConnection:
        opened.append(open_connection(*given, **options))
        return opened[-1]

    monkeypatch.setattr(SegmentConnection, "open", noted)
    with closing(WeightStores(SERIES, may_be_local=False)) as stores:
        put(stores, segment, chain)
        staged = StagedSegment(segment.digest)
        verify, cut = staged.verify, []

        def cut_after_two(index: int, chunk: memoryview) -> None:
            verify(index, chunk)
            if index == 1 and not cut:
                cut.append(index)
                for connection in opened:
                    connection.abort()

        monkeypatch.setattr(staged, "verify", cut_after_two)
        found = stores.fetch(chain, staged, LIMIT_S)
        assert cut
        assert found.view() == segment.view()
        assert staged.received_bytes == segment.num_bytes


def test_closing_ends_a_call_in_progress(servers: ParameterServers) -> None:
    stores = WeightStores(SERIES)
    put(stores, drawn(10), at(servers, 0))
    stores.close()
    with pytest.raises(Unavailable):
        put(stores, drawn(10), at(servers, 0), publication=2)


def test_a_bulk_connection_for_segments_carries_no_other_call(servers: ParameterServers) -> None:
    with grpc.insecure_channel(at(servers, 0)[0].address) as channel:
        asked = OpenSegmentsRequest(series=SERIES)
        offer = WeightStoreStub(channel).OpenBulk(asked, timeout=LIMIT_S)
    raw = RawConnection.admitted(offer)
    raw.send(bulk.message(FrameKind.PULL, b""))
    error = raw.error()
    assert isinstance(error, MalformedMessage)
    assert "begins no call of this connection" in str(error)
