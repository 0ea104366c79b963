"""Assembly of one coordinator from its services."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio

from shoal_proto.errors import ShoalError
from shoal_proto.v1 import (
    membership_pb2_grpc,
    outputs_pb2_grpc,
    rendezvous_pb2_grpc,
    repair_pb2_grpc,
    weights_pb2_grpc,
)
from shoal_server.coordinator.history import HistoryKeeper
from shoal_server.coordinator.job_reset import JobReset
from shoal_server.coordinator.jobs.job_actor import JobDependencies
from shoal_server.coordinator.jobs.membership import MembershipService
from shoal_server.coordinator.jobs.outputs import OutputsService
from shoal_server.coordinator.jobs.registry import Registry
from shoal_server.coordinator.persistence.durable import DurableJobs
from shoal_server.coordinator.persistence.stored_jobs import StoredJobs
from shoal_server.coordinator.plug_in.interface import Host, load_plug_in
from shoal_server.coordinator.plug_in.options import ParameterOptions
from shoal_server.coordinator.publications.service import WeightSeriesService
from shoal_server.coordinator.rendezvous import RendezvousService
from shoal_server.coordinator.repair.service import RepairService
from shoal_server.coordinator.retention import Retention
from shoal_server.coordinator.retention_policy import RetentionPolicy
from shoal_server.coordinator.servers.server_calls import ServerCalls
from shoal_server.coordinator.view import CoordinatorView
from shoal_server.core.generations.progress import JobResult
from shoal_server.core.generations.roster import Step
from shoal_server.core.limits import Limits
from shoal_server.core.membership.phases import OVER
from shoal_server.etcd.api import Compare, KeyValueStore
from shoal_server.etcd.leader_store import LeaderStore, Term
from shoal_server.serving.admission.config import JobLimits
from shoal_server.serving.tasks import run_restarting, running
from shoal_server.serving.unix_clock import unix_s
from shoal_server.status.board import StatusBoard
from shoal_server.status.reading import StatusQueries


class Coordinator:
    """Services and background work of one coordinator, which leads from `lead` to `step_down`."""

    def __init__(
        self,
        store: KeyValueStore,
        limits: Limits,
        *,
        parameters: ParameterOptions | None = None,
        retention: RetentionPolicy | None = None,
        job_limits: JobLimits | None = None,
    ) -> None:
        """`parameters`: None if jobs with parameters on servers are not served."""
        job_limits = job_limits or JobLimits()
        self.term = Term()
        self.board = StatusBoard(is_live=self._is_live)
        leading = self._store = LeaderStore(store, self.term.conditions, self.term.depose)
        self.registry = Registry(self._job_dependencies(leading, job_limits.max_jobs), limits)
        self._server_calls = ServerCalls()
        self.plug_in = load_plug_in(self._host(limits, job_limits), parameters)
        self._while_leading = AsyncExitStack()
        self.rendezvous = RendezvousService(self.registry, job_limits)
        self.weights = WeightSeriesService(
            leading,
            self._server_calls,
            self.plug_in.publish_cut,
            authorize=self.registry.authorize,
            require_leading=self.registry.require_leading,
            is_job=lambda job: not self.registry.is_free(job),
            clock=self.registry.clock,
            call_wait_s=job_limits.call_wait_s,
        )
        outputs = OutputsService(self.registry)
        self.resetting = JobReset(
            leading,
            DurableJobs(leading),
            self.registry,
            self.plug_in,
            rendezvous=self.rendezvous,
            outputs=outputs,
            weights=self.weights,
        )
        self.view = CoordinatorView(
            self.registry,
            self.plug_in,
            outputs=outputs,
            weights=self.weights,
        )
        self.retention = Retention(
            leading,
            self.registry,
            self.resetting,
            self.plug_in,
            result_of=self.result_of,
            limits=(retention or RetentionPolicy()).limits,
        )

    def _job_dependencies(self, store: LeaderStore, max_jobs: int) -> JobDependencies:
        # The plug-in, the registry and the services are attributes that do not exist yet: each
        # function reads them when it is called.
        def member_lost(job: str, member_id: str, incarnation: str) -> None:
            self.plug_in.member_lost(job, member_id, incarnation)

        def job_failed(job: str, error: Exception) -> ShoalError:
            return self.registry.quarantine(job, error)

        def job_changed(job: str) -> None:
            self.rendezvous.drop_dead(job)
            self.retention.changed(job)

        return JobDependencies(
            jobs=DurableJobs(store),
            stored=StoredJobs(store),
            board=self.board,
            clock=unix_s,
            on_lost_leadership=self.term.depose,
            on_failed=job_failed,
            on_member_lost=member_lost,
            on_change=job_changed,
            result_of=self.result_of,
            max_jobs=max_jobs,
        )

    def _host(self, limits: Limits, job_limits: JobLimits) -> Host:
        return Host(
            store=self._store,
            board=self.board,
            server_calls=self._server_calls,
            clock=self.registry.clock,
            authorize=self.registry.authorize,
            require_leading=self.registry.require_leading,
            declare_lost=self.registry.declare_lost,
            quarantine=self.registry.quarantine,
            num_members=self._num_members,
            training=self._training,
            stuck_after_s=limits.collective_s,
            call_wait_s=job_limits.call_wait_s,
        )

    async def _resume_quarantined(self, job: str) -> str:
        self.plug_in.reopen(job)
        actor = await self.registry.resume_quarantined(job)
        if actor is None:
            return ""
        self.plug_in.inherit(job, actor.trainers())
        return actor.job.phase.value

    def _is_live(self, job: str) -> bool:
        actor = self.registry.actor_if_known(job)
        return actor is not None and actor.job.phase not in OVER

    def _num_members(self, job: str) -> int:
        actor = self.registry.actor_if_known(job)
        return len(actor.job.members) if actor is not None else 1

    def _training(self, job: str) -> Mapping[str, int]:
        actor = self.registry.actor_if_known(job)
        if actor is None:
            return {}
        steps = [history.step for history in actor.heartbeats.values()]
        generations = actor.generations_in_force()
        return {"generation": max(generations, default=0), "step": max(steps, default=0)}

    def result_of(self, job: str) -> JobResult:
        """Result of a job, from its members' reports and its ledger."""
        queries = StatusQueries(self.view, self.board)
        summary = queries.summary(queries.job(job))
        return JobResult(
            step=Step(summary.step), loss=summary.loss, num_samples=summary.num_samples
        )

    def add_services(self, server: grpc.aio.Server) -> None:
        membership = MembershipService(
            self.registry,
            self.resetting.reset,
            http_url=lambda: self.view.http_url,
            report_url=lambda: self.view.report_url,
        )
        membership_pb2_grpc.add_MembershipServicer_to_server(membership, server)
        rendezvous_pb2_grpc.add_RendezvousServicer_to_server(self.rendezvous, server)
        outputs_pb2_grpc.add_OutputsServicer_to_server(self.view.outputs, server)
        weights_pb2_grpc.add_WeightSeriesServicer_to_server(self.weights, server)
        repairs = RepairService(
            self._store,
            self.registry,
            self.plug_in.check_record,
            self._resume_quarantined,
            published_in=self.weights.last_generation,
        )
        repair_pb2_grpc.add_RepairsServicer_to_server(repairs, server)
        self.plug_in.add_services(server)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Coordinator"]:
        """Run the background work that does not depend on leadership."""
        async with self.plug_in.running():
            try:
                yield self
            finally:
                await self._server_calls.close()

    async def lead(self, conditions: Sequence[Compare]) -> None:
        """Take over every job. Writes fail once `conditions` do not hold. Raises what the store
        raises; call `step_down` after an error, too."""
        self.term.begin(conditions)
        await self.plug_in.begin()
        await self.resetting.read()
        await self._while_leading.enter_async_context(self.weights.leading())
        await self.registry.read(self.plug_in.open_job)
        for actor in self.registry.begin():
            self.plug_in.inherit(actor.job.spec.job, actor.trainers())
        await self._while_leading.enter_async_context(self.plug_in.leading())
        history = HistoryKeeper(self._store, self.registry, self.board)
        work = (
            run_restarting(self.retention.run, "retention"),
            run_restarting(history.run, "history"),
        )
        await self._while_leading.enter_async_context(running(*work))

    async def step_down(self) -> None:
        """Stop leading: refuse calls, end the background work and discard the jobs in memory. They
        stay in etcd for the next leader."""
        # Refuse calls first: a watch opened during the following awaits would never end.
        self.registry.refuse_calls()
        await self._while_leading.aclose()
        self.rendezvous.forget_all()
        self.view.outputs.forget_all()
        await self.registry.step_down()
        self.board.end_term()
        await self.plug_in.hand_over()
        self.term.end()
