"""Copies of segments that the records say are here, and that are not: this server was restarted, or
takes the place of one that was lost."""

import asyncio
from collections.abc import Mapping

import structlog

from shoal_proto.errors import ShoalError, Unavailable
from shoal_proto.v1 import weights_pb2 as pb
from shoal_server.core.publications.records import Segment
from shoal_server.parameters.cluster.server_directory import ServerDirectory
from shoal_server.parameters.weights.holdings import WeightHoldings
from shoal_server.serving.backoff import ExponentialBackOff

log = structlog.get_logger(__name__)

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0


class WeightRepair:
    """Lives on the event loop. Fetches one segment at a time: readers come first."""

    def __init__(
        self, server_id: str, holdings: WeightHoldings, directory: ServerDirectory
    ) -> None:
        self._server_id = server_id
        self._holdings = holdings
        self._directory = directory
        self._wanted: dict[str, Mapping[bytes, Segment]] = {}
        """By series and digest: the segments that a record wants here."""
        self._wake = asyncio.Event()

    def follow(self, series: str, segments: Mapping[bytes, Segment]) -> None:
        """Take in the segments that the records of a series name."""
        mine = {d: s for d, s in segments.items() if self._server_id in s.holders}
        self._wanted[series] = mine
        if not mine:
            del self._wanted[series]
        self._wake.set()

    async def work_for_ever(self) -> None:
        """Fetch what lacks, again after a pause if nobody gives it."""
        pauses = ExponentialBackOff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            await self._wake.wait()
            self._wake.clear()
            repaired = [await self._repaired(*each) for each in self._lacking()]
            if all(repaired):
                pauses.reset()
            else:
                self._wake.set()
                await pauses.pause()

    def _lacking(self) -> list[tuple[str, bytes]]:
        return [
            (series, digest)
            for series, segments in self._wanted.items()
            for digest in segments
            if not self._holdings.holds(series, digest)
        ]

    async def _repaired(self, series: str, digest: bytes) -> bool:
        """True if the segment is held now, or need not be any more."""
        failure: ShoalError = Unavailable("no other server of the record is there")
        segment = self._wanted.get(series, {}).get(digest)
        if segment is None:
            return True
        for holder in segment.holders:
            address = self._directory.address_of(holder)
            if holder == self._server_id or address is None:
                continue
            source = pb.StoreServer(id=holder, address=address)
            try:
                await self._holdings.copy(series, digest, segment.num_bytes, source)
            except ShoalError as error:
                failure = error
                continue
            log.info("segment_repaired", series=series, digest=digest.hex(), source=holder)
            return True
        if digest not in self._wanted.get(series, {}):
            return True
        log.warning("segment_not_repaired", series=series, digest=digest.hex(), reason=str(failure))
        return False
