"""A reader of a series."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from math import prod

import structlog

from shoal_client.connection.coordinators import Coordinators, chance
from shoal_client.weights.leases import InstalledVersion, ReaderLeases
from shoal_client.weights.relay import Relay
from shoal_client.weights.stores import RelaySource, WeightStores
from shoal_client.weights.watch import SeriesWatch
from shoal_proto import CHUNK_BYTES, descriptor_limit
from shoal_proto.back_off import BackOff
from shoal_proto.dtypes import ITEM_BYTES
from shoal_proto.errors import (
    CorruptError,
    InvalidSpec,
    MalformedMessage,
    RetryError,
    VersionGone,
)
from shoal_proto.segments.descriptors import lacks_descriptor
from shoal_proto.segments.digests import check_root
from shoal_proto.segments.reused import ReusedMemory, ReusedSegment
from shoal_proto.segments.sealed import Segment, SegmentWriter
from shoal_proto.segments.transfer import StagedSegment
from shoal_proto.v1 import weights_pb2 as pb
from shoal_proto.v1.weights_pb2_grpc import WeightSeriesStub

log = structlog.get_logger(__name__)

TIMEOUT_S = 600.0
ATTEMPT_S = 10.0
AT_ONCE = 4

Ranges = Mapping[int, Sequence[tuple[int, int]]]
"""Ranges of bytes by index of the segment, as (first byte, byte after the last)."""


ApplyDifference = Callable[[memoryview, memoryview, memoryview], None]
"""Computes the target, the third buffer, from base and difference: `shoal_difference.codec.apply`,
which needs numpy. Raises MalformedMessage."""


@dataclass(frozen=True, slots=True)
class Base:
    """A version with segments in this process' memory."""

    record: pb.VersionRecord
    segments: Mapping[int, Segment]


@dataclass(frozen=True, slots=True)
class _Wanted:
    index: int
    chunks: Sequence[range]
    new_writer: Callable[[int], SegmentWriter]
    """Allocates the segment's memory, given its size in bytes."""
    check: Callable[[], object]

    @property
    def may_be_reused(self) -> bool:
        return self.new_writer is not SegmentWriter


class SeriesReader:
    """Reader of a series. Thread-safe. Calls wait while there is no coordinator."""

    def __init__(
        self,
        coordinators: Sequence[str],
        series: str,
        reader: str,
        *,
        may_be_local: bool | None = None,
        apply_difference: ApplyDifference | None = None,
        relay_at: str | None = None,
    ) -> None:
        """`reader`: its name in `shoal status`. `may_be_local`: see `WeightStores`.
        `apply_difference`: None to fetch only whole segments. `relay_at`: address at which this
        reader serves other relays; None: it is not a relay."""
        # Each segment of a version takes a descriptor, and each segment of the base another.
        descriptor_limit.raise_limit()
        self.series = series
        self._coordinators = Coordinators(coordinators)
        self._reports = Coordinators(coordinators)
        self._may_be_local = may_be_local
        self._stores = WeightStores(series, may_be_local=may_be_local)
        self._relay = None if relay_at is None else Relay(series, relay_at)
        """None once `lease` has closed it, on any thread."""
        self._fetching = threading.Lock()
        """A relay fetches one version at a time."""
        self._watch = SeriesWatch(self._coordinators, series)
        self._leases = ReaderLeases(self._reports, series, reader, self.relay_address)
        self._apply_difference = apply_difference
        self._memory = ReusedMemory()
        self._layouts: dict[bytes, pb.Layout] = {}
        self.fetched_bytes = 0
        """Arrived through sockets; mapped memory is not counted."""
        self.relayed_bytes = 0
        """Part of `fetched_bytes`."""

    def view(self, timeout_s: float | None = TIMEOUT_S) -> pb.SeriesView:
        """The series as last reported. Raises DeadlineExceeded without an answer in time, the
        coordinator's refusal, or Unavailable after `close`."""
        return self._watch.newest(-1, timeout_s)

    def wait(self, newer_than: int = 0, timeout_s: float | None = None) -> pb.VersionRecord:
        """Wait for a version above `newer_than`; return the newest. `timeout_s` None: no limit.
        Raises what `view` raises."""
        give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if give_up_s is None else max(give_up_s - time.monotonic(), 0.0)
            view = self._watch.newest(newer_than, left_s)
            if view.versions and view.versions[-1].number > newer_than:
                return view.versions[-1]
            # The version is gone. The next one has a number above all earlier ones.
            newer_than = view.head

    def catch_up(self, timeout_s: float) -> None:
        """Wait until `view` has the newest version that an answer to this reader's reports has
        named. Raises what `view` raises."""
        self._watch.newest(self._leases.head - 1, timeout_s)

    def report_now(self, timeout_s: float = TIMEOUT_S) -> None:
        """Report to the coordinator, which names the newest version. Raises what
        `ReaderLeases.report_now` raises."""
        self._leases.report_now(timeout_s)

    def record(self, number: int, timeout_s: float | None = TIMEOUT_S) -> pb.VersionRecord:
        """Record of a version. Raises VersionGone if it is not kept any more, and what `view`
        raises."""
        view = self.view(timeout_s)
        for version in view.versions:
            if version.number == number:
                return version
        raise VersionGone(
            f"series {self.series} has no version {number}",
            seen=", ".join(str(version.number) for version in view.versions) or "no versions",
            expected="a version that is kept",
        )

    def lease(self, number: int, timeout_s: float = TIMEOUT_S) -> None:
        """Lease a version: it is kept until `release`, while this process reports to a coordinator.
        Raises what `ReaderLeases.take` and, in a relay, `view` raise."""
        relay = self._relay
        if relay is not None and self._stores.is_local(self.view(timeout_s).servers):
            # A relay would keep the server's memory in use after the server has dropped it.
            log.info("relay_on_server_host", series=self.series)
            self._leases.serves_at = ""
            relay.close()
            self._relay = None
        self._leases.take(number, timeout_s)

    def release(self, number: int) -> None:
        """Give up a lease."""
        self._leases.release(number)

    @contextmanager
    def leased(self, number: int, timeout_s: float = TIMEOUT_S) -> Iterator[None]:
        """Hold a lease within a block. Raises what `lease` raises."""
        self.lease(number, timeout_s)
        try:
            yield
        finally:
            self.release(number)

    def layout(self, record: pb.VersionRecord, timeout_s: float = TIMEOUT_S) -> pb.Layout:
        """Positions of a version's tensors in its segments. Raises VersionGone if they are not kept
        any more, and what `Coordinators.call` raises."""
        found = self._layouts.get(record.layout_digest)
        if found is None:
            request = pb.GetLayoutRequest(series=self.series, layout_digest=record.layout_digest)
            found = self._coordinators.call(
                lambda channel: WeightSeriesStub(channel).GetLayout,
                request,
                timeout_s=timeout_s,
                attempt_s=ATTEMPT_S,
            )
            self._layouts = {record.layout_digest: found}
        return found

    def fetch(
        self,
        record: pb.VersionRecord,
        segments: Sequence[int] | None = None,
        ranges: Ranges | None = None,
        *,
        base: Base | None = None,
        reuses_memory: bool = False,
        timeout_s: float = TIMEOUT_S,
        check: Callable[[], object] = lambda: None,
    ) -> list[Segment]:
        """Fetch segments of a version (`segments`: their indexes; None: all), in this order.

        The version is leased meanwhile. Returned segments are verified. On a server's host they are
        the server's memory, mapped. With `ranges`, only chunks that cover these bytes need to
        arrive, and other bytes may read as zeros; a segment without ranges is fetched as a whole.
        With `base`, unchanged segments are taken from it, and for segments with few changes only
        the difference is fetched. `reuses_memory`: a later fetch reuses the memory of fetched
        segments once nothing refers to it; for callers that copy the data, and keep at most a base.
        `check` is called with each chunk, on any thread, unless this is a relay; what it raises
        ends the fetch.

        A relay fetches from the relay that the coordinator has named, or else from servers. It
        keeps the segments for other relays until it has fetched another version.

        Raises VersionGone if the version is dropped meanwhile, a RetryError if it cannot be leased
        within `timeout_s`, the RetryError or CorruptError of the last attempt once no chunk has
        arrived for `timeout_s`, refusals, and Overloaded without a descriptor for each segment, at
        once, and InvalidSpec for `ranges` in a relay."""
        indices = range(len(record.segments)) if segments is None else segments
        if self._relay is not None and ranges:
            raise InvalidSpec(
                f"a relay of series {self.series} fetches whole segments",
                seen="into= of DTensors that hold slices",
                expected="tensors that are whole, or a subscription without relay",
            )
        is_reused = reuses_memory and self._relay is None
        new_writer = self._memory.writer if is_reused else SegmentWriter
        wanted = [
            _Wanted(i, _chunks((ranges or {}).get(i, ())), new_writer, check) for i in indices
        ]
        found: list[Segment] = []
        calls: list[Future[Segment]] = []
        with (
            self.leased(record.number, timeout_s),
            self._relaying(record, indices) as source,
        ):
            try:
                with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="shoal-fetch") as pool:
                    calls += [
                        pool.submit(self._fetch, record, each, base, source, timeout_s)
                        for each in wanted
                    ]
                    found += [call.result() for call in calls]
            except BaseException:
                for call in calls:
                    with suppress(Exception):
                        call.result().close()
                raise
        return found

    def report(
        self, installed: int, digest: bytes, fetch_s: float = 0.0, fetch_bytes: int = 0
    ) -> None:
        """Report in the background the version that this reader serves, and its digest. Raises
        Regressed after a newer version."""
        self._leases.report(InstalledVersion(installed, digest, fetch_s, fetch_bytes))

    @property
    def relay_address(self) -> str:
        """Address for other relays; empty: this reader is not a relay."""
        relay = self._relay
        return "" if relay is None else relay.address

    @property
    def installed(self) -> int:
        """The version reported last; 0: none."""
        return self._leases.installed.number

    def close(self) -> None:
        """Close every connection: waiting calls fail. Leases end, or expire without a
        coordinator."""
        self._watch.close()
        if (relay := self._relay) is not None:
            relay.close()
        self._leases.close()
        self._stores.close()
        self._memory.close()
        self._coordinators.close()
        self._reports.close()

    @contextmanager
    def _relaying(
        self, record: pb.VersionRecord, indices: Sequence[int]
    ) -> Iterator[RelaySource | None]:
        """Yield the relay to fetch from, or None; pass on what is fetched in the block."""
        relay = self._relay
        if relay is None:
            yield None
            return
        digests = [record.segments[index].digest for index in indices]
        with self._fetching, relay.version(digests), ExitStack() as stack:
            address = self._leases.relay_of(record.number)
            source = None
            if address:
                source = RelaySource(self.series, address, may_be_local=self._may_be_local)
                stack.enter_context(closing(source))
            yield source

    def _fetch(
        self,
        record: pb.VersionRecord,
        wanted: _Wanted,
        base: Base | None,
        source: RelaySource | None,
        timeout_s: float,
    ) -> Segment:
        segment = self._one_segment(record, wanted, base, source, timeout_s)
        if (relay := self._relay) is not None:
            relay.add(segment)
        return segment

    def _one_segment(
        self,
        record: pb.VersionRecord,
        wanted: _Wanted,
        base: Base | None,
        source: RelaySource | None,
        timeout_s: float,
    ) -> Segment:
        if base is not None:
            digest = record.segments[wanted.index].digest
            for each in base.segments.values():
                if each.digest == digest and each.is_whole:
                    if isinstance(each, ReusedSegment) and not wanted.may_be_reused:
                        return each.sealed_copy()
                    return each.duplicate()
            is_shared = source is not None and source.is_local
            if self._apply_difference is not None and not wanted.chunks and not is_shared:
                made = self._by_difference(record, wanted, base, source, timeout_s)
                if made is not None:
                    return made
        return self._fetch_whole(record, wanted, source, timeout_s)

    def _staged(self, digest: bytes, wanted: _Wanted, *, is_difference: bool) -> StagedSegment:
        """Memory for a segment to fetch, which a relay passes on while it arrives."""
        if (relay := self._relay) is not None:
            return relay.staged(digest)
        if is_difference:
            return StagedSegment(digest, on_progress=wanted.check)
        return StagedSegment(digest, wanted.chunks, wanted.new_writer, wanted.check)

    def _fetch_from_relay(
        self,
        source: RelaySource | None,
        staged: StagedSegment,
        timeout_s: float,
        *,
        is_difference: bool = False,
    ) -> Segment | None:
        """None if there is no relay, or it fails."""
        if source is None:
            return None
        found = source.fetch(staged, timeout_s, is_difference=is_difference)
        self.relayed_bytes += staged.received_bytes
        return found

    def _by_difference(
        self,
        record: pb.VersionRecord,
        wanted: _Wanted,
        base: Base,
        source: RelaySource | None,
        timeout_s: float,
    ) -> Segment | None:
        """None: the whole segment must be fetched."""
        index = wanted.index
        if base.record.layout_digest != record.layout_digest:
            return None
        old, new = base.segments.get(index), record.segments[index]
        if old is None:
            return None
        holders = _holders(self.view(timeout_s), record, index)
        if not old.is_whole or old.num_bytes != new.num_bytes or self._stores.is_local(holders):
            return None
        elements = _elements_of(self.layout(record, timeout_s), index)
        request = pb.DifferenceRequest(
            series=self.series, base=old.digest, target=new.digest, elements=elements
        )
        for holder in holders:
            try:
                reply = self._stores.difference(holder, request, timeout_s)
                if not reply.digest:
                    return None
                staged = self._staged(reply.digest, wanted, is_difference=True)
                try:
                    fetched = self._fetch_from_relay(source, staged, timeout_s, is_difference=True)
                    fetched = fetched or self._stores.fetch([holder], staged, timeout_s)
                except BaseException:
                    staged.close()
                    if (relay := self._relay) is not None:
                        relay.give_up(reply.digest)
                    raise
                with closing(fetched) as difference:
                    self.fetched_bytes += staged.received_bytes
                    if (relay := self._relay) is not None:
                        relay.add(difference)
                    writer = wanted.new_writer(old.num_bytes)
                    return self._applied(old, difference, new.digest, writer)
            except (RetryError, CorruptError, MalformedMessage) as error:
                log.warning(
                    "difference_not_fetched",
                    series=self.series,
                    version=record.number,
                    server=holder.id,
                    reason=str(error),
                )
        return None

    def _applied(
        self, old: Segment, difference: Segment, digest: bytes, writer: SegmentWriter
    ) -> Segment:
        """Raises MalformedMessage, or ChecksumMismatch for a wrong result."""
        assert self._apply_difference is not None
        try:
            self._apply_difference(old.view(), difference.view(), writer.buffer)
            made = writer.seal()
        except BaseException:
            writer.close()
            raise
        check_root(made.chunk_digests, made.num_bytes, digest)
        return made

    def _fetch_whole(
        self,
        record: pb.VersionRecord,
        wanted: _Wanted,
        source: RelaySource | None,
        timeout_s: float,
    ) -> Segment:
        segment = record.segments[wanted.index]
        staged = self._staged(segment.digest, wanted, is_difference=False)
        back_off = BackOff()
        view = self.view(timeout_s)
        try:
            relayed = self._fetch_from_relay(source, staged, timeout_s)
            if relayed is not None:
                self.fetched_bytes += staged.received_bytes
                return relayed
            give_up_s, received_bytes = time.monotonic() + timeout_s, staged.received_bytes
            while True:
                holders = _holders(view, record, wanted.index)
                try:
                    found = self._stores.fetch(holders, staged, timeout_s)
                    self.fetched_bytes += staged.received_bytes
                    return found
                except (RetryError, CorruptError) as error:
                    wanted.check()
                    self._leases.check(record.number)
                    if staged.received_bytes > received_bytes:
                        received_bytes = staged.received_bytes
                        give_up_s = time.monotonic() + timeout_s
                    if time.monotonic() >= give_up_s or lacks_descriptor(error):
                        raise
                # A lost server is replaced in the record.
                view = self._watch.wait_change(view, back_off.pause_s(chance()))
        except BaseException:
            staged.close()
            raise


def _holders(view: pb.SeriesView, record: pb.VersionRecord, index: int) -> list[pb.StoreServer]:
    """Raises VersionGone if the version is not kept any more, or another version has its number."""
    for version in view.versions:
        if version.number == record.number:
            if version.digest != record.digest:
                raise VersionGone(
                    f"version {record.number} of series {view.series} is not the requested one",
                    seen=f"digest {record.digest.hex()[:12]}, of another series, or of a removed"
                    " one",
                    expected=f"digest {version.digest.hex()[:12]}",
                )
            names = version.segments[index].holders
            return [server for server in view.servers if server.id in names]
    if view.head < record.number:
        # The view is older than the record.
        names = record.segments[index].holders
        return [server for server in view.servers if server.id in names]
    raise VersionGone(
        f"version {record.number} of series {view.series} was dropped while it was fetched",
        seen=", ".join(str(version.number) for version in view.versions),
        expected="a lease that is renewed in time",
    )


def _chunks(wanted: Sequence[tuple[int, int]]) -> list[range]:
    found: list[range] = []
    for start, stop in sorted(wanted):
        if stop <= start:
            continue
        first, last = start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)
        if found and first <= found[-1].stop:
            found[-1] = range(found[-1].start, max(last, found[-1].stop))
        else:
            found.append(range(first, last))
    return found


def _elements_of(layout: pb.Layout, segment: int) -> list[pb.ElementRun]:
    """Runs of elements of equal size that make up a segment. Bytes of no tensor, and of unknown
    dtypes, count as elements of one byte."""
    runs: list[pb.ElementRun] = []
    at = 0
    for start, stop, element_bytes in sorted(_spans(layout, segment)):
        _extend(runs, 1, start - at)
        _extend(runs, element_bytes, stop - max(start, at))
        at = max(stop, at)
    _extend(runs, 1, layout.segment_bytes[segment] - at)
    return runs


def _spans(layout: pb.Layout, segment: int) -> Iterator[tuple[int, int, int]]:
    for each in layout.slices:
        if each.segment == segment:
            element_bytes = ITEM_BYTES.get(layout.tensors[each.tensor].dtype, 1)
            yield each.at, each.at + _num_elements(layout, each) * element_bytes, element_bytes


def _num_elements(layout: pb.Layout, each: pb.Slice) -> int:
    return prod(each.sizes or layout.tensors[each.tensor].shape)


def _extend(runs: list[pb.ElementRun], element_bytes: int, num_bytes: int) -> None:
    if num_bytes <= 0:
        return
    if runs and runs[-1].element_bytes == element_bytes:
        runs[-1].num_bytes += num_bytes
    else:
        runs.append(pb.ElementRun(element_bytes=element_bytes, num_bytes=num_bytes))
