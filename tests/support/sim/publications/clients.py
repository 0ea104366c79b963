"""Publishers and readers, as clients of the coordinators' service and of the servers."""

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from support.sim.event_loop import LoopProcess
from support.sim.publications.coordinators import ask
from support.sim.publications.ledger import Content
from support.sim.publications.segments import SimSegment

from shoal_client.weights.cut_parts import cut_parts
from shoal_proto.errors import (
    InvalidSpec,
    NoServers,
    Overloaded,
    PublicationAbandoned,
    Regressed,
    RetryError,
    SeriesHeld,
    ShoalError,
    StaleEpoch,
    VersionGone,
)
from shoal_proto.v1 import weights_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_server.coordinator.publications.messages import publisher_of
from shoal_server.parameters.weights.store import SegmentOrigin

if TYPE_CHECKING:
    from support.sim.publications.world import PublicationWorld

ROWS = 12
CALL_S = 2.0
PART_S = 30.0
CUT_S = 30.0
CUTS_AGAIN = 0.2
"""Fraction of retries in which a publisher takes another cut, as Shoal's client never does."""
ANSWER_S = 6.0
"""Time without an answer after which a part is contributed again."""


class SimPublisher:
    """A rank of a publisher: a member of a generation, or a plain script."""

    def __init__(
        self,
        world: "PublicationWorld",
        series: str,
        message: pb.Publisher,
        rank: int,
        num_ranks: int,
    ) -> None:
        self.world = world
        self.series = series
        self.message = message
        self.publisher = publisher_of(series, message)
        self.rank = rank
        self.num_ranks = num_ranks
        self.process = LoopProcess(world.clock, f"{series} {self.publisher} rank {rank}")
        self.epoch = 0
        self.num_committed = 0
        self.is_replaced = False
        self.think_s = 1.0

    def start(self) -> None:
        self.process.start(self._publish_for_ever())

    async def _publish_for_ever(self) -> None:
        chance, publication = self.world.clock.random, 0
        while not self.is_replaced:
            await asyncio.sleep(chance.random() * self.think_s)
            publication += 1
            try:
                await self._publish(publication)
                self.num_committed += 1
            except PublicationAbandoned:
                self.world.ledger.abandoned(self.series, self.epoch, publication)
            except StaleEpoch:
                # A member stops for good. A script may try again, and is refused again.
                self.is_replaced = not self.message.incarnation or chance.random() < 0.5
            except (SeriesHeld, Overloaded, NoServers):
                await asyncio.sleep(5.0)

    def _part(self, publication: int) -> tuple[SimSegment, pb.ContributePartRequest]:
        start, stop = (ROWS * r // self.num_ranks for r in (self.rank, self.rank + 1))
        if self.world.is_faulty(publication, self.rank):
            start = max(0, start - 1)  # these rows are another rank's too
        data = f"{self.series} {self.publisher} {publication} {self.rank}".encode()
        digest = hashlib.sha256(data).digest()
        self.world.ledger.contents[digest] = Content(
            self.series, self.publisher, publication, self.rank, self.num_ranks, data
        )
        num_bytes = (stop - start) * 4
        layout = pb.Layout(
            tensors=[pb.TensorSpec(name="w", dtype="float32", shape=[ROWS])],
            slices=[pb.Slice(tensor=0, offsets=[start], sizes=[stop - start], segment=self.rank)],
            segment_bytes=[num_bytes],
        )
        request = pb.ContributePartRequest(
            publisher=self.message,
            series=self.series,
            publication=publication,
            rank=self.rank,
            world=self.num_ranks,
            segment=pb.Segment(digest=digest, num_bytes=num_bytes),
            layout=layout,
            step=publication,
        )
        return SimSegment(digest, data), request

    async def _publish(self, publication: int) -> None:
        segment, request = self._part(publication)
        until_s = self.process.now_s + PART_S
        while True:
            try:
                begun = await self._begin()
                self.epoch = request.epoch = begun.epoch
                holders = await self._put(begun, segment, publication)
                del request.segment.holders[:]
                request.segment.holders.extend(holders)
                await self._complete(request)
                reply = await self._ask(lambda s: s.Contribute(request, None), ANSWER_S)
            except RetryError:
                if self.process.now_s > until_s:
                    return  # the outcome is unknown
                await asyncio.sleep(0.2 + self.world.clock.random.random())
                continue
            version = reply.version
            self.world.ledger.answered(self.series, segment.digest, self.rank, version)
            return

    async def _complete(self, request: pb.ContributePartRequest) -> None:
        """Add what servers contribute; nothing for a series without tables."""

    async def _begin(self) -> pb.BeginPublicationReply:
        request = pb.BeginPublicationRequest(
            publisher=self.message,
            series=self.series,
            options=pb.SeriesOptions(keep=self.world.keep, copies=2),
            rank=self.rank,
            world=self.num_ranks,
            epoch=self.epoch,
        )

        class _Context:
            @staticmethod
            def peer() -> str:
                return ""

        reply: pb.BeginPublicationReply = await self._ask(
            lambda s: s.Begin(request, _Context()), CALL_S
        )
        return reply

    async def _put(
        self, begun: pb.BeginPublicationReply, segment: SimSegment, publication: int
    ) -> list[str]:
        origin = SegmentOrigin(epoch=begun.epoch, publication=publication, rank=self.rank)
        names = [each.id for each in begun.servers]
        if not names:
            raise NoServers("no servers")
        server, asked_s = self.world.servers[names[0]], self.world.clock.now_s
        holders: list[str] = await server.call(
            self.process,
            lambda: server.put(self.series, segment, origin, names[1:]),
            2 * CALL_S,
        )
        if set(holders) != set(names):
            raise _unavailable(f"{holders} of {names}")
        self.world.ledger.acknowledged(self.series, segment.digest, len(holders), asked_s=asked_s)
        return holders

    async def _ask(self, make: Callable[..., object], timeout_s: float) -> pb.ContributePartReply:
        return await ask(  # type: ignore[no-any-return]
            self.world.etcd, self.process, self.world.coordinators, make, timeout_s
        )


class SimTablesPublisher(SimPublisher):
    """The rank that publishes a cut of the shards, with a part of its own."""

    async def _publish(self, publication: int) -> None:
        pushed = {each.session: each.acknowledged for each in self.world.workers}
        self.world.ledger.pushed[str(self.publisher), publication] = pushed
        with suppress(InvalidSpec):  # another cut than the one that was committed
            await super()._publish(publication)

    async def _complete(self, request: pb.ContributePartRequest) -> None:
        if request.cut_parts and self.world.clock.random.random() > CUTS_AGAIN:
            return
        del request.cut_parts[:]
        wanted = pb.CutTablesRequest(
            publisher=self.message,
            series=self.series,
            epoch=request.epoch,
            publication=request.publication,
        )
        asked_s = self.world.clock.now_s
        cut: pb.CutTablesReply = await ask(
            self.world.etcd,
            self.process,
            self.world.coordinators,
            lambda s: s.CutTables(wanted, None),
            CUT_S,
        )
        request.cut_parts.extend(cut_parts(cut, {}))
        request.tables_cut = cut.tables_cut
        self.world.ledger.partial.setdefault(cut.tables_cut, set()).update(cut.partial_steps)
        for each in cut.segments:
            segment = each.segment
            self.world.ledger.acknowledged(
                self.series, segment.digest, len(segment.holders), asked_s=asked_s
            )


class SimReader:
    """A process that installs newer versions, again and again."""

    def __init__(self, world: "PublicationWorld", series: str, name: str) -> None:
        self.world = world
        self.series = series
        self.name = name
        self.process = LoopProcess(world.clock, name)
        self.installed = 0
        self._digest = b""
        self._num_reports = 0
        self.leases: dict[int, float] = {}
        """Expiry of each version's lease, by the reader's clock."""
        self.slow_s = 0.5
        """Longest time to fetch a segment."""

    def start(self) -> None:
        self.process.start(self._read_for_ever())

    def leased(self) -> list[int]:
        """Return the versions whose leases have not expired by the reader's clock."""
        return [n for n, until_s in self.leases.items() if self.process.now_s < until_s]

    async def _read_for_ever(self) -> None:
        chance = self.world.clock.random
        while True:
            await asyncio.sleep(0.4 + 1.2 * chance.random())
            try:
                await self._read()
            except (RetryError, VersionGone):
                continue
            except Regressed as error:
                raise AssertionError(str(error)) from error

    async def _read(self) -> None:
        view = await self._view()
        newer = [v for v in view.versions if v.number > self.installed]
        if not newer:
            await self._report([])
            return
        chance = self.world.clock.random
        version = newer[-1] if chance.random() < 0.7 else chance.choice(newer)
        if version.number in (await self._report([version.number])).gone:
            return
        renewed_s = self.process.now_s
        data = []
        for segment in version.segments:
            await asyncio.sleep(chance.random() * self.slow_s)
            if self.process.now_s - renewed_s > 8.0:
                renewed_s = self.process.now_s
                if version.number in (await self._report([version.number])).gone:
                    raise VersionGone("the lease has ended")
            data.append(await self._fetch(segment))
        self.world.ledger.installed(self.series, self.installed, version, data)
        self.installed, self._digest = version.number, version.digest
        await self._report([])

    async def _fetch(self, segment: pb.Segment) -> bytes:
        """Fetch from any holder. Raises VersionGone if none has it."""
        holders = list(segment.holders)
        self.world.clock.random.shuffle(holders)
        failure: ShoalError = VersionGone("nobody has it")
        for holder in holders:
            server = self.world.servers.get(holder)
            if server is None:
                continue
            try:
                found: SimSegment = await server.call(
                    self.process,
                    lambda s=server: s.fetch(self.series, segment.digest),  # type: ignore[misc]
                    CALL_S,
                )
            except (RetryError, VersionGone) as error:
                failure = error
                continue
            if hashlib.sha256(found.data).digest() == segment.digest:
                return found.data
        raise failure

    async def _report(self, leased: list[int]) -> pb.ReaderReportReply:
        sent_s = self.process.now_s
        # Leases that are not requested again are released.
        self.leases = {n: until_s for n, until_s in self.leases.items() if n in leased}
        self._num_reports += 1
        request = pb.ReaderReport(
            sequence=self._num_reports,
            series=self.series,
            reader=self.name,
            leased=leased,
            installed=self.installed,
            installed_digest=self._digest,
        )
        reply: pb.ReaderReportReply = await ask(
            self.world.etcd,
            self.process,
            self.world.coordinators,
            lambda s: s.Report(request, None),
            CALL_S,
        )
        self.leases = dict.fromkeys(reply.leased, sent_s + reply.lease_s)
        return reply

    async def _view(self) -> pb.SeriesView:
        request = pb.WatchSeriesRequest(series=self.series)
        return await ask(  # type: ignore[no-any-return]
            self.world.etcd,
            self.process,
            self.world.coordinators,
            lambda s: _first(s.Watch(request, None)),
            CALL_S,
        )


async def _first(stream: object) -> object:
    async for view in stream:  # type: ignore[attr-defined]
        await stream.aclose()  # type: ignore[attr-defined]
        return view
    raise AssertionError("a watch that says nothing")


def _unavailable(what: str) -> RetryError:
    return RetryError(what)


def member(generation: int) -> pb.Publisher:
    token = Token(job="rl", member_id="m", incarnation=f"i{generation}", generation=generation)
    return pb.Publisher(token=token)


def script(number: int) -> pb.Publisher:
    return pb.Publisher(incarnation=f"script {number}")
