"""Readers that pass on the segments that they fetch."""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import grpc
import pytest
from support.clusters.parameter_cluster import ParameterCluster
from support.processes.few_files import few_files
from support.processes.served_process import awaited
from support.weights import halting_relay
from support.weights.publishing_script import LIMIT_S, SERIES, Script, contents
from support.weights.segments import segment_of

from shoal_client.connection.coordinators import CHANNEL_OPTIONS
from shoal_client.weights.leases import ReaderLeases
from shoal_client.weights.reader import Base, SeriesReader
from shoal_client.weights.relay import Relay
from shoal_client.weights.stores import RelaySource, WeightStores
from shoal_proto import CHUNK_BYTES
from shoal_proto.errors import (
    AccessDenied,
    ChecksumMismatch,
    InvalidSpec,
    Overloaded,
    Unavailable,
)
from shoal_proto.segments.digests import chunk_digests, root_digest
from shoal_proto.segments.sealed import Segment, SegmentWriter
from shoal_proto.segments.transfer import StagedSegment
from shoal_proto.v1 import weights_pb2 as pb
from shoal_proto.v1.weights_pb2 import StoreServer

HOST = "127.0.0.1"
WAYS = {"descriptor": True, "socket": False}


@pytest.fixture
def relay() -> Iterator[Relay]:
    with closing(Relay(SERIES, HOST)) as relay:
        yield relay


def fetched(relay: Relay, digest: bytes, *, may_be_local: bool, series: str = SERIES) -> Segment:
    """The segment as another reader gets it."""
    return fetched_from(relay.address, digest, may_be_local=may_be_local, series=series)


def fetched_from(
    address: str, digest: bytes, *, may_be_local: bool, series: str = SERIES
) -> Segment:
    server = StoreServer(id="relay", address=address)
    stores = WeightStores(series, may_be_local=may_be_local, of_relays=True)
    with closing(stores):
        return stores.fetch([server], StagedSegment(digest), LIMIT_S)


@pytest.mark.parametrize("may_be_local", WAYS.values(), ids=WAYS.keys())
def test_a_relay_passes_on_its_segments(relay: Relay, may_be_local: bool) -> None:
    """Relay and child on one host share the memory."""
    segment = segment_of(os.urandom(2 * CHUNK_BYTES + 3))
    with relay.version([segment.digest]):
        relay.add(segment)
    found = fetched(relay, segment.digest, may_be_local=may_be_local)
    assert found.view() == segment.view()
    assert os.path.sameopenfile(found.descriptor, segment.descriptor) == may_be_local


def test_a_relay_that_can_open_no_further_file_names_the_limit(relay: Relay) -> None:
    """A relay has another descriptor of each segment, also while the segment arrives."""
    whole, data = segment_of(b"whole"), b"arriving"
    of_chunks = chunk_digests(data)
    staged = relay.staged(root_digest(of_chunks))
    with few_files(0), pytest.raises(Overloaded, match="ulimit -n"):
        relay.add(whole)
    with few_files(1), pytest.raises(Overloaded, match="ulimit -n"):
        staged.open(of_chunks, len(data))
    assert staged.descriptor is not None, "the only further file"


def arrive(staged: StagedSegment, data: bytes, index: int) -> None:
    buffer = staged.chunk_buffer(index)
    buffer[:] = data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
    staged.verify(index, buffer)


def test_chunks_are_passed_on_as_soon_as_they_arrive(relay: Relay) -> None:
    data = os.urandom(2 * CHUNK_BYTES + 3)
    digests = chunk_digests(data)
    digest = segment_of(data).digest
    has_chunk = threading.Semaphore(0)
    own = StagedSegment(digest, on_progress=has_chunk.release)
    with (
        closing(RelaySource(SERIES, relay.address, may_be_local=False)) as source,
        ThreadPoolExecutor(1) as pool,
        relay.version([digest]),
    ):
        staged = relay.staged(digest)
        found = pool.submit(source.fetch, own, LIMIT_S)
        staged.open(digests, len(data))
        assert has_chunk.acquire(timeout=LIMIT_S)
        for index in range(3):
            assert not found.done()
            arrive(staged, data, index)
            while not own.has(index):
                assert has_chunk.acquire(timeout=LIMIT_S)
        relay.add(staged.seal())
        segment = found.result()
        assert segment is not None
        assert segment.view() == data


def test_a_segment_given_up_by_a_relay_is_not_awaited(relay: Relay) -> None:
    data = os.urandom(CHUNK_BYTES + 3)
    digest = segment_of(data).digest
    with (
        closing(RelaySource(SERIES, relay.address, may_be_local=False)) as source,
        ThreadPoolExecutor(1) as pool,
    ):
        own = StagedSegment(digest)
        with pytest.raises(ZeroDivisionError), relay.version([digest]):
            staged = relay.staged(digest)
            staged.open(chunk_digests(data), len(data))
            arrive(staged, data, 0)
            found = pool.submit(source.fetch, own, LIMIT_S)
            awaited(lambda: own.has(0), LIMIT_S, "the first chunk")
            raise ZeroDivisionError
        assert found.result(LIMIT_S) is None
        assert own.received_bytes == CHUNK_BYTES


def test_the_memory_of_a_dropped_segment_is_freed_at_once(relay: Relay) -> None:
    """Regression: it stayed in use until Python's next cyclic garbage collection, beside the memory
    of the next version."""
    data = os.urandom(CHUNK_BYTES + 3)
    digest = segment_of(data).digest
    gc.disable()
    try:
        with relay.version([digest]):
            staged = relay.staged(digest)
            staged.open(chunk_digests(data), len(data))
            for index in range(2):
                arrive(staged, data, index)
            segment = staged.seal()
            relay.add(segment)
        del staged
        num_held = num_descriptors(segment)
        with relay.version([]):
            pass
        assert num_descriptors(segment) == num_held - 1
    finally:
        gc.enable()


def test_a_relay_holds_one_version(relay: Relay) -> None:
    """A relay drops the earlier version once a new one is fetched. If the fetch fails, the relay
    keeps the earlier one."""
    old, shared, new = (segment_of(os.urandom(100)) for _ in range(3))
    with relay.version([]):
        relay.add(old)
        relay.add(shared)
    with pytest.raises(ZeroDivisionError), relay.version([]):
        relay.add(new)
        raise ZeroDivisionError
    for each in (old, shared):
        assert fetched(relay, each.digest, may_be_local=True).view() == each.view()
    with relay.version([]):
        relay.add(shared)
        relay.add(new)
    for each in (shared, new):
        assert fetched(relay, each.digest, may_be_local=True).view() == each.view()
    with pytest.raises(Unavailable, match="does not hold"):
        fetched(relay, old.digest, may_be_local=True)


@pytest.mark.long
def test_pings_do_not_close_a_connection_to_a_relay(relay: Relay) -> None:
    """A relay accepts the pings of its clients, one every two seconds; by default a gRPC server
    closes such a connection."""
    has_been_ready, has_left = threading.Event(), threading.Event()

    def note(state: grpc.ChannelConnectivity) -> None:
        if state is grpc.ChannelConnectivity.READY:
            has_been_ready.set()
        elif has_been_ready.is_set():
            has_left.set()

    with grpc.insecure_channel(relay.address, CHANNEL_OPTIONS) as channel:
        channel.subscribe(note, try_to_connect=True)
        assert has_been_ready.wait(LIMIT_S)
        assert not has_left.wait(12.0)


def test_another_series_is_refused(relay: Relay) -> None:
    segment = segment_of(b"bytes")
    with relay.version([]):
        relay.add(segment)
    with pytest.raises(AccessDenied, match="its own series"):
        fetched(relay, segment.digest, may_be_local=True, series="svc/other")


@pytest.mark.parametrize("may_be_local", WAYS.values(), ids=WAYS.keys())
def test_bytes_from_a_relay_are_verified(relay: Relay, may_be_local: bool) -> None:
    """The relay's bytes do not match the digests that it gives."""
    segment = segment_of(b"what was published")
    writer = SegmentWriter(segment.num_bytes)
    forged = writer.seal(segment.chunk_digests)
    assert forged.digest == segment.digest
    with relay.version([]):
        relay.add(forged)
    with pytest.raises(ChecksumMismatch):
        fetched(relay, segment.digest, may_be_local=may_be_local)


# --- with a cluster ---


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ParameterCluster]:
    with ParameterCluster(tmp_path, 2) as cluster:
        yield cluster


@pytest.fixture
def script(cluster: ParameterCluster) -> Iterator[Script]:
    with closing(Script(cluster, 2)) as script:
        yield script


def relaying(cluster: ParameterCluster, name: str, *, may_be_local: bool = False) -> SeriesReader:
    return SeriesReader(
        [cluster.coordinator.grpc], SERIES, name, may_be_local=may_be_local, relay_at=HOST
    )


@pytest.mark.long
def test_servers_send_a_version_once_to_all_relays(
    cluster: ParameterCluster, script: Script
) -> None:
    """Readers fetch at the same time, except one that comes later. The second version changes one
    part."""
    same, parts = os.urandom(10), [os.urandom(3 * CHUNK_BYTES) for _ in range(2)]
    with ExitStack() as stack:
        readers = [stack.enter_context(closing(relaying(cluster, f"reader-{n}"))) for n in range(8)]
        late = readers.pop()
        pool = stack.enter_context(ThreadPoolExecutor(len(readers)))

        def install(reader: SeriesReader) -> list[bytes]:
            record = reader.wait(reader.installed, LIMIT_S)
            segments = reader.fetch(record)
            reader.report(record.number, record.digest)
            return contents(segments)

        for number, part in enumerate(parts, 1):
            script.publish(part, same)
            assert list(pool.map(install, readers)) == [[part, same]] * len(readers)
            every = [*readers, late] if number == 2 else readers
            if number == 2:
                assert install(late) == [part, same]
            from_servers = sum(each.fetched_bytes - each.relayed_bytes for each in every)
            # The servers send the bytes once, or some of them twice if a busy machine delays a
            # relay.
            num_bytes = number * (len(part) + len(same))
            assert num_bytes <= from_servers <= 2 * num_bytes


@pytest.mark.long
def test_a_relay_on_a_servers_host_passes_no_segment_on(
    cluster: ParameterCluster, script: Script
) -> None:
    """The relay's memory is the server's, and the server must stay free to drop it."""
    parts = [os.urandom(CHUNK_BYTES), b"bytes"]
    record = script.publish(*parts)
    with closing(relaying(cluster, "beside", may_be_local=True)) as beside:
        assert contents(beside.fetch(beside.wait(0, LIMIT_S))) == parts
        beside.report(record.number, record.digest)
        with closing(relaying(cluster, "apart")) as apart:
            assert contents(apart.fetch(record)) == parts
            assert apart.relayed_bytes == 0


@pytest.mark.long
def test_slices_from_relays_are_refused(cluster: ParameterCluster, script: Script) -> None:
    script.publish(os.urandom(2 * CHUNK_BYTES), b"bytes")
    with (
        closing(relaying(cluster, "slices")) as reader,
        pytest.raises(InvalidSpec, match="whole segments"),
    ):
        reader.fetch(reader.wait(0, LIMIT_S), [0], {0: [(0, 1)]})


@pytest.mark.long
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_failed_relay_costs_a_retry(
    cluster: ParameterCluster,
    script: Script,
    sent: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks that the relay sent are kept; the rest comes from a server."""
    verify, has_two_chunks = StagedSegment.verify, threading.Event()

    def verify_noted(staged: StagedSegment, index: int, chunk: memoryview) -> None:
        verify(staged, index, chunk)
        if index == 1:
            has_two_chunks.set()

    part = os.urandom(6 * CHUNK_BYTES)
    record = script.publish(part, b"bytes")
    command = [sys.executable, halting_relay.__file__, cluster.coordinator.grpc, SERIES]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        monkeypatch.setattr(StagedSegment, "verify", verify_noted)
        with closing(relaying(cluster, "child")) as child, ThreadPoolExecutor(1) as pool:
            found = pool.submit(child.fetch, record)
            assert has_two_chunks.wait(LIMIT_S)
            process.send_signal(sent)
            assert contents(found.result(LIMIT_S)) == [part, b"bytes"]
            assert child.relayed_bytes >= 2 * CHUNK_BYTES
            assert child.fetched_bytes - child.relayed_bytes <= len(part) - 2 * CHUNK_BYTES + 5
    finally:
        process.kill()
        process.wait()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(Unavailable, match="cannot relay"):
        Relay(SERIES, "192.0.2.1")


def test_a_difference_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a difference that fails to arrive is freed, and no other reader waits for the
    difference."""
    old, new, difference = (segment_of(os.urandom(CHUNK_BYTES)) for _ in range(3))
    before, after = (one_segment(number, s) for number, s in enumerate((old, new), 1))
    view = pb.SeriesView(versions=[after], head=2, servers=[StoreServer(id="one", address="-")])
    staged_before: list[StagedSegment] = []
    closed: list[StagedSegment] = []
    close = StagedSegment.close

    def close_noted(staged: StagedSegment) -> None:
        closed.append(staged)
        close(staged)

    def break_off(
        stores: object, holders: object, staged: StagedSegment, timeout_s: float
    ) -> Segment:
        if staged.digest == new.digest:
            return new
        staged.open(chunk_digests(difference.view()), difference.num_bytes)
        staged_before.append(staged)
        raise Unavailable("the connection broke")

    reader = SeriesReader(["-"], SERIES, "r", apply_difference=_not_applied, relay_at=HOST)
    monkeypatch.setattr(StagedSegment, "close", close_noted)
    monkeypatch.setattr(reader, "view", lambda timeout_s: view)
    monkeypatch.setattr(
        reader, "layout", lambda record, timeout_s: pb.Layout(segment_bytes=[CHUNK_BYTES])
    )
    monkeypatch.setattr(ReaderLeases, "take", lambda leases, number, timeout_s: None)
    reply = pb.DifferenceReply(digest=difference.digest)
    monkeypatch.setattr(WeightStores, "difference", lambda *_: reply)
    with closing(reader):
        # Other readers reach the relay, so only now are the calls to servers replaced.
        with monkeypatch.context() as patch:
            patch.setattr(WeightStores, "is_local", lambda stores, holders: False)
            patch.setattr(WeightStores, "fetch", break_off)
            made = reader.fetch(after, base=Base(before, {0: old}))
        assert contents(made) == [bytes(new.view())]
        assert len(staged_before) == 1 and closed == staged_before
        with pytest.raises(Unavailable, match="does not hold the segment"):
            fetched_from(reader.relay_address, difference.digest, may_be_local=False)


def test_a_relay_that_is_closed_during_a_fetch_holds_no_segment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another lease finds meanwhile that a server is on this host now. The memory is the server's,
    which must stay free to drop it."""
    segment, is_local = segment_of(os.urandom(CHUNK_BYTES)), False
    record = one_segment(1, segment)
    view = pb.SeriesView(versions=[record], head=1, servers=[StoreServer(id="one", address="-")])

    def lease_meanwhile(*_: object) -> Segment:
        nonlocal is_local
        is_local = True
        reader.lease(1)
        return segment

    reader = SeriesReader(["-"], SERIES, "r", relay_at=HOST)
    monkeypatch.setattr(reader, "view", lambda timeout_s: view)
    monkeypatch.setattr(ReaderLeases, "take", lambda leases, number, timeout_s: None)
    monkeypatch.setattr(WeightStores, "is_local", lambda stores, holders: is_local)
    monkeypatch.setattr(WeightStores, "fetch", lease_meanwhile)
    content, num_held = bytes(segment.view()), num_descriptors(segment)
    with closing(reader):
        assert reader.relay_address
        assert contents(reader.fetch(record)) == [content]
        assert not reader.relay_address
        assert num_descriptors(segment) == num_held


def one_segment(number: int, segment: Segment) -> pb.VersionRecord:
    """Return the record of a version with one segment, which server "one" holds."""
    recorded = pb.Segment(digest=segment.digest, num_bytes=segment.num_bytes, holders=["one"])
    return pb.VersionRecord(number=number, segments=[recorded])


def num_descriptors(segment: Segment) -> int:
    """Count the descriptors of this process that keep the segment's memory in use."""
    memory = os.fstat(segment.descriptor)
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += os.path.samestat(each.stat(), memory)
    return found


def _not_applied(*_: memoryview) -> None:
    raise AssertionError("no difference has arrived")
