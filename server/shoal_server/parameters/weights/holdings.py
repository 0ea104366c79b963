"""The segments in this server's memory: how they are admitted, received, verified and freed."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, aclosing
from functools import partial
from typing import TypeVar

import structlog

from shoal_proto import CHUNK_BYTES
from shoal_proto.errors import ChecksumMismatch, Unavailable
from shoal_proto.segments.digests import check_root, chunk_digest, num_chunks
from shoal_proto.segments.sealed import Segment, SegmentWriter
from shoal_proto.v1.weights_pb2 import StoreServer
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.weights.peers import WeightPeers
from shoal_server.parameters.weights.segment_transport import SegmentTransport
from shoal_server.parameters.weights.store import HeldSegment, Position, SegmentOrigin, SegmentStore

STALLED_S = 30.0
"""Longest time that a publisher may take to send a segment's descriptor or next chunk."""

log = structlog.get_logger(__name__)

T = TypeVar("T")


class WeightHoldings:
    """The segments that this server holds. Lives on the event loop; segments are digested on
    `threads`."""

    def __init__(
        self,
        memory: Memory,
        threads: Executor,
        peers: WeightPeers,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory
        self._threads = threads
        self._peers = peers
        self._now_s = now_s
        self._store = SegmentStore()
        self._claims: dict[tuple[str, bytes], ExitStack] = {}

    def get(self, series: str, digest: bytes) -> Segment:
        """Return a held segment. Raises Unavailable without one."""
        segment = self.find(series, digest)
        if segment is None:
            raise Unavailable(
                f"this server does not hold the segment of series {series}",
                seen=f"digest {digest.hex()}",
                expected="a segment that this server holds: another server that the version's"
                " record names may have it",
                details={"digest": digest.hex()},
            )
        return segment

    def find(self, series: str, digest: bytes) -> Segment | None:
        """Return a held segment, or None."""
        return self._store.get(series, digest)

    def holds(self, series: str, digest: bytes) -> bool:
        return self._store.get(series, digest) is not None

    def held(self) -> Iterable[HeldSegment]:
        """Return all held segments."""
        return self._store.held()

    def admit(self, series: str, digest: bytes, origin: SegmentOrigin) -> None:
        """See `SegmentStore.admit`."""
        self._store.admit(series, digest, origin)

    def renew(self, series: str, digest: bytes, origin: SegmentOrigin) -> Segment | None:
        """See `SegmentStore.renew`."""
        return self._store.renew(series, digest, origin, self._now_s())

    def sending(self, series: str, digest: bytes) -> AbstractContextManager[None]:
        """See `SegmentStore.sending`."""
        return self._store.sending(series, digest, self._now_s)

    def renew_all(self, series: str, position: Position) -> None:
        """See `SegmentStore.renew_all`."""
        self._store.renew_all(series, position, self._now_s())

    async def receive(
        self,
        series: str,
        digest: bytes,
        num_bytes: int,
        origin: SegmentOrigin,
        transport: SegmentTransport,
        *,
        of_chunks: bytes | None = None,
    ) -> Segment:
        """Receive a segment, as a descriptor if possible, and hold it once it is verified.

        `of_chunks`: digests of the chunks of a segment that comes as a descriptor, computed by its
        sender once the memory was write-protected. None: they are computed here.

        Raises what `admit` and `transport` raise, Overloaded if the server has no memory,
        ChecksumMismatch, MalformedMessage if descriptor or `of_chunks` do not fit, and Unavailable
        if a chunk takes longer than STALLED_S.
        """
        with self._claimed(num_bytes) as claim:
            if transport.is_local:
                if of_chunks is not None:
                    check_root(of_chunks, num_bytes, digest)
                descriptor = await _in_time(transport.receive_descriptor())
                segment = await self.in_thread(
                    partial(Segment.adopt, descriptor, num_bytes, of_chunks=of_chunks)
                )
            else:
                segment = await self._from_chunks(num_bytes, transport)
            self._check(segment, digest)
            # The series may have reached a later epoch meanwhile.
            self._store.admit(series, digest, origin)
            return self._hold(series, segment, origin, claim)

    async def copy(
        self, series: str, digest: bytes, num_bytes: int, source: StoreServer
    ) -> Segment:
        """Copy a segment from another server. Raises what `WeightPeers.fetch` raises, or
        Overloaded."""
        return await self.take(
            series, num_bytes, partial(self._peers.fetch, source, series, digest)
        )

    async def take(
        self, series: str, num_bytes: int, get: Callable[[], Awaitable[Segment]]
    ) -> Segment:
        """Hold the verified segment that `get` returns. Raises what `get` raises, or Overloaded."""
        with self._claimed(num_bytes) as claim:
            return self._hold(series, await get(), None, claim)

    async def make(
        self, series: str, num_bytes: int, origin: SegmentOrigin, fill: Callable[[memoryview], None]
    ) -> Segment:
        """Hold a segment whose bytes `fill` writes, on a thread, into memory that is all zeros.
        Raises what `admit` and `fill` raise, or Overloaded."""

        def made() -> Segment:
            writer = SegmentWriter(num_bytes)
            try:
                fill(writer.buffer)
                return writer.seal()
            except BaseException:
                writer.close()
                raise

        with self._claimed(num_bytes) as claim:
            segment = await self.in_thread(made)
            self._store.admit(series, segment.digest, origin)
            return self._hold(series, segment, origin, claim)

    def follow(self, series: str, newest: Position, named: Mapping[bytes, Position]) -> None:
        """See `SegmentStore.follow`."""
        self._free(series, self._store.follow(series, newest, named, self._now_s()))

    def forget(self, series: str) -> None:
        """See `SegmentStore.forget`."""
        self._free(series, self._store.forget(series))

    def abandon(self, series: str, rank: int, epoch: int, publications: Iterable[int]) -> None:
        """See `SegmentStore.abandon`."""
        self._free(series, self._store.abandon(series, rank, epoch, frozenset(publications)))

    def sweep(self) -> None:
        """Free the segments that no version has named for the grace period."""
        for held in self._store.sweep(self._now_s()):
            self._free(held.series, [held.segment])

    def close(self) -> None:
        """Free all segments. Readers that have mapped a segment keep it."""
        for claim in self._claims.values():
            claim.close()
        self._claims.clear()
        for held in self._store.held():
            held.segment.close()

    def _claimed(self, num_bytes: int) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(self._memory.reserve(num_bytes, "published weights"))
        return stack

    def _hold(
        self, series: str, segment: Segment, origin: SegmentOrigin | None, claim: ExitStack
    ) -> Segment:
        if not self._store.insert(series, segment, origin, self._now_s()):
            # Another call has added the same segment.
            segment.close()
            return self.get(series, segment.digest)
        self._claims[series, segment.digest] = claim.pop_all()
        log.info(
            "segment_held", series=series, digest=segment.digest.hex(), num_bytes=segment.num_bytes
        )
        return segment

    def _free(self, series: str, segments: Iterable[Segment]) -> None:
        freed = list(segments)
        for segment in freed:
            log.info(
                "segment_freed",
                series=series,
                digest=segment.digest.hex(),
                num_bytes=segment.num_bytes,
            )
            self._claims.pop((series, segment.digest)).close()
        if freed:
            # Freeing gigabytes takes a while: drop the last references on a thread, after the
            # callers'.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.run_in_executor, None, freed.clear)

    async def _from_chunks(self, num_bytes: int, transport: SegmentTransport) -> Segment:
        """Receive a segment. While a chunk arrives, threads digest the previous one and prepare
        memory for the next."""
        writer = SegmentWriter(num_bytes)
        loop = asyncio.get_running_loop()
        arrived: list[memoryview] = []
        digests: list[asyncio.Future[bytes]] = []
        ready: list[asyncio.Future[bool]] = []
        try:
            async with aclosing(transport.receive_chunks(writer)) as chunks:
                for index in range(num_chunks(num_bytes)):
                    start = (index + 1) * CHUNK_BYTES
                    size = min(CHUNK_BYTES, num_bytes - start)
                    if size > 0:
                        populated = loop.run_in_executor(
                            self._threads, writer.populate, start, size
                        )
                        ready.append(populated)
                    arrived.append(await _in_time(anext(chunks)))
                    digest = loop.run_in_executor(self._threads, chunk_digest, arrived[-1])
                    digests.append(digest)
            await asyncio.gather(*ready)
            of_chunks = b"".join(await asyncio.gather(*digests))
            # A thread may still refer to a chunk, and memory with references cannot be sealed.
            for chunk in arrived:
                chunk.release()
            return await self.in_thread(partial(writer.seal, of_chunks))
        except BaseException:
            await asyncio.gather(*ready, *digests, return_exceptions=True)
            writer.close()
            raise

    def _check(self, segment: Segment, digest: bytes) -> None:
        if segment.digest != digest:
            seen = segment.digest.hex()
            segment.close()
            raise ChecksumMismatch(
                "a segment changed in transit", seen=f"digest {seen}", expected=digest.hex()
            )

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` on a thread of the store."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


async def _in_time(arriving: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(STALLED_S):
            return await arriving
    except TimeoutError:
        raise Unavailable(
            "the publisher of a segment sends too slowly, or has stopped",
            seen=f"no whole chunk and no descriptor for {STALLED_S:g} s",
            expected="the next chunk, of 8 MiB at most, or the descriptor",
        ) from None
