"""The coordinator's state as the status endpoint reads it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shoal_proto.incarnation import public_id
from shoal_server.coordinator.jobs.job_actor import JobActor
from shoal_server.coordinator.jobs.outputs import OutputsService
from shoal_server.coordinator.jobs.registry import Registry
from shoal_server.coordinator.plug_in.interface import PlugIn
from shoal_server.coordinator.publications.service import WeightSeriesService
from shoal_server.core.generations.roster import GenerationRecord
from shoal_server.serving.access.caller_proof import CallerProof
from shoal_server.status.from_core import job_view, member_view, quarantined_view, series_view
from shoal_server.status.views import (
    JobView,
    MemberView,
    OutputView,
    PublishedSeriesView,
    Readiness,
    SamplesView,
    ShardsView,
)


class CoordinatorView:
    """A StatusSource over the coordinator's own state and, for `shards` and `output`, answers of
    servers and launchers."""

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
        """Address (host:port) under which others reach this coordinator."""
        self.http_url = ""
        """Base URL under which others reach its status endpoint."""

    def readiness(self) -> Readiness:
        registry = self._registry
        if registry.leads:
            return Readiness(ready=True, reason="this coordinator leads", leader=self.address)
        known = registry.known_leader
        return Readiness(ready=False, reason=str(known), leader=known.address)

    def jobs(self) -> Sequence[JobView]:
        quarantined = [
            quarantined_view(name, str(why), since_s)
            for name, (why, since_s) in self._registry.quarantined.items()
        ]
        return quarantined + [self._job(actor) for actor in self._registry.actors()]

    def job(self, name: str) -> JobView | None:
        if entry := self._registry.quarantined.get(name):
            why, since_s = entry
            return quarantined_view(name, str(why), since_s)
        actor = self._registry.actor_if_known(name)
        return None if actor is None else self._job(actor, actor.records.values())

    def _job(self, actor: JobActor, records: Iterable[GenerationRecord] = ()) -> JobView:
        view = job_view(
            actor.job,
            records=records,
            last_seen=actor.last_seen,
            now_s=self._registry.clock(),
        )
        waiting, clocks = self._plug_in.waiting(view.job), self._plug_in.clocks(view.job)
        if not clocks and not waiting:
            return view
        members = tuple(_timed(member, clocks, waiting) for member in view.members)
        return replace(view, members=members)

    def member(self, name: str, member_id: str) -> MemberView | None:
        actor = self._registry.actor_if_known(name)
        member = actor.job.members.get(member_id) if actor is not None else None
        if actor is None or member is None:
            return None
        now_s = self._registry.clock()
        view = member_view(actor.job, member, actor.last_seen_of(member_id), now_s=now_s)
        return _timed(view, self._plug_in.clocks(name), self._plug_in.waiting(name))

    def process(self, name: str, member_id: str) -> str | None:
        actor = self._registry.actor_if_known(name)
        member = actor.job.members.get(member_id) if actor is not None else None
        return None if member is None else public_id(member.incarnation)

    def samples(self, job: str) -> SamplesView | None:
        return self._plug_in.samples(job)

    async def shards(self, job: str) -> ShardsView | None:
        return await self._plug_in.shards(job)

    def weights(self, job: str = "") -> Sequence[PublishedSeriesView]:
        actors = self._weights.series_of(job) if job else self._weights.series()
        return [series_view(each.series) for each in actors if each.series.head.epoch]

    async def output(
        self, job: str, member_id: str, who: CallerProof, after: str | None, before: str | None
    ) -> OutputView:
        return await self.outputs.output(job, member_id, who, after, before)


def _timed(
    member: MemberView, clocks: Mapping[str, int], waiting: Mapping[str, tuple[str, float]]
) -> MemberView:
    """Add to a member view its clock and what it waits for."""
    known = replace(member, clock=clocks.get(member.member_id))
    if member.member_id not in waiting:
        return known
    reason, since_s = waiting[member.member_id]
    return replace(known, waiting_for=reason, waiting_since_unix_s=since_s)
