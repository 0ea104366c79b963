"""Readers of a series: outside the roster, and without cost for trainers.

A fetch holds a lease on the version. All wanted chunks are verified and staged before a tensor of
the reader is written.
"""

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from hashlib import sha256
from types import TracebackType
from typing import Literal, Self

import structlog
import torch
from torch import Tensor

from shoal.weights.reading import (
    Installation,
    Target,
    VersionLayout,
    table_rows,
    whole_tensors,
)
from shoal.weights.rows import PublishedRows, RowChanges
from shoal.weights.version import WeightVersion
from shoal_client.weights.reader import TIMEOUT_S, Base, SeriesReader
from shoal_proto.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    InvalidSpec,
    Regressed,
    VersionGone,
)
from shoal_proto.incarnation import new_incarnation
from shoal_proto.numbers_given import as_index, as_number
from shoal_proto.segments.reused import ReusedSegment
from shoal_proto.segments.sealed import Segment
from shoal_proto.v1 import weights_pb2

log = structlog.get_logger(__name__)

WAIT_S = 1.0
"""Limit of one wait on another thread: a wait continues after its task was cancelled."""

CATCH_UP_S = 3.0
"""Limit of the wait for a version that is newer than the newest known one."""

Wanted = WeightVersion | int | Literal["newest"]


class Weights(Mapping[str, Tensor]):
    """The tensors of one version by name, verified. Without tensors if `fetch` installed them.

    A tensor that is stored in one slice is a view of the segment's memory. Writing to it changes
    only this process's copy of the pages.
    """

    def __init__(
        self,
        version: WeightVersion,
        tensors: Mapping[str, Tensor],
        tables: Mapping[str, PublishedRows] | None = None,
        changes: Mapping[str, RowChanges] | None = None,
    ) -> None:
        self.version = version
        self._tensors = tensors
        self.tables: Mapping[str, PublishedRows] = tables or {}
        """Embedding tables by name, in a subscription with `tables`."""
        self.changes: Mapping[str, RowChanges] = changes or {}
        """Rows that differ from this subscription's installed version, by table; all rows if no
        version is installed.
        """
        self.is_released = False
        """True after the `with` block: tensors, tables and changes are gone."""

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"Weights({self.version!r}, {len(self)} tensors)"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.is_released = True
        self._tensors, self.tables, self.changes = {}, {}, {}


class _FetchCancelled(Exception):
    """Raised in the thread of a fetch that was cancelled."""


class _Turn:
    """Decides, on two threads, if a fetch installs its version or is cancelled before."""

    def __init__(self) -> None:
        self._decided = threading.Lock()
        """Taken by the first of them, and never released."""
        self._is_cancelled = False

    def cancel(self) -> bool:
        """False if the installation has begun."""
        self._is_cancelled = self._decided.acquire(blocking=False)
        return self._is_cancelled

    def begin_installing(self) -> None:
        """Raises _FetchCancelled after `cancel`."""
        if not self._decided.acquire(blocking=False):
            raise _FetchCancelled

    def check(self) -> None:
        """Raises _FetchCancelled after `cancel`."""
        if self._is_cancelled:
            raise _FetchCancelled


class Subscription:
    """Reader of a series. Any thread may call its methods; calls of `fetch` run one at a time."""

    def __init__(self, reader: SeriesReader, series: str, *, tables: bool = False) -> None:
        self.series = series
        self._has_tables = tables
        self._rows: Mapping[str, PublishedRows] = {}
        self._reader = reader
        self._layouts: dict[bytes, VersionLayout] = {}
        self._installing = threading.RLock()
        self._installed: WeightVersion | None = None
        self._base: Base | None = None
        """The version last fetched over a network; the next is fetched as a difference to it."""

    # --- versions ---

    @property
    def version(self) -> int:
        """Number of the version that this reader has installed; 0 if none."""
        return 0 if self._installed is None else self._installed.number

    def newest(self) -> WeightVersion | None:
        """Return the newest version that this reader has been told of, without waiting for one;
        None if servers keep none."""
        versions = self.versions()
        return versions[-1] if versions else None

    def versions(self) -> list[WeightVersion]:
        """Return the versions that servers keep, oldest first.

        Raises DeadlineExceeded after 10 minutes without a coordinator, or the coordinator's
        refusal; so does `newest`.
        """
        return [WeightVersion(record) for record in self._reader.view().versions]

    def wait(self, newer_than: int | None = None, timeout: float | None = None) -> WeightVersion:
        """Wait for a version newer than `newer_than`, by default the installed one; return the
        newest.

        Raises DeadlineExceeded after `timeout` seconds (None: never), the coordinator's refusal, or
        Unavailable once the subscription is closed.
        """
        timeout = None if timeout is None else as_number("timeout", timeout)
        bound = self.version if newer_than is None else newer_than
        return WeightVersion(self._reader.wait(bound, timeout))

    def __iter__(self) -> Iterator[WeightVersion]:
        """Yield the newest version, if it is newer than the installed one, and then newer ones,
        without end.

        Of several that are published meanwhile only the newest is yielded. Raises what `wait`
        raises.
        """
        last = self.version
        while True:
            version = self.wait(last)
            last = version.number
            yield version

    def leased(self, version: WeightVersion) -> AbstractContextManager[None]:
        """Keep servers from dropping a version within a block: other readers can fetch it.

        Raises VersionGone if the version is not kept any more, the coordinator's refusal, and a
        RetryError after 10 minutes without a coordinator.
        """
        return self._reader.leased(version.number, TIMEOUT_S)

    # --- tensors ---

    def fetch(self, version: Wanted = "newest", into: Target | None = None) -> Weights:
        """Fetch and verify all tensors of a version. "newest" is at least as new as any version
        that was committed before this call.

        With `into`, a module or tensors by name, the version is installed there and reported, and
        the returned Weights have no tensors. Of DTensors only chunks with this process's slices are
        fetched. No tensor changes before all chunks are staged and verified. If the newest
        version is dropped meanwhile, "newest" fetches the next version, if there is one within 3 s.

        Raises VersionGone if the version is not kept; if it is newer than all known versions, only
        after 3 s. With `into`, raises Regressed if the version is older than the installed one, and
        InvalidSpec, ShapeMismatch or DtypeMismatch if it does not fit. Raises InvalidSpec if the
        version lacks tables in a subscription with `tables`, and, in a relay or with tables, if
        `into` holds slices. Also raises the coordinator's refusals, and a RetryError or
        CorruptError if calls fail for long.
        """
        return self._fetched_once(version, into, _Turn())

    def _fetched_once(self, version: Wanted, into: Target | None, turn: "_Turn") -> Weights:
        with self._installing:
            while True:
                turn.check()
                record = self._record_of(version, turn)
                try:
                    found = self._fetch(record, into, turn, is_newest=version == "newest")
                    if found is not None:
                        return found
                except VersionGone:
                    if version != "newest" or not self._has_newer_soon(record.number):
                        raise

    def _has_newer_soon(self, number: int) -> bool:
        with suppress(DeadlineExceeded):
            self._reader.wait(number, CATCH_UP_S)
            return True
        return False

    def _is_outdated(self, record: weights_pb2.VersionRecord, turn: "_Turn") -> bool:
        """True if there was a newer version when this reader leased the record's. Views arrive on a
        stream, which may be late or interrupted."""
        self._catch_up(turn)
        versions = self._reader.view().versions
        return bool(versions) and versions[-1].number > record.number

    def _catch_up(self, turn: "_Turn") -> None:
        give_up_s = time.monotonic() + TIMEOUT_S
        while True:
            turn.check()
            try:
                self._reader.catch_up(WAIT_S)
                return
            except DeadlineExceeded:
                if time.monotonic() >= give_up_s:
                    raise

    def _fetch(
        self,
        record: weights_pb2.VersionRecord,
        into: Target | None,
        turn: "_Turn",
        *,
        is_newest: bool,
    ) -> Weights | None:
        """Fetch the version. With `is_newest`, return None if it is not the newest."""
        if into is not None:
            self.check_newer(WeightVersion(record))
        self._reader.lease(record.number)
        try:
            if is_newest and self._is_outdated(record, turn):
                return None
            layout = self._layout_of(record)
            target = None if into is None else Installation(layout, into)
            started_s = time.perf_counter()
            ranges = None if target is None else target.ranges
            if ranges is not None and self._has_tables:
                raise InvalidSpec(
                    "tables are fetched with whole tensors only",
                    seen="into= of DTensors that hold slices",
                    expected="a subscription without tables, or tensors that are whole",
                )
            numbers = layout.segments_of(tables=self._has_tables)
            # An installation copies the tensors; rows of tables stay views of the staged memory.
            reuses_memory = target is not None and not self._has_tables
            segments = self._staged(
                record, numbers, ranges, reuses_memory=reuses_memory, check=turn.check
            )
            took_s = time.perf_counter() - started_s
        finally:
            self._reader.release(record.number)
        version = WeightVersion(record)
        memory = {number: memory_of(each) for number, each in segments.items()}
        num_bytes = sum(each.num_bytes for each in segments.values())
        tables, changes = {}, {}
        if self._has_tables:
            tables = table_rows(layout, memory)
            changes = {n: each.changes_since(self._rows.get(n)) for n, each in tables.items()}
        if target is None:
            self._fetched = (took_s, num_bytes)
            return Weights(version, whole_tensors(layout, memory), tables, changes)
        turn.begin_installing()
        target.write(memory)
        self._report(version, took_s, num_bytes)
        self._rows = tables
        return Weights(version, {}, tables, changes)

    def installed(self, weights: Weights | WeightVersion) -> None:
        """Report that the reader has installed the version.

        Raises Regressed if a newer version is installed. In a subscription with tables also raises
        InvalidSpec for a WeightVersion, and for Weights after their `with` block.
        """
        version = weights.version if isinstance(weights, Weights) else weights
        with self._installing:
            self.check_newer(version)
            if self._has_tables:
                if not isinstance(weights, Weights) or weights.is_released:
                    raise InvalidSpec(
                        "a subscription with tables installs only Weights returned by fetch()",
                        seen=repr(weights),
                        expected="the Weights that the last call returned, within their `with`"
                        " block: the next changes are those to its rows",
                    )
                self._rows = weights.tables
            self._report(version, *self._fetched)

    _fetched = (0.0, 0)

    def _report(self, version: WeightVersion, took_s: float, num_bytes: int) -> None:
        self._installed = version
        self._reader.report(version.number, version.record.digest, took_s, num_bytes)

    def check_newer(self, version: WeightVersion) -> None:
        """Raise Regressed if the version is older than the installed version."""
        if version.number < self.version:
            raise Regressed(
                f"version {version.number} of {self.series} is older than the installed one",
                seen=f"version {self.version} installed",
                expected="the same or a newer one",
                fix="Roll the series back instead (shoal weights rollback), which makes a new"
                " version with the old bytes.",
            )

    def _record_of(self, wanted: Wanted, turn: "_Turn") -> weights_pb2.VersionRecord:
        if isinstance(wanted, WeightVersion):
            return wanted.record
        if wanted != "newest":
            wanted = as_index("version", wanted)
        versions = self._reader.view().versions
        if wanted == "newest":
            if not versions:
                # The coordinator may know of the first version before this reader does.
                self._reader.report_now()
                self._catch_up(turn)
                versions = self._reader.view().versions
            if not versions:
                raise VersionGone(
                    f"series {self.series} has no version yet",
                    expected="a version; wait(newer_than=0) returns once there is one",
                )
            return versions[-1]
        if not versions or wanted > versions[-1].number:
            # The publisher may know of the version before this reader does.
            with suppress(DeadlineExceeded):
                self._reader.wait(wanted - 1, CATCH_UP_S)
            versions = self._reader.view().versions
        for record in versions:
            if record.number == wanted:
                return record
        kept = f"{versions[0].number} to {versions[-1].number}" if versions else "none"
        raise VersionGone(f"version {wanted} of {self.series} is not kept", seen=f"kept: {kept}")

    def _layout_of(self, record: weights_pb2.VersionRecord) -> VersionLayout:
        layout = self._layouts.get(record.layout_digest)
        if layout is None:
            # Layouts change with the number of members; the last few are enough.
            while len(self._layouts) >= 4:
                self._layouts.pop(next(iter(self._layouts)))
            layout = VersionLayout(self._reader.layout(record))
            self._layouts[record.layout_digest] = layout
        if self._has_tables and not record.tables_cut:
            raise InvalidSpec(
                f"version {record.number} of {self.series} has no tables",
                expected="session.series(..., tables=True) in the job that publishes it",
                fix="Subscribe without tables.",
            )
        sizes = [segment.num_bytes for segment in record.segments]
        if sizes != list(layout.segment_bytes):
            raise ChecksumMismatch(
                f"version {record.number} of {self.series} does not fit its layout",
                seen=f"segments of {sizes} bytes",
                expected=f"{list(layout.segment_bytes)}",
            )
        return layout

    def _staged(
        self,
        record: weights_pb2.VersionRecord,
        numbers: Sequence[int],
        ranges: Mapping[int, Sequence[tuple[int, int]]] | None,
        *,
        reuses_memory: bool,
        check: Callable[[], object],
    ) -> dict[int, Segment]:
        if ranges is not None:
            numbers = sorted(ranges)
        before = self._reader.fetched_bytes
        staged = self._reader.fetch(
            record, numbers, ranges, base=self._base, reuses_memory=reuses_memory, check=check
        )
        segments = dict(zip(numbers, staged, strict=True))
        digests = [
            segments[number].digest if number in segments else recorded.digest
            for number, recorded in enumerate(record.segments)
        ]
        # Checked against the bytes that have arrived: this digest is reported as installed.
        if (seen := version_digest(record.layout_digest, digests)) != record.digest:
            raise ChecksumMismatch(
                f"version {record.number} of {self.series} differs from what was published",
                seen=f"digest {seen.hex()}",
                expected=record.digest.hex(),
            )
        if ranges is None and self._reader.fetched_bytes > before:
            # The next version is fetched as a difference to this one. Memory shared with servers of
            # this host is not a base, as the servers must be free to drop it.
            self._base = Base(record, segments)
        return segments

    # --- for event loops ---

    async def wait_async(
        self, newer_than: int | None = None, timeout: float | None = None
    ) -> WeightVersion:
        """Wait as `wait` does, without blocking the event loop."""
        ends_s = None if timeout is None else time.monotonic() + as_number("timeout", timeout)
        while True:
            # Each wait is short, as cancelling the task does not end the thread.
            left_s = WAIT_S if ends_s is None else min(WAIT_S, ends_s - time.monotonic())
            try:
                return await asyncio.to_thread(self.wait, newer_than, max(left_s, 0.0))
            except DeadlineExceeded:
                if ends_s is not None and time.monotonic() >= ends_s:
                    raise

    async def fetch_async(self, version: Wanted = "newest", into: Target | None = None) -> Weights:
        """Fetch as `fetch` does, without blocking the event loop. If it is cancelled, it installs
        nothing, unless the installation has begun: then it is finished first."""
        turn = _Turn()
        fetching = asyncio.ensure_future(asyncio.to_thread(self._fetched_once, version, into, turn))
        try:
            return await asyncio.shield(fetching)
        except asyncio.CancelledError:
            if not turn.cancel():
                await asyncio.wait([fetching])
            # Its thread ends later; its error is of no interest.
            fetching.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    async def __aiter__(self) -> AsyncIterator[WeightVersion]:
        async for version in self.stream():
            yield version

    async def stream(self, every: int | None = None) -> AsyncIterator[WeightVersion]:
        """Yield versions newer than the installed one as they are committed.

        Each time yields the newest version or, with `every`, all kept versions with numbers that
        are multiples of `every`. Raises what `wait` raises; also InvalidSpec if `every` is below 1.
        """
        if every is not None:
            every = as_index("every", every, least=1)
        last = self.version
        while True:
            version = await self.wait_async(last)
            if every is not None:
                # Read again for each version: the caller's work takes time, in which others are
                # dropped.
                kept = await asyncio.to_thread(self.versions)
                wanted = [v for v in kept if v.number > last and v.number % every == 0]
                if not wanted:
                    last = version.number
                    continue
                version = min(wanted, key=lambda v: v.number)
            yield version
            last = version.number

    # --- end ---

    def close(self) -> None:
        """Release the leases and end the subscription. May be called twice."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def version_digest(layout_digest: bytes, segment_digests: list[bytes]) -> bytes:
    """Compute the digest of a version's content."""
    return sha256(layout_digest + b"".join(segment_digests)).digest()


def memory_of(segment: Segment) -> Tensor:
    """Return the segment's bytes, without a copy. Writes change no other process's pages."""
    if not segment.num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    if isinstance(segment, ReusedSegment):
        return torch.frombuffer(segment.memory(), dtype=torch.uint8)
    # A segment is sealed against writing, but can be mapped privately (copy on write).
    return torch.frombuffer(segment.private_memory(), dtype=torch.uint8)


def version_lookup(addresses: Sequence[str], series: str) -> Callable[[int, float], WeightVersion]:
    """Return a function that asks the coordinator for a version, within a time in seconds."""

    def look(number: int, timeout_s: float) -> WeightVersion:
        reader = SeriesReader(addresses, series, reader_id())
        try:
            return WeightVersion(reader.record(number, min(timeout_s, TIMEOUT_S)))
        finally:
            reader.close()

    return look


def reader_id(name: str | None = None) -> str:
    """Generate an id for a reader: `name`, by default host and process id, and a suffix that makes
    it unique. A second reader with the same id would end the first one's leases."""
    if name is None:
        name = f"{socket.gethostname()[:32]}-{os.getpid()}"
    return f"{name}-{new_incarnation()[-12:]}"
