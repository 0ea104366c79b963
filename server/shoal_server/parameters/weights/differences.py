"""Differences between segments on this server, made on demand and kept for a while."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass

import structlog

from shoal_difference import codec
from shoal_proto.errors import InvalidSpec, Overloaded
from shoal_proto.segments.sealed import Segment, SegmentWriter
from shoal_server.parameters.shard.memory import Memory

log = structlog.get_logger(__name__)

MAX_CHANGED = 0.2
"""Share of changed 16-bit words, estimated from samples, above which the whole segment is sent."""
MAX_SIZE = 0.5
"""Largest difference that is worth sending, as a share of the whole segment."""
KEPT_S = 60.0
MAX_KEPT = 64

Elements = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Key:
    """Digests of the two segments, and the runs of elements that the reader has named."""

    series: str
    base: bytes
    target: bytes
    elements: Elements


@dataclass(slots=True)
class _CachedDifference:
    difference: Segment | None
    claim: ExitStack
    used_s: float


class WeightDifferences:
    """Differences of all series. Lives on the event loop. Requests for the same difference get the
    same object."""

    def __init__(
        self, memory: Memory, threads: Executor, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._memory = memory
        self._threads = threads
        self._now_s = now_s
        self._kept: OrderedDict[_Key, _CachedDifference] = OrderedDict()
        self._being_made: dict[_Key, asyncio.Future[_CachedDifference]] = {}
        self._is_closed = False

    def find(self, series: str, digest: bytes) -> Segment | None:
        """Return a kept difference by its digest, and keep it for KEPT_S more; None if there is
        none."""
        for key, kept in self._kept.items():
            made = kept.difference
            if key.series == series and made is not None and made.digest == digest:
                self._note_use(key, kept)
                return made
        return None

    async def between(
        self, series: str, base: Segment, target: Segment, elements: Sequence[tuple[int, int]]
    ) -> Segment | None:
        """Return the difference from `base` to `target`; None if the whole segment is to be sent.

        `elements`: runs of elements as (bytes of an element, bytes of the run). Raises InvalidSpec
        if the runs do not make up the segments, or an element's size is not in `codec.SIZES`.
        """
        if base.num_bytes != target.num_bytes:
            return None
        _check_elements(elements, target.num_bytes)
        key = _Key(series, base.digest, target.digest, tuple(elements))
        kept = self._kept.get(key)
        if kept is None:
            making = self._being_made.get(key)
            if making is None:
                making = self._being_made[key] = asyncio.ensure_future(
                    self._make(key, base, target)
                )
                making.add_done_callback(lambda _: self._being_made.pop(key, None))
            kept = await asyncio.shield(making)
        self._note_use(key, kept)
        return kept.difference

    def sweep(self) -> None:
        """Drop the differences that were not requested for KEPT_S."""
        for key, kept in list(self._kept.items()):
            if self._now_s() - kept.used_s >= KEPT_S:
                self._drop(key)

    def close(self) -> None:
        """Drop all differences, and keep no others."""
        self._is_closed = True
        for key in list(self._kept):
            self._drop(key)

    async def _make(self, key: _Key, base: Segment, target: Segment) -> _CachedDifference:
        began_s = self._now_s()
        with ExitStack() as claim:
            try:
                most_bytes = int(MAX_SIZE * target.num_bytes)
                loop = asyncio.get_running_loop()
                with self._memory.reserve(most_bytes, "differences of weights"):
                    difference = await loop.run_in_executor(
                        self._threads, _encode, base, target, key.elements
                    )
                if difference is not None:
                    taken = self._memory.reserve(difference.num_bytes, "differences of weights")
                    claim.enter_context(taken)
            except Overloaded as error:
                # The failure is not cached: there may be memory at the next request.
                log.info("difference_not_made", series=key.series, reason=str(error))
                return _CachedDifference(None, ExitStack(), self._now_s())
            if self._is_closed:
                return _CachedDifference(None, ExitStack(), self._now_s())
            kept = self._kept[key] = _CachedDifference(difference, claim.pop_all(), self._now_s())
        if len(self._kept) > MAX_KEPT:
            self._drop(next(iter(self._kept)))
        if difference is None:
            log.info("difference_not_made", series=key.series, reason="too much has changed")
            return kept
        log.info(
            "difference_made",
            series=key.series,
            num_bytes=difference.num_bytes,
            of_bytes=target.num_bytes,
            took_s=round(self._now_s() - began_s, 3),
        )
        return kept

    def _note_use(self, key: _Key, kept: _CachedDifference) -> None:
        kept.used_s = self._now_s()
        if key in self._kept:
            self._kept.move_to_end(key)

    def _drop(self, key: _Key) -> None:
        kept = self._kept.pop(key)
        kept.claim.close()
        if kept.difference is not None:
            # A connection that is sending the difference has its own reference.
            kept.difference = None


def _encode(base: Segment, target: Segment, elements: Elements) -> Segment | None:
    old, new = base.view(), target.view()
    if codec.changed_share(old, new) > MAX_CHANGED:
        return None
    parts = codec.encode(old, new, elements)
    num_bytes = sum(map(len, parts))
    if num_bytes > MAX_SIZE * target.num_bytes:
        return None
    writer = SegmentWriter(num_bytes)
    at = 0
    for part in parts:
        writer.buffer[at : at + len(part)] = part
        at += len(part)
    return writer.seal()


def _check_elements(elements: Sequence[tuple[int, int]], num_bytes: int) -> None:
    made_up = sum(run_bytes for _, run_bytes in elements)
    sizes = {size for size, _ in elements}
    if made_up != num_bytes or not sizes <= set(codec.SIZES):
        raise InvalidSpec(
            "elements that do not make up the segment",
            seen=f"{made_up} bytes of elements of {sorted(sizes)} bytes",
            expected=f"{num_bytes} bytes of elements of {codec.SIZES} bytes",
        )
