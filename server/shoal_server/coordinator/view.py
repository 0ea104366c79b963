"""The coordinator's state as the status endpoint reads it."""

from collections.abc import Iterable, Sequence

from shoal_proto.incarnation import public_id
from shoal_server.coordinator.jobs.job_actor import JobActor
from shoal_server.coordinator.jobs.outputs import OutputsService
from shoal_server.coordinator.jobs.registry import Registry
from shoal_server.coordinator.plug_in.interface import PlugIn
from shoal_server.coordinator.publications.service import WeightSeriesService
from shoal_server.serving.access.caller_proof import CallerProof
from shoal_server.status.from_core import JobReader, quarantined_detail, series_view
from shoal_server.status.views import (
    GenerationView,
    JobDetail,
    MemberView,
    OutputView,
    PublishedSeriesView,
    Readiness,
    ShardsView,
)


class CoordinatorView:
    """A StatusSource. `shards` and `output` ask servers and launchers."""

    def __init__(
        self,
        registry: Registry,
        plug_in: PlugIn,
        *,
        outputs: OutputsService,
        weights: WeightSeriesService,
    ) -> None:
        self._registry = registry
        self._plug_in = plug_in
        self.outputs = outputs
        self._weights = weights
        self.address = ""
        """host:port for other processes."""
        self.http_url = ""
        """Base URL of the page."""
        self.report_url = ""
        """Base URL to which members report their health."""

    def readiness(self) -> Readiness:
        registry = self._registry
        if registry.leads:
            return Readiness(ready=True, reason="this coordinator leads", leader=self.address)
        known = registry.known_leader
        return Readiness(ready=False, reason=str(known), leader=known.address)

    def jobs(self) -> Sequence[JobDetail]:
        quarantined = [
            quarantined_detail(name, str(why), since_s)
            for name, (why, since_s) in self._registry.quarantined.items()
        ]
        now_s = self._registry.clock()
        unread = [JobReader(job=job, now_s=now_s).detail() for job in self._registry.unread_jobs()]
        return [*quarantined, *unread, *map(self._job, self._registry.actors())]

    def job(self, name: str) -> JobDetail | None:
        if entry := self._registry.quarantined.get(name):
            why, since_s = entry
            return quarantined_detail(name, str(why), since_s)
        actor = self._registry.actor_if_known(name)
        if actor is None:
            self._registry.require_settled(name)
            return None
        return self._job(actor, actor.records.views())

    def _job(self, actor: JobActor, generations: Iterable[GenerationView] = ()) -> JobDetail:
        return self._reader(actor).detail(generations, self._plug_in.samples(actor.job.spec.job))

    def _reader(self, actor: JobActor) -> JobReader:
        name = actor.job.spec.job
        return JobReader(
            job=actor.job,
            newest_roster=actor.records.newest_roster,
            heartbeats=actor.heartbeats,
            clocks=self._plug_in.clocks(name),
            waiting=self._plug_in.waiting(name),
            now_s=self._registry.clock(),
        )

    async def generations(self, name: str) -> Sequence[GenerationView]:
        actor = self._registry.actor_if_known(name)
        if actor is None:
            return ()
        await actor.records.fill()
        return tuple(actor.records.views())

    def member(self, name: str, member_id: str) -> MemberView | None:
        actor = self._registry.actor_if_known(name)
        member = actor.job.members.get(member_id) if actor is not None else None
        return None if actor is None or member is None else self._reader(actor).member(member)

    def process(self, name: str, member_id: str) -> str | None:
        actor = self._registry.actor_if_known(name)
        member = actor.job.members.get(member_id) if actor is not None else None
        return None if member is None else public_id(member.incarnation)

    async def shards(self, job: str) -> ShardsView | None:
        return await self._plug_in.shards(job)

    def weights(self, job: str = "") -> Sequence[PublishedSeriesView]:
        actors = self._weights.series_of(job) if job else self._weights.series()
        return [series_view(each.series) for each in actors if each.series.head.epoch]

    async def output(
        self, job: str, member_id: str, who: CallerProof, after: str | None, before: str | None
    ) -> OutputView:
        return await self.outputs.output(job, member_id, who, after, before)
