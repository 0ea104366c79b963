"""The service for segments of published weights: over gRPC, and in calls of bulk connections."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import structlog
from google.protobuf.message import Message

from shoal_proto.errors import (
    AccessDenied,
    InvalidSpec,
    Overloaded,
    RefusedError,
    ShoalError,
    StaleEpoch,
    Unavailable,
)
from shoal_proto.segments.digests import DIGEST_BYTES
from shoal_proto.segments.sealed import Segment
from shoal_proto.segments.transfer import requested_chunks
from shoal_proto.tls.bulk_offers import BulkOffers, PermittedUse, Purpose
from shoal_proto.tls.names import CertificateRole
from shoal_proto.v1 import weights_pb2 as pb
from shoal_proto.v1.parameters_pb2 import OpenBulkReply
from shoal_proto.v1.weights_pb2_grpc import WeightStoreServicer
from shoal_server.parameters.weights.cut_segments import PlannedSegment
from shoal_server.parameters.weights.differences import WeightDifferences
from shoal_server.parameters.weights.holdings import WeightHoldings
from shoal_server.parameters.weights.peers import WeightPeers
from shoal_server.parameters.weights.records import SeriesRecords
from shoal_server.parameters.weights.segment_transport import SegmentTransport
from shoal_server.parameters.weights.store import SegmentOrigin
from shoal_server.parameters.weights.upkeep import WeightUpkeep
from shoal_server.serving.access.checks import known_caller
from shoal_server.serving.rpc import Context

log = structlog.get_logger(__name__)

PUBLISHING = frozenset({CertificateRole.WORKER, CertificateRole.OPERATOR, CertificateRole.SERVER})

SWEEP_EACH_S = 1.0
STALLED_S = 30.0

Replies = AsyncGenerator[Sequence[Message | bytes], None]


class WeightsServicer(WeightStoreServicer):
    """Serves segments. Lives on the event loop."""

    def __init__(
        self,
        server_id: str,
        *,
        records: SeriesRecords,
        holdings: WeightHoldings,
        differences: WeightDifferences,
        upkeep: WeightUpkeep,
        peers: WeightPeers,
        offers: BulkOffers,
    ) -> None:
        self._server_id = server_id
        self._records = records
        self._holdings = holdings
        self._differences = differences
        self.upkeep = upkeep
        self._peers = peers
        self._offers = offers

    async def sweep_for_ever(self) -> None:
        """Free what is not needed. Let `upkeep` remove files once all records have been read."""
        while True:
            await asyncio.sleep(SWEEP_EACH_S)
            self._holdings.sweep()
            self._differences.sweep()
            if self._records.is_in_sync:
                self.upkeep.allow_removal()

    async def OpenBulk(self, request: pb.OpenSegmentsRequest, context: Context) -> OpenBulkReply:
        caller = known_caller(context)
        return self._offers.make(Purpose.SEGMENTS, caller, series=request.series)

    async def Holds(
        self, request: pb.HoldsSegmentsRequest, context: Context
    ) -> pb.HoldsSegmentsReply:
        if request.publication:
            self._holdings.renew_all(request.series, (request.epoch, request.publication))
        held = [each for each in request.digests if self._holdings.holds(request.series, each)]
        # Some may not have been read from disk yet.
        durable = [e for e in request.digests if self.upkeep.is_durable(request.series, e)]
        return pb.HoldsSegmentsReply(
            held=held, durable=durable, writes_to_disk=self.upkeep.writes_to_disk
        )

    async def Copy(self, request: pb.CopySegmentsRequest, context: Context) -> pb.CopySegmentsReply:
        held = []
        for segment in request.segments:
            if not self._holdings.holds(request.series, segment.digest):
                await self._holdings.copy(
                    request.series, segment.digest, segment.num_bytes, request.source
                )
            held.append(segment.digest)
        return pb.CopySegmentsReply(held=held)

    async def Difference(
        self, request: pb.DifferenceRequest, context: Context
    ) -> pb.DifferenceReply:
        series = request.series
        base = self._holdings.find(series, request.base)
        target = self._holdings.get(series, _checked_digest(request.target))
        if base is None:
            # The base was dropped: the reader fetches the whole segment.
            return pb.DifferenceReply()
        elements = [(each.element_bytes, each.num_bytes) for each in request.elements]
        difference = await self._differences.between(series, base, target, elements)
        if difference is None:
            return pb.DifferenceReply()
        return pb.DifferenceReply(digest=difference.digest, num_bytes=difference.num_bytes)

    async def put(
        self, request: pb.PutSegmentRequest, use: PermittedUse, transport: SegmentTransport
    ) -> Replies:
        """Receive a segment, and forward it along the request's chain of servers. The last reply
        names the servers that hold the segment: fewer than requested if one failed.

        Raises the refusal or overload of a server of the chain, AccessDenied for a caller that may
        not publish or for another series than the connection's, InvalidSpec for a bad digest, and
        what `_admit` and `WeightHoldings.receive` raise.
        """
        _check_use(request.series, use)
        if use.caller is not None and use.caller.role not in PUBLISHING:
            raise AccessDenied(
                "only a publisher may put a segment",
                seen=f"the certificate of {use.caller}",
                expected=f"the role {' or '.join(sorted(r.value for r in PUBLISHING))}",
            )
        series, digest = request.series, _checked_digest(request.segment.digest)
        origin = SegmentOrigin(
            epoch=request.epoch, publication=request.publication, rank=request.rank
        )
        self._holdings.abandon(series, request.rank, request.epoch, request.abandoned)
        await self._admit(series, digest, origin)
        segment = self._holdings.renew(series, digest, origin)
        if segment is not None:
            yield [pb.PutSegmentReply(transfer=pb.SEGMENT_TRANSFER_NONE)]
        else:
            transfer = (
                pb.SEGMENT_TRANSFER_DESCRIPTOR if transport.is_local else pb.SEGMENT_TRANSFER_CHUNKS
            )
            yield [pb.PutSegmentReply(transfer=transfer)]
            segment = await self._holdings.receive(
                series,
                digest,
                request.segment.num_bytes,
                origin,
                transport,
                of_chunks=request.chunk_digests or None,
            )
        holders = await self._passed_on(request, segment)
        yield [pb.PutSegmentReply(holders=holders)]

    async def keep_cut(
        self, request: pb.PutSegmentRequest, planned: PlannedSegment
    ) -> pb.CutSegment:
        """Make a shard's segment, and hold it on all servers of the request's chain too. Sets
        `segment` and `abandoned` in `request`.

        Raises StaleEpoch, Overloaded, a server's refusal, Unavailable if a server of the chain does
        not hold the segment afterwards, and what `planned.fill` raises.
        """
        series = request.series
        origin = SegmentOrigin(
            epoch=request.epoch, publication=request.publication, rank=request.rank
        )
        # An earlier attempt at this publication may have left a segment of another cut: free it
        # first, also on the chain.
        del request.abandoned[:]
        request.abandoned.append(request.publication)
        self._holdings.abandon(series, origin.rank, origin.epoch, request.abandoned)
        await self._admit(series, b"", origin)
        segment = await self._holdings.make(series, planned.num_bytes, origin, planned.fill)
        cut = pb.CutSegment()
        cut.CopyFrom(planned.described)
        cut.segment.digest, cut.segment.num_bytes = segment.digest, segment.num_bytes
        request.segment.CopyFrom(cut.segment)
        holders = await self._passed_on(request, segment)
        if len(holders) <= len(request.chain):
            raise Unavailable(
                f"a shard of {series} was not copied to every server that is to hold it",
                seen=f"{len(holders)} copies",
                expected=f"{len(request.chain) + 1}",
            )
        cut.segment.holders.extend(holders)
        return cut

    async def _admit(self, series: str, digest: bytes, origin: SegmentOrigin) -> None:
        """Raise StaleEpoch or Overloaded if the segment must not be held. Before Overloaded, the
        newest records are read: a version may have been committed."""
        try:
            self._holdings.admit(series, digest, origin)
        except (Overloaded, StaleEpoch):
            # Epochs begin again at 1 once a job was removed.
            await self._records.refresh(series)
            self._holdings.admit(series, digest, origin)

    async def _passed_on(self, request: pb.PutSegmentRequest, segment: Segment) -> Sequence[str]:
        """Forward a held segment along the chain; return the servers that hold it, with this one.
        Raises Overloaded, or a server's refusal."""
        if not request.chain:
            return [self._server_id]
        following = pb.PutSegmentRequest()
        following.CopyFrom(request)
        del following.chain[0]
        to = request.chain[0]
        others: Sequence[str] = ()
        try:
            with self._holdings.sending(request.series, segment.digest):
                others = (await self._peers.pass_on(to, following, segment)).holders
        except (Overloaded, RefusedError):
            raise
        except ShoalError as error:
            log.warning("segment_not_passed_on", series=request.series, to=to.id, reason=str(error))
        # The publication may have been abandoned meanwhile.
        own = [self._server_id] if self._holdings.holds(request.series, segment.digest) else []
        return [*own, *others]

    async def fetch(
        self, request: pb.FetchSegmentRequest, use: PermittedUse, transport: SegmentTransport
    ) -> Replies:
        """Send a segment or a difference: as a descriptor if the connection is local and the reader
        takes one, else in the requested chunks.

        Raises AccessDenied for another series than the connection's, InvalidSpec for a bad digest
        or chunks, and Unavailable if the segment is not held or the reader stops reading.
        """
        _check_use(request.series, use)
        digest = _checked_digest(request.digest)
        difference = self._differences.find(request.series, digest)
        segment = difference or self._holdings.get(request.series, digest)
        as_descriptor = transport.is_local and request.takes_descriptor
        reply = pb.FetchSegmentReply(
            num_bytes=segment.num_bytes,
            chunk_digests=segment.chunk_digests,
            transfer=pb.SEGMENT_TRANSFER_DESCRIPTOR
            if as_descriptor
            else pb.SEGMENT_TRANSFER_CHUNKS,
        )
        yield [reply]
        if as_descriptor:
            await transport.send_descriptor(segment)
            return
        for wanted in requested_chunks(request, segment.num_bytes):
            for index in wanted:
                await _sent(index, segment, transport)


async def _sent(index: int, segment: Segment, transport: SegmentTransport) -> None:
    """Send a chunk. Raises Unavailable after STALLED_S: a reader that has stopped would keep a
    dropped segment in memory."""
    try:
        async with asyncio.timeout(STALLED_S):
            await transport.send_chunk(index, segment)
    except TimeoutError:
        transport.end()
        raise Unavailable(
            "the reader of a segment reads too slowly, or has stopped",
            seen=f"chunk {index} not taken within {STALLED_S:g} s",
            expected="8 MiB in that time",
        ) from None
    await asyncio.sleep(0)


def _check_use(series: str, use: PermittedUse) -> None:
    if series != use.series:
        raise AccessDenied(
            "the connection is for another series",
            seen=f"series {series!r}",
            expected=f"series {use.series!r}, for which its key was issued",
        )


def _checked_digest(digest: bytes) -> bytes:
    if len(digest) != DIGEST_BYTES:
        raise InvalidSpec(
            "bad digest of a segment",
            seen=f"{len(digest)} bytes",
            expected=f"{DIGEST_BYTES} (xxh3-128)",
        )
    return digest
