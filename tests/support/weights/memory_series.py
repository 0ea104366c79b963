"""A series in memory, in place of the coordinator and servers for publishers and readers."""

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256

from shoal.weights.reading import merged
from shoal.weights.series import PublisherRank
from shoal.weights.subscription import Subscription, version_digest
from shoal_proto.errors import (
    DeadlineExceeded,
    PublicationAbandoned,
    ShoalError,
    Unavailable,
    VersionGone,
)
from shoal_proto.segments.sealed import Segment
from shoal_proto.v1 import weights_pb2


class MemorySeries:
    """Commits a publication once all ranks have contributed."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.records: list[weights_pb2.VersionRecord] = []
        self.dropped = 0
        """Number of the newest version that readers do not get any more."""
        self.num_late = 0
        """Newest versions that a reader's view lacks until the reader catches up."""
        self.layouts: dict[bytes, weights_pb2.Layout] = {}
        self.parts: dict[tuple[int, int], dict[int, tuple[Segment, weights_pb2.Layout]]] = {}
        self.segments: dict[bytes, Segment] = {}
        self.holds = threading.Event()
        """Set while contributions and reports of failures are accepted; otherwise they wait."""
        self.holds.set()
        self.failure: ShoalError | None = None
        self.reported_failures = queue.Queue[tuple[int, BaseException]]()
        """Publications that a rank reported as failed, with their errors."""
        self.reports: list[tuple[int, bytes]] = []
        self.leases: set[int] = set()

    @property
    def kept(self) -> list[weights_pb2.VersionRecord]:
        return self.records[self.dropped :]

    def connect(self, place: PublisherRank) -> "MemoryContributor":
        return MemoryContributor(self, place)

    def reader(self) -> "MemoryReader":
        return MemoryReader(self)

    def subscription(self) -> Subscription:
        return Subscription(self.reader(), "job/policy")  # type: ignore[arg-type]

    def commit(
        self, publication: int, place: PublisherRank, step: int, text: Mapping[str, str]
    ) -> None:
        parts = self.parts[place.number, publication]
        layout = merged([parts[rank][1] for rank in range(place.world_size)])
        raw = layout.SerializeToString(deterministic=True)
        digest = sha256(raw).digest()
        self.layouts[digest] = layout
        segments = [parts[rank][0] for rank in range(place.world_size)]
        self.records.append(
            weights_pb2.VersionRecord(
                number=len(self.records) + 1,
                epoch=place.number,
                step=step,
                layout_digest=digest,
                segments=[
                    weights_pb2.Segment(digest=each.digest, num_bytes=each.num_bytes)
                    for each in segments
                ],
                digest=version_digest(digest, [each.digest for each in segments]),
                created_unix_s=time.time(),
                metadata=text,
            )
        )


class MemoryContributor:
    """A rank's access to a MemorySeries."""

    def __init__(self, series: MemorySeries, place: PublisherRank) -> None:
        self._series, self._place = series, place
        self._closed = False

    def contribute(
        self,
        segment: Segment,
        layout: weights_pb2.Layout,
        *,
        publication: int,
        step: int,
        metadata: Mapping[str, str],
        tied: Mapping[str, str] | None,
        on_replicated: Callable[[], None],
    ) -> weights_pb2.VersionRecord:
        series, place = self._series, self._place
        self._await_coordinator()
        if series.failure is not None:
            raise series.failure
        on_replicated()
        copy = Segment.adopt(_duplicate(segment), segment.num_bytes)
        with series.changed:
            parts = series.parts.setdefault((place.number, publication), {})
            parts[place.rank] = (copy, layout)
            series.segments[copy.digest] = copy
            if len(parts) == place.world_size:
                series.commit(publication, place, step, metadata)
                series.changed.notify_all()
            while not self._closed:
                if own := [each for each in series.records if each.step == step]:
                    return own[-1]
                if any(each.step > step for each in series.records):
                    break
                series.changed.wait(0.05)
        raise PublicationAbandoned("a rank of it was lost")

    def report_failure(
        self, publication: int, failure: BaseException, timeout_s: float = 0.0
    ) -> None:
        if isinstance(failure, PublicationAbandoned):
            return
        with suppress(Unavailable):
            self._await_coordinator()
            self._series.reported_failures.put((publication, failure))

    def close(self) -> None:
        self._closed = True

    def _await_coordinator(self) -> None:
        """Raise Unavailable once closed."""
        while not self._series.holds.wait(0.02) and not self._closed:
            pass
        if self._closed:
            raise Unavailable("the connection was closed")


class MemoryReader:
    """A `SeriesReader` of a MemorySeries."""

    def __init__(self, series: MemorySeries) -> None:
        self._series = series
        self.fetched_bytes = 0
        self.bases: list[object] = []
        """The base of each fetch."""

    def view(self) -> weights_pb2.SeriesView:
        kept = self._series.kept
        shown = kept[: max(len(kept) - self._series.num_late, 0)]
        return weights_pb2.SeriesView(series="job/policy", versions=shown)

    def wait(self, newer_than: int, timeout_s: float | None) -> weights_pb2.VersionRecord:
        with self._series.changed:
            found = self._series.changed.wait_for(
                lambda: self._series.records and self._series.records[-1].number > newer_than,
                timeout_s,
            )
            if not found:
                raise DeadlineExceeded(f"no version above {newer_than}")
            return self._series.records[-1]

    def catch_up(self, timeout_s: float) -> None:
        self._series.num_late = 0

    def report_now(self) -> None:
        """Do nothing: `catch_up` knows the newest version."""

    def lease(self, number: int) -> None:
        if number not in {each.number for each in self._series.kept}:
            raise VersionGone(f"version {number} is not kept")
        self._series.leases.add(number)

    def release(self, number: int) -> None:
        self._series.leases.discard(number)

    def layout(self, record: weights_pb2.VersionRecord) -> weights_pb2.Layout:
        return self._series.layouts[record.layout_digest]

    def fetch(
        self,
        record: weights_pb2.VersionRecord,
        segments: Sequence[int] | None = None,
        ranges: Mapping[int, Sequence[tuple[int, int]]] | None = None,
        *,
        base: object = None,
        reuses_memory: bool = False,
        check: Callable[[], object] = lambda: None,
    ) -> list[Segment]:
        assert record.number in self._series.leases, "a fetch without a lease"
        self.bases.append(base)
        numbers = range(len(record.segments)) if segments is None else segments
        self.fetched_bytes += sum(record.segments[each].num_bytes for each in numbers)
        found = [self._series.segments[record.segments[each].digest] for each in numbers]
        return [Segment.adopt(_duplicate(each), each.num_bytes) for each in found]

    def report(self, installed: int, digest: bytes, fetch_s: float, fetch_bytes: int) -> None:
        self._series.reports.append((installed, digest))

    def close(self) -> None:
        """Do nothing: no connection is open."""


def _duplicate(segment: Segment) -> int:
    return os.dup(segment.descriptor)
