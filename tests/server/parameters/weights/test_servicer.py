"""The WeightStore service's answer about the segments that a server holds."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from support.clusters.memory_store import MemoryStore
from support.weights.segments import segment_of

from shoal_proto.segments.sealed import Segment
from shoal_proto.tls.bulk_offers import PermittedUse, Purpose
from shoal_proto.v1 import weights_pb2 as pb
from shoal_server.core.processes import Holder
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.chunk_assembler import Budget
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.weights.cut_segments import PlannedSegment
from shoal_server.parameters.weights.disk import WeightDisk
from shoal_server.parameters.weights.holdings import WeightHoldings
from shoal_server.parameters.weights.peers import WeightPeers
from shoal_server.parameters.weights.servicer import WeightsServicer
from shoal_server.parameters.weights.store import GRACE_S, SegmentOrigin
from shoal_server.parameters.weights.upkeep import WeightUpkeep

SERIES = "job/policy"


@contextmanager
def service(
    disk: WeightDisk | None,
    now_s: Callable[[], float] = time.monotonic,
    peers: WeightPeers | None = None,
) -> Iterator[tuple[WeightsServicer, WeightHoldings]]:
    unused = cast("Any", None)
    memory = Memory(1000, Catalog(MemoryStore(), Holder("ps-0", "one")), Budget(1000))
    with ThreadPoolExecutor(1) as threads:
        holdings = WeightHoldings(memory, threads, unused, now_s)
        servicer = WeightsServicer(
            "ps-0",
            records=unused,
            holdings=holdings,
            differences=unused,
            upkeep=WeightUpkeep("ps-0", holdings, unused, unused, disk),
            peers=peers or unused,
            offers=unused,
        )
        yield servicer, holdings
        holdings.close()


async def asked(servicer: WeightsServicer, digest: bytes) -> pb.HoldsSegmentsReply:
    request = pb.HoldsSegmentsRequest(series=SERIES, digests=[digest])
    return await servicer.Holds(request, cast("Any", None))


@pytest.mark.parametrize("has_disk", [False, True])
async def test_a_server_reports_if_it_writes_segments_to_disk(
    tmp_path: Path, has_disk: bool
) -> None:
    """A server without a disk is not asked again about a segment that is not on disk yet."""
    with service(WeightDisk(tmp_path) if has_disk else None) as (servicer, holdings):
        origin = SegmentOrigin(epoch=1, publication=1, rank=0)
        segment = await holdings.make(SERIES, 100, origin, lambda buffer: None)
        reply = await asked(servicer, segment.digest)
        assert list(reply.held) == [segment.digest]
        assert not reply.durable
        assert reply.writes_to_disk == has_disk


async def test_a_restarted_server_reports_what_is_on_its_disk(tmp_path: Path) -> None:
    """It has not read the segment into memory yet."""
    with closing(segment_of(bytes(100))) as segment:
        WeightDisk(tmp_path).write(SERIES, segment)
        with service(WeightDisk(tmp_path)) as (servicer, _):
            reply = await asked(servicer, segment.digest)
            assert not reply.held
            assert list(reply.durable) == [segment.digest]


async def test_a_question_about_a_publication_in_progress_keeps_its_segments() -> None:
    """Coordinators ask while other shards of the publication are copied."""
    now_s = 0.0
    with service(None, lambda: now_s) as (servicer, holdings):
        origin = SegmentOrigin(epoch=2, publication=7, rank=3)
        segment = await holdings.make(SERIES, 100, origin, lambda buffer: None)
        now_s = GRACE_S - 1
        request = pb.HoldsSegmentsRequest(series=SERIES, epoch=2, publication=7)
        await servicer.Holds(request, cast("Any", None))
        now_s = GRACE_S
        holdings.sweep()
        assert holdings.holds(SERIES, segment.digest)
        now_s += GRACE_S
        holdings.sweep()
        assert not holdings.holds(SERIES, segment.digest)


class SlowPeers(WeightPeers):
    """Takes longer than the grace period to send a segment, and then calls `at_end`."""

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._at_end = at_end

    async def pass_on(
        self, to: pb.StoreServer, request: pb.PutSegmentRequest, segment: Segment
    ) -> pb.PutSegmentReply:
        self._at_end()
        return pb.PutSegmentReply(holders=[to.id])


@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_segment_is_kept_while_it_is_sent_to_the_next_server(is_cut: bool) -> None:
    """Nobody repeats a put while it is in progress."""
    now_s = 0.0

    def grow_old() -> None:
        nonlocal now_s
        now_s += GRACE_S + 10.0
        holdings.sweep()

    with service(None, lambda: now_s, SlowPeers(grow_old)) as (servicer, holdings):
        holders, digest = await passed_on(servicer, holdings, is_cut=is_cut)
        assert holders == ["ps-0", "ps-1"]
        now_s += GRACE_S - 1
        holdings.sweep()
        assert holdings.holds(SERIES, digest)
        now_s += 1
        holdings.sweep()
        assert not holdings.holds(SERIES, digest)


async def test_a_server_that_has_freed_a_segment_meanwhile_is_no_holder() -> None:
    """The publication was abandoned."""
    with service(None, peers=SlowPeers(lambda: holdings.abandon(SERIES, 0, 1, [1]))) as (
        servicer,
        holdings,
    ):
        holders, _ = await passed_on(servicer, holdings, is_cut=False)
        assert holders == ["ps-1"]


async def passed_on(
    servicer: WeightsServicer, holdings: WeightHoldings, *, is_cut: bool
) -> tuple[list[str], bytes]:
    """Send a segment to this server and, through it, to the next; return its holders and digest."""
    put = pb.PutSegmentRequest(
        series=SERIES, epoch=1, publication=1, chain=[pb.StoreServer(id="ps-1", address="there:1")]
    )
    if is_cut:
        planned = PlannedSegment(num_bytes=100, described=pb.CutSegment(), fill=lambda buffer: None)
        cut = await servicer.keep_cut(put, planned)
        return list(cut.segment.holders), cut.segment.digest
    origin = SegmentOrigin(epoch=1, publication=1, rank=0)
    segment = await holdings.make(SERIES, 100, origin, lambda buffer: None)
    put.segment.digest, put.segment.num_bytes = segment.digest, segment.num_bytes
    use = PermittedUse(Purpose.SEGMENTS, None, SERIES)
    replies = [m async for each in servicer.put(put, use, cast("Any", None)) for m in each]
    return list(replies[-1].holders), segment.digest  # type: ignore[union-attr]
