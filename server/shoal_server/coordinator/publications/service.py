"""The WeightSeries service for publishers, readers and operators; and the upkeep of versions.

Leases are in memory only. Until an earlier leader's leases have ended, a new leader keeps the
versions that it found in etcd, except for those that are lost or belong to a removed or reset job.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import structlog

from shoal_proto.errors import (
    AccessDenied,
    DeadlineExceeded,
    NotLeader,
    Overloaded,
    Regressed,
    SeriesHeld,
    ShoalError,
    StaleEpoch,
    Unavailable,
    UnknownSeries,
)
from shoal_proto.v1 import weights_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.snapshots_pb2 import FreezeReply, PublishCutRequest
from shoal_proto.v1.weights_pb2_grpc import WeightSeriesServicer
from shoal_server.coordinator.plug_in.interface import PublishedCut
from shoal_server.coordinator.publications import messages, stored_series
from shoal_server.coordinator.publications.actor import Answer, SeriesActor
from shoal_server.coordinator.publications.layouts import MergedLayouts
from shoal_server.coordinator.publications.stores import Stores
from shoal_server.coordinator.servers.server_calls import ServerCalls
from shoal_server.core.publications.holders import further_servers, servers_for
from shoal_server.core.publications.limits import LEASE_S
from shoal_server.core.publications.protocol import (
    BeginRequested,
    Call,
    ClearRequested,
    Event,
    PartContributed,
    PartFailed,
    PinRequested,
    PublicationBegun,
    PublicationPart,
    RollbackRequested,
    VersionAnswered,
)
from shoal_server.core.publications.readers import InstalledOlder, TooManyReaders
from shoal_server.core.publications.series import PublishedSeries
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.etcd.records import series as records
from shoal_server.serving.admission.config import JobLimits
from shoal_server.serving.rpc import Context
from shoal_server.serving.tasks import SupervisedTasks, gather_bounded, run_restarting, running

log = structlog.get_logger(__name__)

MAINTAIN_EACH_S = 2.0
MAINTAINED_AT_ONCE = 32
CLEARED_WITHIN_S = 10.0
RENEW_EACH_S = 30.0
"""Well below the grace period for which servers keep segments that no version names."""
MAX_SERIES = 1024
MAX_WATCHERS = 8192

Authorize = Callable[[Token], Awaitable[None]]
PublishCut = Callable[[str, Callable[[str], PublishCutRequest]], Awaitable[PublishedCut]]


class WeightSeriesService(WeightSeriesServicer):
    """All series of a coordinator, on its event loop, served within `leading`."""

    def __init__(
        self,
        store: LeaderStore,
        calls: ServerCalls,
        publish_cut: PublishCut,
        *,
        authorize: Authorize,
        require_leading: Callable[[], None],
        is_job: Callable[[str], bool],
        clock: Callable[[], float],
        call_wait_s: float = JobLimits.call_wait_s,
    ) -> None:
        """`authorize` raises for a stale token. `is_job`: True for a job's name. `call_wait_s`:
        maximum wait of a rank for other ranks' parts."""
        self._store = store
        self._publish_cut = publish_cut
        self._authorize = authorize
        self._require_leading = require_leading
        self._is_job = is_job
        self._clock = clock
        self._call_wait_s = call_wait_s
        self._stores = Stores(store, calls, self._servers_changed)
        self._layouts = MergedLayouts()
        self._actors: dict[str, SeriesActor] = {}
        self._broken: dict[str, ShoalError] = {}
        self._opening = asyncio.Lock()
        self._tasks = SupervisedTasks()
        self._num_watchers = 0
        self._num_terms = 0

    # --- from the coordinator ---

    @asynccontextmanager
    async def leading(self) -> AsyncIterator[None]:
        """Read all series, and serve them during the block. Raises what the store raises."""
        self._num_terms += 1
        readable, self._broken = await stored_series.read_all(self._store)
        for name, why in self._broken.items():
            log.error("series_unreadable", series=name, reason=str(why))
        for name, (stored, writer) in readable.items():
            self._actors[name] = self._actor(PublishedSeries(name, stored, self._clock()), writer)
        async with (
            self._stores.mirror,
            running(run_restarting(self._maintain_all, "published-weights")),
        ):
            try:
                yield
            finally:
                await self._step_down()

    async def _step_down(self) -> None:
        why = NotLeader("this coordinator no longer leads", details={"leader": ""})
        actors, self._actors = self._actors, {}
        for actor in actors.values():
            actor.end(why)
        await self._tasks.close()

    def series(self) -> Sequence[SeriesActor]:
        """Known series, by name, also unpublished ones with an open call or watch."""
        return [actor for _, actor in sorted(self._actors.items())]

    def series_of(self, job: str) -> Sequence[SeriesActor]:
        """Series of a job, by name."""
        return [each for each in self.series() if messages.job_of(each.series.name) == job]

    def last_generation(self, job: str) -> int:
        """Newest generation that has published a series of the job; 0 without one."""
        return max(
            (each.series.head.publisher.generation for each in self.series_of(job)), default=0
        )

    async def clear(self, job: str, *, forgets_numbers: bool) -> bool:
        """Drop all versions of a job that is removed or started over; True if there were any.

        `forgets_numbers`: True to delete the series themselves, except those that plain scripts
        publish, since nobody asked for their removal. False: later versions continue the numbers.
        Unreadable series stay. Raises Unavailable while etcd cannot be reached, NotLeader, and the
        error with which a series ends meanwhile; some versions may then be gone.
        """
        had_any = False
        try:
            async with asyncio.timeout(CLEARED_WITHIN_S):
                for each in self.series_of(job):
                    actor = await self._find(each.series.name)
                    if forgets_numbers and actor.series.head.publisher.script:
                        continue
                    had_any = had_any or bool(actor.series.head.kept)
                    await self._clear(actor, forgets_numbers=forgets_numbers)
        except TimeoutError:
            raise Unavailable(
                f"the published weights of job {job} could not be dropped",
                seen=f"no answer from etcd within {CLEARED_WITHIN_S:g} s",
            ) from None
        return had_any

    async def _clear(self, actor: SeriesActor, *, forgets_numbers: bool) -> None:
        name = actor.series.name
        await actor.submit_request(lambda call: ClearRequested(call=call))
        if forgets_numbers and self._actors.get(name) is actor:
            # Before the actor goes: if this fails, the next call must find the series.
            await actor.writer.delete_records()
            actor.end(UnknownSeries(f"series {name} was removed with its job"))
            if self._actors.get(name) is actor:
                del self._actors[name]

    def _servers_changed(self) -> None:
        for actor in self._actors.values():
            actor.notify()

    async def _maintain_all(self) -> None:
        while True:
            # An unresponsive server delays only the series that it holds.
            await gather_bounded(self._maintain, self.series(), MAINTAINED_AT_ONCE)
            await asyncio.sleep(MAINTAIN_EACH_S)

    async def _maintain(self, actor: SeriesActor) -> None:
        name = actor.series.name
        if self._actors.get(name) is not actor:
            return
        if actor.ended is not None:
            # etcd may still have its versions: List and `clear` must know them.
            try:
                actor = await self._find(name)
            except ShoalError as error:
                log.warning("series_unreadable", series=name, reason=str(error))
                return
        await actor.apply_limits()
        is_over = actor.ended is None and not actor.series.head.epoch and actor.is_idle
        if is_over and self._actors.get(name) is actor:
            del self._actors[name]

    def _actor(self, series: PublishedSeries, writer: stored_series.SeriesWriter) -> SeriesActor:
        return SeriesActor(
            series,
            writer,
            stores=self._stores,
            layouts=self._layouts,
            tasks=self._tasks,
            clock=self._clock,
        )

    # --- finding a series ---

    async def _find(self, name: str) -> SeriesActor:
        """Actor of a series, published or not. Raises NotLeader, InvalidSpec for a bad name,
        Overloaded, and the error of reading its records."""
        self._require_leading()
        messages.checked_series(name)
        actor = self._actors.get(name)
        if actor is None or actor.ended is not None:
            async with self._opening:
                actor = self._actors.get(name)
                if actor is None or actor.ended is not None:
                    actor = self._actors[name] = await self._opened(name)
        return actor

    async def _opened(self, name: str) -> SeriesActor:
        # A removed series keeps only its numbers.
        num_series = sum(not each.is_removed for each in self._actors.values())
        if name not in self._actors and num_series >= MAX_SERIES:
            raise Overloaded(
                "this cluster already has the maximum number of series",
                seen=f"{num_series} series",
                expected=f"fewer than {MAX_SERIES}",
                fix="`shoal rm JOB` removes the series of a job.",
            )
        term = self._num_terms
        stored, writer = await stored_series.read_one(self._store, name)
        self._require_leading()
        if term != self._num_terms:
            # Another coordinator may have written since the earlier term.
            raise NotLeader("the term in which this call began has ended", details={"leader": ""})
        self._broken.pop(name, None)
        return self._actor(PublishedSeries(name, stored, self._clock()), writer)

    async def _existing(self, name: str) -> SeriesActor:
        actor = await self._find(name)
        if not actor.series.head.epoch:
            known = [each.series.name for each in self.series() if each.series.head.epoch]
            raise UnknownSeries(
                f"there is no series {name}",
                seen=f"{len(known)} series",
                expected=f"one of {', '.join(known[:20])}" if known else "a published series",
                fix="`shoal weights list` shows all.",
            )
        return actor

    # --- from publishers ---

    async def Begin(
        self, request: pb.BeginPublicationRequest, context: Context
    ) -> pb.BeginPublicationReply:
        await self._authorize_publisher(request.series, request.publisher)
        publisher = messages.publisher_of(request.series, request.publisher)
        keep, copies = messages.options_from_pb(request.options)
        servers: list[str] = []
        if not request.ending:
            messages.check_rank(request.rank, request.world)
            present = self._stores.present
            if not present and not self._stores.mirror.is_in_sync:
                raise Unavailable(
                    "the parameter servers are not known yet", expected="a retry in a moment"
                )
            servers = servers_for(request.rank, copies, present, near=_host(context.peer()))
        actor = await self._find(request.series)
        begun = await actor.submit_request(
            lambda call: BeginRequested(
                call=call,
                publisher=publisher,
                known_epoch=request.epoch,
                keep=keep,
                copies=copies,
                is_ending=request.ending,
            )
        )
        assert isinstance(begun, PublicationBegun)
        # Confirmed, since a deposed leader does not know its successor's state.
        await self._store.confirm()
        addresses = self._stores.addresses
        return pb.BeginPublicationReply(
            epoch=begun.epoch,
            head=begun.head,
            servers=(
                pb.StoreServer(id=each, address=addresses[each])
                for each in servers
                if each in addresses
            ),
            lease_s=LEASE_S if publisher.script else 0.0,
        )

    async def Contribute(
        self, request: pb.ContributePartRequest, context: Context
    ) -> pb.ContributePartReply:
        await self._authorize_publisher(request.series, request.publisher)
        publisher = messages.publisher_of(request.series, request.publisher)
        if request.failure:
            actor = await self._find(request.series)
            actor.submit(
                PartFailed(
                    publisher=publisher,
                    publication=request.publication,
                    rank=request.rank,
                    why=request.failure,
                )
            )
            is_abandoned = actor.series.is_abandoned(publisher, request.publication)
            # Confirmed, since a successor of a deposed leader may have committed the publication.
            await self._store.confirm()
            return pb.ContributePartReply(abandoned=is_abandoned)
        own_part, *cut_parts = messages.parts_from_pb(request)

        def contributed(call: Call, part: PublicationPart = own_part) -> Event:
            return PartContributed(
                call=call,
                publisher=publisher,
                epoch=request.epoch,
                publication=request.publication,
                part=part,
            )

        actor = await self._find(request.series)
        actor.check_lives()
        for part in cut_parts:
            # The answer for the publisher's own part is for these parts too.
            actor.submit(contributed(("cut", request.publication, part.rank), part))
        try:
            async with asyncio.timeout(self._call_wait_s):
                answer = await actor.submit_request(contributed)
        except TimeoutError:
            raise DeadlineExceeded(
                f"publication {request.publication} of {request.series} is not committed yet",
                seen=f"the part of rank {request.rank} waits for other ranks",
                expected=f"the parts of all {request.world} ranks",
                fix="Send the part again.",
            ) from None
        return pb.ContributePartReply(version=_version(answer))

    async def CutTables(self, request: pb.CutTablesRequest, context: Context) -> pb.CutTablesReply:
        await self._authorize_publisher(request.series, request.publisher)
        publisher = messages.publisher_of(request.series, request.publisher)
        actor = await self._find(request.series)
        head = actor.series.head
        if request.epoch > head.epoch:
            raise Unavailable(
                f"this coordinator knows no such epoch of {request.series}",
                seen=f"{publisher}, with epoch {request.epoch}",
                expected=f"{head.publisher}, with epoch {head.epoch}",
                fix="Begin the publication again: another coordinator may lead.",
            )
        if (head.epoch, head.publisher) != (request.epoch, publisher) or publisher.script:
            raise StaleEpoch(
                f"this publisher of {request.series} was replaced, or is not a member of a job",
                seen=f"{publisher}, with epoch {request.epoch}",
                expected=f"{head.publisher}, with epoch {head.epoch}",
            )
        present, addresses = self._stores.present, self._stores.addresses

        def request_to(server: str) -> PublishCutRequest:
            further = further_servers(server, head.copies, present)
            return PublishCutRequest(
                series=request.series,
                epoch=request.epoch,
                publication=request.publication,
                chain=(pb.StoreServer(id=each, address=addresses[each]) for each in further),
            )

        async with running(self._keep_segments(request)):
            cut = await self._publish_cut(messages.job_of(request.series), request_to)
        log.info(
            "tables_cut",
            series=request.series,
            publication=request.publication,
            num_bytes=sum(each.segment.num_bytes for each in cut.segments),
            pause_s=round(cut.pause_s, 4),
            num_partial_steps=len(cut.torn),
        )
        return pb.CutTablesReply(
            segments=cut.segments,
            parameters=(
                pb.TensorSpec(name=each.name, dtype=each.dtype, shape=each.shape)
                for each in cut.layout.parameters
            ),
            tables_cut=FreezeReply(shards=cut.stamps).SerializeToString(deterministic=True),
            partial_steps=cut.torn,
        )

    async def _keep_segments(self, request: pb.CutTablesRequest) -> None:
        """Let the servers keep what they have of a publication while other shards are copied."""
        while True:
            await asyncio.sleep(RENEW_EACH_S)
            await self._stores.renew_all(request.series, request.epoch, request.publication)

    async def _authorize_publisher(self, series: str, publisher: pb.Publisher) -> None:
        self._require_leading()
        messages.checked_series(series)
        job = messages.job_of(series)
        if publisher.HasField("token"):
            await self._authorize(publisher.token)
        elif self._is_job(job):
            raise SeriesHeld(
                f"series {series} belongs to job {job}: only its members publish it",
                seen="a plain script",
                expected=f"a member of job {job}",
                fix="Choose another name before the slash.",
            )

    # --- from readers ---

    async def _found_for_reader(self, name: str) -> SeriesActor:
        """Actor of a series. Raises what `_find` raises, and Unavailable while etcd denies access:
        etcd then refuses the coordinator, not the reader, and may accept it later."""
        try:
            return await self._find(name)
        except AccessDenied as error:
            raise Unavailable(f"series {name} cannot be read", seen=str(error)) from error

    async def Watch(
        self, request: pb.WatchSeriesRequest, context: Context
    ) -> AsyncIterator[pb.SeriesView]:
        actor = await self._found_for_reader(request.series)
        if self._num_watchers >= MAX_WATCHERS:
            raise Overloaded("too many readers watch series", expected=f"{MAX_WATCHERS}")
        self._num_watchers += 1
        actor.num_watchers += 1
        try:
            while True:
                changed = actor.changed
                _check_lives_for_reader(actor)
                yield actor.view_for_readers()
                await changed.wait()
        finally:
            self._num_watchers -= 1
            actor.num_watchers -= 1

    async def Report(self, request: pb.ReaderReport, context: Context) -> pb.ReaderReportReply:
        report = messages.report_from_pb(request)
        actor = await self._found_for_reader(request.series)
        try:
            leased, gone = actor.report(report)
            sources = actor.series.source_addresses(report.reader, self._clock())
            head = actor.series.head.number
        except TooManyReaders as why:
            raise Overloaded(
                f"series {request.series} has its maximum of readers or leases", seen=str(why)
            ) from why
        except InstalledOlder as why:
            raise Regressed(
                f"reader {report.reader} went back to an older version of {request.series}",
                seen=f"version {report.installed}",
                expected=f"version {why.before}, which it had installed, or a newer one",
            ) from why
        if leased or not head:
            # A successor respects leases from before its term, and may have committed versions:
            # confirm, after the grant, that this term lasts.
            await self._store.confirm()
        return pb.ReaderReportReply(
            lease_s=LEASE_S,
            leased=leased,
            gone=gone,
            relays=[sources.get(number, "") for number in leased],
            head=head,
        )

    async def GetLayout(self, request: pb.GetLayoutRequest, context: Context) -> pb.Layout:
        actor = await self._existing(request.series)
        return pb.Layout.FromString(await actor.writer.read_layout(request.layout_digest))

    # --- from operators ---

    async def List(self, request: pb.ListSeriesRequest, context: Context) -> pb.ListSeriesReply:
        self._require_leading()
        actors = self.series_of(request.job) if request.job else self.series()
        return pb.ListSeriesReply(
            series=(self._view(each) for each in actors if each.series.head.epoch)
        )

    async def Pin(self, request: pb.PinVersionRequest, context: Context) -> pb.SeriesView:
        actor = await self._existing(request.series)
        pins = not request.unpin
        await actor.submit_request(
            lambda call: PinRequested(call=call, number=request.number, pins=pins)
        )
        return self._view(actor)

    async def Rollback(self, request: pb.RollbackRequest, context: Context) -> pb.VersionRecord:
        actor = await self._existing(request.series)
        return _version(await actor.submit_request(partial(_rollback, request.to)))

    def _view(self, actor: SeriesActor) -> pb.SeriesView:
        view = messages.view_of(actor.series, self._stores.addresses)
        view.readers.extend(messages.readers_of(actor.series, self._clock()))
        return view


def _check_lives_for_reader(actor: SeriesActor) -> None:
    """Raise what `check_lives` raises, and Unavailable if a write was refused: the series is read
    again."""
    if actor.ended is None or isinstance(actor.ended, NotLeader | UnknownSeries):
        actor.check_lives()
        return
    raise Unavailable(f"series {actor.series.name} is read again from etcd", seen=str(actor.ended))


def _rollback(to: int, call: Call) -> Event:
    return RollbackRequested(call=call, to=to)


def _version(answer: Answer) -> pb.VersionRecord:
    assert isinstance(answer, VersionAnswered)
    return records.version_to_pb(answer.version)


def _host(peer: str) -> str:
    return peer.partition(":")[2].rpartition(":")[0]
