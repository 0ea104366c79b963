"""Versions of a series, published and read while real parts are killed and restarted."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from support.clusters.parameter_cluster import ParameterCluster
from support.processes.few_files import few_files
from support.processes.served_process import awaited
from support.weights.publishing_script import LIMIT_S, SERIES, Script, contents, layout
from support.weights.segments import segment_of

from shoal_client.weights import leases
from shoal_client.weights.reader import Base, SeriesReader
from shoal_client.weights.stores import WeightStores
from shoal_difference import codec
from shoal_proto import CHUNK_BYTES
from shoal_proto.errors import (
    DeadlineExceeded,
    Overloaded,
    Regressed,
    SeriesHeld,
    ShoalError,
    StaleEpoch,
    Unavailable,
    VersionGone,
)
from shoal_proto.segments.sealed import Segment
from shoal_proto.segments.transfer import StagedSegment
from shoal_proto.v1 import weights_pb2 as pb


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ParameterCluster]:
    with ParameterCluster(tmp_path, 3) as cluster:
        yield cluster


@pytest.fixture
def script(cluster: ParameterCluster) -> Iterator[Script]:
    with closing(Script(cluster, 2)) as script:
        yield script


@pytest.fixture
def reader(cluster: ParameterCluster) -> Iterator[SeriesReader]:
    with closing(SeriesReader([cluster.coordinator.grpc], SERIES, "reader-1")) as reader:
        yield reader


@pytest.mark.long
@pytest.mark.parametrize("may_be_local", [False, True], ids=["chunks", "descriptors"])
def test_a_version_of_more_segments_than_the_soft_limit_of_files_is_read(
    cluster: ParameterCluster, may_be_local: bool
) -> None:
    """The reader raises the limit. If it can raise it no further, it names the limit at once."""
    parts = [os.urandom(10) for _ in range(16)]
    with closing(Script(cluster, len(parts))) as script:
        record = script.publish(*parts)
        addresses = [cluster.coordinator.grpc]
        with (
            few_files(8),
            closing(SeriesReader(addresses, SERIES, "r", may_be_local=may_be_local)) as reader,
        ):
            fetched = reader.fetch(record)
            assert contents(fetched) == parts
            begun_s = time.monotonic()
            with few_files(0), pytest.raises(Overloaded, match="ulimit -n"):
                fetched += reader.fetch(record)
            assert time.monotonic() - begun_s < LIMIT_S


@pytest.mark.long
def test_readers_get_each_version_as_it_was_published(script: Script, reader: SeriesReader) -> None:
    for number in (1, 2, 3):
        parts = [os.urandom(2 * CHUNK_BYTES + 2), os.urandom(10)]
        published = script.publish(*parts)
        assert published.number == number
        record = reader.wait(newer_than=number - 1, timeout_s=LIMIT_S)
        assert record == published
        assert record.step == 10 * number
        assert contents(reader.fetch(record)) == parts
        assert [t.name for t in reader.layout(record).tensors] == ["w0", "w1"]
        reader.report(record.number, record.digest)
    awaited(lambda: _kept(reader) == [2, 3], LIMIT_S, "the first version is dropped")


@pytest.mark.long
def test_a_readers_wait_ends_at_its_limit(reader: SeriesReader) -> None:
    with pytest.raises(DeadlineExceeded, match="no newer version"):
        reader.wait(newer_than=0, timeout_s=0.5)


@pytest.mark.long
def test_a_version_of_another_series_is_gone(
    cluster: ParameterCluster, script: Script, reader: SeriesReader
) -> None:
    """The versions have the same number. Servers are not asked for the bytes again and again."""
    script.publish(b"11", b"22")
    record = reader.wait(timeout_s=LIMIT_S)
    of_another = pb.VersionRecord()
    of_another.CopyFrom(record)
    of_another.digest = bytes(32)
    of_another.segments[0].digest = bytes(32)
    with pytest.raises(VersionGone, match="is not the requested one"):
        reader.fetch(of_another, timeout_s=LIMIT_S)


@pytest.mark.long
def test_a_fetch_waits_for_a_coordinator(
    cluster: ParameterCluster,
    script: Script,
    reader: SeriesReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is away for longer than one report waits for it."""
    monkeypatch.setattr(leases, "ATTEMPT_S", 0.5)
    record = script.publish(b"11", b"22")
    assert reader.wait(timeout_s=LIMIT_S) == record
    coordinator = cluster.coordinator.process
    with ThreadPoolExecutor(1) as pool:
        coordinator.send_signal(signal.SIGSTOP)
        try:
            fetched = pool.submit(reader.fetch, record)
            with pytest.raises(TimeoutError):
                fetched.result(1.5)
        finally:
            coordinator.send_signal(signal.SIGCONT)
        assert contents(fetched.result(LIMIT_S)) == [b"11", b"22"]


@pytest.mark.long
def test_a_fetch_goes_on_while_chunks_arrive(
    script: Script, reader: SeriesReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection breaks after one chunk. The limit counts from the last chunk."""
    data, limit_s = os.urandom(6 * CHUNK_BYTES), 1.0
    record = script.publish(data, b"")
    whole = segment_of(data)

    def fetch(stores: object, holders: object, staged: StagedSegment, timeout_s: float) -> Segment:
        if staged.digest != whole.digest:
            return segment_of(b"")
        staged.open(whole.chunk_digests, whole.num_bytes)
        time.sleep(limit_s / 3)
        index = staged.missing[0]
        chunk = staged.chunk_buffer(index)
        chunk[:] = data[index * CHUNK_BYTES :][: len(chunk)]
        staged.verify(index, chunk)
        if staged.missing:
            raise Unavailable("the connection broke")
        return staged.seal()

    monkeypatch.setattr(WeightStores, "fetch", fetch)
    assert contents(reader.fetch(record, timeout_s=limit_s)) == [data, b""]


@pytest.mark.long
def test_a_fetch_ends_with_what_its_caller_raises(
    cluster: ParameterCluster, script: Script
) -> None:
    record = script.publish(os.urandom(3 * CHUNK_BYTES), b"")
    calls = threading.Semaphore(2)

    def check() -> None:
        if not calls.acquire(blocking=False):
            raise ZeroDivisionError

    addresses = [cluster.coordinator.grpc]
    with closing(SeriesReader(addresses, SERIES, "r", may_be_local=False)) as reader:
        with pytest.raises(ZeroDivisionError):
            reader.fetch(record, check=check)
        assert reader.fetched_bytes < 3 * CHUNK_BYTES


def test_an_older_version_is_not_installed(script: Script, reader: SeriesReader) -> None:
    first = script.publish(b"11", b"22")
    second = script.publish(b"33", b"44")
    reader.report(second.number, second.digest)
    with pytest.raises(Regressed):
        reader.report(first.number, first.digest)
    assert reader.installed == second.number


@pytest.mark.long
def test_a_version_without_a_lease_is_gone_and_one_with_a_lease_is_not(
    cluster: ParameterCluster, reader: SeriesReader
) -> None:
    with closing(Script(cluster, keep=1)) as script:
        first = script.publish(b"11")
        with reader.leased(first.number):
            assert contents(reader.fetch(first)) == [b"11"]
        script.publish(b"22")
        awaited(lambda: _kept(reader) == [2], LIMIT_S, "the first version is dropped")
        with pytest.raises(VersionGone):
            reader.fetch(first)


@pytest.mark.long
def test_a_restarted_reader_can_fetch_at_once(
    cluster: ParameterCluster, script: Script, reader: SeriesReader
) -> None:
    """The number of reports of its earlier process does not matter."""
    version = script.publish(b"one", b"more")
    for _ in range(5):
        with reader.leased(version.number):
            pass
        reader.report(version.number, version.digest)
    with closing(SeriesReader([cluster.coordinator.grpc], SERIES, "reader-1")) as again:
        assert contents(again.fetch(again.wait(0, LIMIT_S))) == [b"one", b"more"]


@pytest.mark.long
def test_a_second_script_waits_until_the_first_one_has_ended(cluster: ParameterCluster) -> None:
    """Numbers continue, and the replaced script cannot publish any more."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(closing(Script(cluster))) for _ in range(2))
        assert first.publish(b"11").number == 1
        with pytest.raises(SeriesHeld):
            second.publish(b"22", timeout_s=3.0)
        first.close()
        assert second.publish(b"22").number == 2
        late = Script(cluster, incarnation=first.incarnation)
        with closing(late), pytest.raises((SeriesHeld, StaleEpoch)):
            late.publish(b"33", timeout_s=3.0)


@pytest.mark.long
def test_a_version_survives_a_kill_of_each_server_in_turn(
    cluster: ParameterCluster, script: Script, reader: SeriesReader
) -> None:
    """A killed server comes back with empty memory, and gets its copies from another server."""
    parts = [os.urandom(CHUNK_BYTES + 2), os.urandom(10)]
    record = script.publish(*parts)
    for server_id in ("ps-0", "ps-1", "ps-2"):
        cluster[server_id].kill()
        assert contents(reader.fetch(record)) == parts
        cluster.await_unlisted()
        cluster.start(server_id)
        cluster.await_ready()
        awaited(lambda: _all_hold(cluster, reader, record), LIMIT_S, "the copies are back")
    assert contents(reader.fetch(record)) == parts


def _kept(reader: SeriesReader) -> list[int]:
    return [version.number for version in reader.view().versions]


def _all_hold(cluster: ParameterCluster, reader: SeriesReader, record: pb.VersionRecord) -> bool:
    """True if each segment can be fetched from each of its holders."""
    view = reader.view(LIMIT_S)
    (version,) = [each for each in view.versions if each.number == record.number]
    addresses = {server.id: server for server in view.servers}
    with closing(WeightStores(SERIES)) as stores:
        for segment in version.segments:
            for holder in segment.holders:
                if holder not in addresses or holder not in {s.server_id for s in cluster.present}:
                    return False
                try:
                    stores.fetch([addresses[holder]], StagedSegment(segment.digest), 5.0)
                except ShoalError:
                    return False
    return True


@pytest.mark.long
def test_a_durable_version_survives_the_end_of_all_servers(tmp_path: Path) -> None:
    part = os.urandom(CHUNK_BYTES + 2)
    with ExitStack() as stack:
        cluster = stack.enter_context(ParameterCluster(tmp_path, 2, with_journals=True))
        script = stack.enter_context(closing(Script(cluster)))
        reader = stack.enter_context(
            closing(SeriesReader([cluster.coordinator.grpc], SERIES, "reader-1"))
        )
        script.publish(part)
        reader.wait(0, LIMIT_S)
        awaited(lambda: reader.view().versions[-1].durable, LIMIT_S, "the version is durable")
        cluster.kill_all()
        cluster.await_unlisted()
        for server_id in ("ps-0", "ps-1"):
            cluster.start(server_id)
        cluster.await_ready()
        assert contents(reader.fetch(reader.wait(0, LIMIT_S))) == [part]


@pytest.mark.long
def test_a_late_reader_gets_a_version_of_an_ended_publisher(cluster: ParameterCluster) -> None:
    with closing(Script(cluster)) as script:
        script.publish(b"11")
    with closing(SeriesReader([cluster.coordinator.grpc], SERIES, "late")) as late:
        assert contents(late.fetch(late.wait(0, LIMIT_S))) == [b"11"]


def test_publications_reported_as_failed_take_no_space_from_the_next_one(
    cluster: ParameterCluster,
) -> None:
    """A rank was without a coordinator for long: it drops its connections and two publications."""
    with closing(Script(cluster, 2)) as before:
        for publication in (1, 2):
            is_replicated = threading.Event()
            with pytest.raises(DeadlineExceeded):
                before.ranks[0].contribute(
                    segment_of(os.urandom(10)),
                    layout(0, 10),
                    publication=publication,
                    on_replicated=is_replicated.set,
                    timeout_s=2.0,
                )
            assert is_replicated.is_set()
        with closing(Script(cluster, 2, incarnation=before.incarnation)) as after:
            for publication in (1, 2):
                after.ranks[0].report_failure(publication, Unavailable("training went on"))
            after.publication = 2
            assert after.publish(b"11", b"22").number == 1


@pytest.mark.long
def test_publishing_continues_after_a_restart_of_the_coordinator(
    cluster: ParameterCluster, script: Script, reader: SeriesReader
) -> None:
    assert script.publish(b"11", b"22").number == 1
    cluster.kill_coordinator()
    assert script.publish(b"33", b"44").number == 2
    assert contents(reader.fetch(reader.wait(1, LIMIT_S))) == [b"33", b"44"]


@pytest.mark.long
def test_only_the_difference_is_sent_over_a_socket(cluster: ParameterCluster) -> None:
    draw = np.random.default_rng(0)
    before = draw.integers(0, 65536, CHUNK_BYTES, np.uint16)
    after = before.copy()
    after[:: len(after) // 1000] ^= 1
    with ExitStack() as stack:
        script = stack.enter_context(closing(Script(cluster, 2)))
        reader = stack.enter_context(
            closing(
                SeriesReader(
                    [cluster.coordinator.grpc],
                    SERIES,
                    "far",
                    may_be_local=False,
                    apply_difference=codec.apply,
                )
            )
        )
        first = script.publish(before.tobytes(), b"11")
        base = Base(first, dict(enumerate(reader.fetch(first))))
        whole_bytes = reader.fetched_bytes
        assert whole_bytes == before.nbytes + 2
        second = script.publish(after.tobytes(), b"11")
        found = reader.fetch(reader.wait(first.number, LIMIT_S), base=base)
        assert contents(found) == [after.tobytes(), b"11"]
        assert [each.digest for each in found] == [each.digest for each in second.segments]
        assert 0 < reader.fetched_bytes - whole_bytes < before.nbytes / 1000


@pytest.mark.long
def test_memory_of_earlier_versions_is_reused(cluster: ParameterCluster) -> None:
    """A reader over a socket keeps only a base, so each version uses the memory of the version two
    before it. A fetch for another use gets memory of its own."""
    with (
        closing(Script(cluster)) as script,
        closing(
            SeriesReader([cluster.coordinator.grpc], SERIES, "r", may_be_local=False)
        ) as reader,
    ):
        base, places = None, []
        for _ in range(4):
            data = os.urandom(2 * CHUNK_BYTES + 6)
            version = script.publish(data)
            assert reader.wait(version.number - 1, LIMIT_S) == version
            found = reader.fetch(version, base=base, reuses_memory=True)
            assert contents(found) == [data]
            places.append(os.fstat(found[0].descriptor).st_ino)
            base = Base(version, dict(enumerate(found)))
            del found
        assert places[2:] == places[:2]
        (apart,) = reader.fetch(version, base=base)
        assert apart.view() == data and os.fstat(apart.descriptor).st_ino not in places


@pytest.mark.long
def test_a_wrong_base_does_not_damage_a_version(cluster: ParameterCluster) -> None:
    """The result is verified, and fetched again."""
    with ExitStack() as stack:
        script = stack.enter_context(closing(Script(cluster)))
        reader = stack.enter_context(
            closing(
                SeriesReader(
                    [cluster.coordinator.grpc],
                    SERIES,
                    "far",
                    may_be_local=False,
                    apply_difference=codec.apply,
                )
            )
        )
        first = script.publish(bytes(1000))
        second = script.publish(bytes(998) + b"12")
        forged = segment_of(b"x" * 1000)
        forged.digest = first.segments[0].digest
        found = reader.fetch(second, base=Base(first, {0: forged}))
        assert contents(found) == [bytes(998) + b"12"]


@pytest.mark.long
def test_closing_a_reader_ends_its_waiting_calls(cluster: ParameterCluster) -> None:
    reader = SeriesReader([cluster.coordinator.grpc], SERIES, "reader-1")
    errors: list[Exception] = []

    def wait() -> None:
        try:
            reader.wait(0, None)
        except ShoalError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)
    reader.close()
    waiting.join(LIMIT_S)
    assert len(errors) == 1
