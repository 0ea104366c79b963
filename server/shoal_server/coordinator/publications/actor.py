"""Actor of one series, which carries out the core's decisions."""

import asyncio
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import structlog

from shoal_proto.errors import InternalError, InvalidSpec, ShoalError
from shoal_proto.v1 import weights_pb2 as pb
from shoal_server.coordinator.publications import messages
from shoal_server.coordinator.publications.layouts import MergedLayouts
from shoal_server.coordinator.publications.stored_series import SeriesWriter
from shoal_server.coordinator.publications.stores import Stores
from shoal_server.core.publications.coverage import NotCovered
from shoal_server.core.publications.holders import Holders, verified
from shoal_server.core.publications.protocol import (
    Call,
    Cleared,
    ContributorLeft,
    Effect,
    Event,
    HeadWritten,
    NotifyWatchers,
    PartsRejected,
    PartsVerified,
    PublicationBegun,
    RequestRefused,
    TimePassed,
    VerifyParts,
    VersionAnswered,
    VersionsChanged,
    WriteSeries,
)
from shoal_server.core.publications.readers import ReaderReport
from shoal_server.core.publications.records import PublishedSegment
from shoal_server.core.publications.series import PublishedSeries
from shoal_server.etcd.repeat import until_answered
from shoal_server.serving.tasks import SupervisedTasks

log = structlog.get_logger(__name__)

Answer = PublicationBegun | VersionAnswered | Cleared
VERIFY_ATTEMPTS = 4
VERIFY_PAUSE_S = 0.5


class SeriesActor:
    """A series, on a leader's event loop, until `end`."""

    def __init__(
        self,
        series: PublishedSeries,
        writer: SeriesWriter,
        *,
        stores: Stores,
        layouts: MergedLayouts,
        tasks: SupervisedTasks,
        clock: Callable[[], float],
    ) -> None:
        self.series = series
        self.writer = writer
        self._stores = stores
        self._layouts = layouts
        self._tasks = tasks
        self._clock = clock
        self.holders = Holders()
        self.ended: ShoalError | None = None
        """Error for all calls after the end; None before."""
        self._calls: dict[Call, asyncio.Future[Answer]] = {}
        self._changed = asyncio.Event()
        self.num_watchers = 0
        self._view: pb.SeriesView | None = None

    async def submit_request(self, event: Callable[[Call], Event]) -> Answer:
        """Submit a request, and return its answer. Raises the refusal, or the error with which the
        actor ends."""
        self.check_lives()
        call: Call = object()
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[call] = answer
        try:
            self.submit(event(call))
            return await answer
        finally:
            del self._calls[call]
            if answer.cancelled():
                self.submit(ContributorLeft(call=call))

    def submit(self, event: Event) -> None:
        """Step the core, and carry out the effects, until `end`."""
        if self.ended is None:
            for effect in self.series.step(event, self._clock()):
                self._carry_out(effect)

    def report(self, report: ReaderReport) -> tuple[list[int], list[int]]:
        """Apply a reader's report, as `PublishedSeries.report`. Also raises what `check_lives`
        raises."""
        self.check_lives()
        answer = self.series.report(report, self._clock())
        self.submit(TimePassed())  # versions can be dropped once leases have ended
        return answer

    def check_lives(self) -> None:
        """Raise the error with which the actor has ended."""
        if self.ended is not None:
            raise copy(self.ended)

    def end(self, why: ShoalError) -> None:
        """End the actor with this error for waiting and later calls."""
        # Copies, since a raised exception keeps its traceback.
        self.ended = why
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(copy(why))
        self.notify()

    @property
    def is_idle(self) -> bool:
        """True if no call or watch waits, and no work is in progress."""
        return self.series.is_idle and not self._calls and not self.num_watchers

    @property
    def is_removed(self) -> bool:
        """True if all published versions are gone, and nobody uses the series."""
        head = self.series.head
        return head.number > 0 and not head.kept and self.is_idle

    def view_for_readers(self) -> pb.SeriesView:
        """View for watchers, made once for each change."""
        if self._view is None:
            self._view = messages.view_of(self.series, self._stores.addresses)
        return self._view

    def notify(self) -> None:
        """Wake all watchers."""
        self._view = None
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def changed(self) -> asyncio.Event:
        """Set by the next change. Get it before reading the series."""
        return self._changed

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case PublicationBegun() | VersionAnswered() | Cleared():
                self._settle(effect.call, lambda answer: answer.set_result(effect))
            case RequestRefused():
                error = messages.error_of(effect)
                self._settle(effect.call, lambda answer: answer.set_exception(error))
            case VerifyParts():
                self._tasks.start(self._verify(effect))
            case WriteSeries():
                self._tasks.start(self._write(effect))
            case NotifyWatchers():
                self.notify()

    def _settle(self, call: Call, settle: Callable[["asyncio.Future[Any]"], None]) -> None:
        answer = self._calls.get(call)
        if answer is not None and not answer.done():
            settle(answer)

    async def _write(self, effect: WriteSeries) -> None:
        name = self.series.name
        after = {v.number: v for v in effect.put}
        versions = [after.get(n) or self.series.versions[n] for n in effect.head.kept]
        try:
            is_made = await self.writer.write(effect, versions)
        except ShoalError as error:
            self.end(error)
            return
        if not is_made:
            log.error("series_written_by_another", series=name)
            self.end(
                InternalError(
                    f"the record of series {name} was changed by another process",
                    seen="another head in etcd",
                    expected="the head that this coordinator has written",
                    fix="Try again: the record is then read again.",
                )
            )
            return
        for version in effect.put:
            if version.number == effect.head.number:
                log.info("version_committed", series=name, number=version.number, step=version.step)
        for number in effect.drop:
            log.info("version_dropped", series=name, number=number)
        self.submit(HeadWritten())

    async def _verify(self, effect: VerifyParts) -> None:
        try:
            self.submit(await self._checked(effect))
        except ShoalError as error:
            log.error("parts_not_verified", series=self.series.name, reason=str(error))
            self.end(error)

    async def _checked(self, effect: VerifyParts) -> PartsVerified | PartsRejected:
        """Check the parts, and store their layout. Raises refusals of etcd."""
        rejected = partial(PartsRejected, epoch=effect.epoch, publication=effect.publication)
        try:
            layout = await self._layouts.of_parts(effect.parts)
        except (NotCovered, InvalidSpec) as why:
            return rejected(what=why.what, seen=why.seen, expected=why.expected)
        segments = await self._verified([part.segment for part in effect.parts])
        if isinstance(segments, int):
            holders = ", ".join(effect.parts[segments].segment.holders)
            return rejected(
                what=f"no server has the segment of rank {segments}",
                seen=f"none of {holders}",
                expected="the segment on a server that acknowledged it",
            )
        digest = await self._keep_layout(layout)
        return PartsVerified(
            epoch=effect.epoch,
            publication=effect.publication,
            layout_digest=digest,
            segments=segments,
        )

    async def _verified(
        self, segments: list[PublishedSegment]
    ) -> tuple[PublishedSegment, ...] | int:
        for attempt in range(VERIFY_ATTEMPTS):
            result = verified(segments, await self._stores.held_digests(self.series.name, segments))
            if not isinstance(result, int) or attempt == VERIFY_ATTEMPTS - 1:
                break
            await asyncio.sleep(VERIFY_PAUSE_S)
        return result

    async def _keep_layout(self, layout: bytes) -> bytes:
        return await until_answered(
            lambda: self.writer.keep_layout(layout),
            lambda error: log.warning(
                "layout_not_kept", series=self.series.name, reason=str(error)
            ),
        )

    async def apply_limits(self) -> None:
        """Apply time limits, drop lost versions, and replace holders that are gone or leaving."""
        self.submit(TimePassed())
        versions = list(self.series.versions.values())
        if not versions or not self._stores.mirror.is_in_sync:
            return  # it is unknown which servers are gone
        name, now_s = self.series.name, self._clock
        self.holders.note_registered(self._stores.present, versions, now_s())
        for server, asked, answer in await self._stores.query_holders(
            name, self.holders.questions(versions)
        ):
            self.holders.note(server, asked, answer)
        versions = list(self.series.versions.values())
        self.holders.note_versions(versions, now_s())
        lost = self.holders.lost(versions, now_s())
        for number in lost:
            log.error(
                "version_lost", series=name, number=number, reason="no server has it any more"
            )
        copies = self.series.head.copies
        replaced = {v.number: self.holders.replaced(v, copies, now_s()) for v in versions}
        self.submit(
            VersionsChanged(
                replaced={n: v.segments for n, v in replaced.items() if v is not None},
                durable=frozenset(self.holders.durable(versions)),
                lost=frozenset(lost),
            )
        )
