"""Upkeep of segments: copies the segments of this server into its memory and to its disk, after a
restart or in place of a lost server."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

import structlog

from shoal_proto.back_off import BackOff
from shoal_proto.errors import ShoalError, Unavailable
from shoal_proto.segments.sealed import Segment
from shoal_proto.v1 import weights_pb2 as pb
from shoal_server.core.processes import Holder
from shoal_server.core.publications import records
from shoal_server.parameters.cluster.server_directory import ServerDirectory
from shoal_server.parameters.weights.disk import WeightDisk
from shoal_server.parameters.weights.holdings import WeightHoldings
from shoal_server.parameters.weights.peers import WeightPeers

log = structlog.get_logger(__name__)

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
ASK_EACH_S = 0.5


class WeightUpkeep:
    """Restores and stores segments, one at a time, to leave threads to readers. Lives on the event
    loop."""

    def __init__(
        self,
        server_id: str,
        holdings: WeightHoldings,
        directory: ServerDirectory,
        peers: WeightPeers,
        disk: WeightDisk | None,
    ) -> None:
        self._server_id = server_id
        self._holdings = holdings
        self._directory = directory
        self._peers = peers
        self._disk = disk
        self._wanted: dict[str, Mapping[bytes, records.PublishedSegment]] = {}
        """Segments that this server is to hold, by series and digest."""
        self._sole: Mapping[str, Sequence[bytes]] = {}
        self._may_remove = False
        self._wake = asyncio.Event()

    def follow(self, series: str, segments: Mapping[bytes, records.PublishedSegment]) -> None:
        """Set the segments that the records of a series name."""
        mine = {d: s for d, s in segments.items() if self._server_id in s.holders}
        self._wanted[series] = mine
        if not mine:
            del self._wanted[series]
        self._wake.set()

    def allow_removal(self) -> None:
        """Allow removal from disk of segments that this server is not to hold, once all records
        have been read."""
        if not self._may_remove:
            self._may_remove = True
            self._wake.set()

    @property
    def writes_to_disk(self) -> bool:
        """True if this server has a disk for segments."""
        return self._disk is not None

    def is_durable(self, series: str, digest: bytes) -> bool:
        """True if the segment is on this server's disk."""
        return self._disk is not None and self._disk.holds(series, digest)

    @property
    def sole_copies(self) -> Mapping[str, Sequence[bytes]]:
        """Segments, by series, that neither this server's disk nor a server that stays had when
        `wait_copied` looked last."""
        sole = {
            series: [each for each in digests if not self.is_durable(series, each)]
            for series, digests in self._sole.items()
        }
        return {series: digests for series, digests in sole.items() if digests}

    async def wait_copied(self, me: Holder) -> None:
        """Return once each segment that a record names, and that this server has, is on another
        server that stays; or once every other server is leaving."""
        self._sole = {series: self._held_of(series) for series in self._wanted}
        while True:
            self._sole = {series: await self._only_here(series) for series in list(self._wanted)}
            if not any(self._sole.values()) or not self._directory.has_others(me):
                return
            await asyncio.sleep(ASK_EACH_S)

    async def _only_here(self, series: str) -> list[bytes]:
        named, sole = self._wanted.get(series, {}), set(self._held_of(series))
        for holder in {each for digest in sole for each in named[digest].holders}:
            address = self._directory.staying_address_of(holder)
            if holder == self._server_id or address is None:
                continue
            server = pb.StoreServer(id=holder, address=address)
            try:
                sole -= await self._peers.held(server, series, sole)
            except ShoalError as error:
                log.warning("store_not_queried", server=holder, reason=str(error))
        return sorted(sole)

    def _held_of(self, series: str) -> list[bytes]:
        named = self._wanted.get(series, {})
        return [digest for digest in named if self._holdings.holds(series, digest)]

    async def work_for_ever(self) -> None:
        """Fetch, store and remove segments as needed; repeat after a pause if something failed."""
        pauses = BackOff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._wake.set()  # an error may have ended an earlier call before its work was done
        while True:
            await self._wake.wait()
            self._wake.clear()
            done = [await self._ensure_held(*each) for each in self._lacking()]
            if self._disk is not None:
                done += [
                    await self._ensure_on_disk(self._disk, *each) for each in self._not_on_disk()
                ]
                on_disk = await self._holdings.in_thread(self._disk.all)
                done += [await self._ensure_off_disk(self._disk, *each) for each in on_disk]
            if all(done):
                pauses.reset()
            else:
                self._wake.set()
                await asyncio.sleep(pauses.pause_s())

    def _lacking(self) -> list[tuple[str, bytes]]:
        return [each for each in self._all_wanted() if not self._holdings.holds(*each)]

    def _not_on_disk(self) -> list[tuple[str, bytes]]:
        return [each for each in self._all_wanted() if not self.is_durable(*each)]

    def _all_wanted(self) -> list[tuple[str, bytes]]:
        return [(series, digest) for series, named in self._wanted.items() for digest in named]

    async def _ensure_held(self, series: str, digest: bytes) -> bool:
        """True if the segment is in memory now, or is not wanted."""
        failure: ShoalError = Unavailable("no other server that the record names is registered")
        segment = self._wanted.get(series, {}).get(digest)
        if segment is None or await self._restored(series, segment):
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
            log.info("segment_copied", series=series, digest=digest.hex(), source=holder)
            return True
        if digest not in self._wanted.get(series, {}):
            return True
        log.warning("segment_missing", series=series, digest=digest.hex(), reason=str(failure))
        return False

    async def _restored(self, series: str, wanted: records.PublishedSegment) -> bool:
        disk = self._disk
        if disk is None or not disk.holds(series, wanted.digest):
            return False

        async def read() -> Segment:
            segment = await self._holdings.in_thread(partial(disk.read, series, wanted.digest))
            if segment is None:
                raise Unavailable("the file of a segment is damaged, or gone")
            return segment

        try:
            await self._holdings.take(series, wanted.num_bytes, read)
        except (OSError, ShoalError) as error:
            log.warning(
                "segment_not_restored",
                series=series,
                digest=wanted.digest.hex(),
                reason=str(error),
            )
            return False
        log.info("segment_restored", series=series, digest=wanted.digest.hex())
        return True

    async def _ensure_on_disk(self, disk: WeightDisk, series: str, digest: bytes) -> bool:
        """False if writing failed."""
        segment = self._holdings.find(series, digest)
        if segment is None or digest not in self._wanted.get(series, {}):
            return True
        try:
            await self._holdings.in_thread(partial(disk.write, series, segment))
        except OSError as error:
            log.warning(
                "segment_not_on_disk", series=series, digest=digest.hex(), reason=str(error)
            )
            return False
        return True

    async def _ensure_off_disk(self, disk: WeightDisk, series: str, digest: bytes) -> bool:
        """False if removal failed."""
        if digest in self._wanted.get(series, {}) or not self._may_remove:
            return True
        try:
            await self._holdings.in_thread(partial(disk.remove, series, digest))
        except OSError as error:
            log.warning("segment_not_removed", series=series, reason=str(error))
            return False
        return True
