"""What the status endpoint is shown of this coordinator."""

from collections.abc import Sequence
from dataclasses import replace

from shoal_server.coordinator.clocks import ClocksService
from shoal_server.coordinator.jobs.job_actor import JobActor
from shoal_server.coordinator.jobs.registry import Registry
from shoal_server.coordinator.samples.service import SamplesService
from shoal_server.status.from_core import job_view, samples_view, set_aside_view
from shoal_server.status.shards import ShardReader
from shoal_server.status.views import JobView, Readiness, SamplesView, ShardsView


class CoordinatorView:
    """A StatusSource over the coordinator's own state."""

    def __init__(
        self,
        registry: Registry,
        samples: SamplesService,
        clocks: ClocksService,
        shards: ShardReader,
    ) -> None:
        self._registry = registry
        self._samples = samples
        self._clocks = clocks
        self._shards = shards
        self.address = ""
        """host:port under which others reach this coordinator."""
        self.http_url = ""
        """Base URL under which others reach its status endpoint."""

    def readiness(self) -> Readiness:
        registry = self._registry
        if registry.leads:
            return Readiness(ready=True, reason="this coordinator leads", leader=self.address)
        known = registry.known_leader
        return Readiness(ready=False, reason=str(known), leader=known.address)

    def jobs(self) -> Sequence[JobView]:
        aside = [
            set_aside_view(name, str(why), since_s)
            for name, (why, since_s) in self._registry.aside.items()
        ]
        return aside + [self._job(actor) for actor in self._registry.actors()]

    def _job(self, actor: JobActor) -> JobView:
        view = job_view(
            actor.job,
            records=actor.records.values(),
            last_seen=actor.last_seen,
            now_s=self._registry.clock(),
        )
        clocks = self._clocks.clocks(view.job)
        if not clocks:
            return view
        waiting = self._clocks.waiting(view.job)
        members = []
        for member in view.members:
            known = replace(member, clock=clocks.get(member.member_id))
            if member.member_id in waiting:
                reason, since_s = waiting[member.member_id]
                known = replace(known, waiting_for=reason, waiting_since_unix_s=since_s)
            members.append(known)
        return replace(view, members=tuple(members))

    def samples(self, job: str) -> SamplesView | None:
        counts = self._samples.summary(job)
        return None if counts is None else samples_view(counts)

    async def shards(self, job: str) -> ShardsView | None:
        return await self._shards.read(job)
