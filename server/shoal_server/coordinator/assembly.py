"""Assembly of one coordinator from its services."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio

from shoal_proto.errors import ShoalError
from shoal_proto.v1 import (
    clocks_pb2_grpc,
    membership_pb2_grpc,
    outputs_pb2_grpc,
    rendezvous_pb2_grpc,
    repair_pb2_grpc,
    samples_pb2_grpc,
    shards_pb2_grpc,
    snapshots_pb2_grpc,
    weights_pb2_grpc,
)
from shoal_server.coordinator.clocks import ClocksService
from shoal_server.coordinator.history import HistoryKeeper
from shoal_server.coordinator.job_reset import JobReset
from shoal_server.coordinator.jobs.job_actor import JobDependencies
from shoal_server.coordinator.jobs.membership import MembershipService
from shoal_server.coordinator.jobs.outputs import OutputsService
from shoal_server.coordinator.jobs.registry import Registry, steady_unix_clock
from shoal_server.coordinator.persistence.durable import DurableJobs
from shoal_server.coordinator.persistence.stored_jobs import StoredJobs
from shoal_server.coordinator.publications.service import WeightSeriesService
from shoal_server.coordinator.rendezvous import RendezvousService
from shoal_server.coordinator.repair.service import RepairService
from shoal_server.coordinator.retention import Retention
from shoal_server.coordinator.retention_policy import RetentionPolicy
from shoal_server.coordinator.samples.service import SamplesService
from shoal_server.coordinator.servers.answering import answering
from shoal_server.coordinator.servers.server_calls import ServerCalls
from shoal_server.coordinator.shards.controller import ShardController
from shoal_server.coordinator.shards.loss_acceptance import LossAcceptance
from shoal_server.coordinator.shards.loss_log import LossLog
from shoal_server.coordinator.shards.service import ShardsService
from shoal_server.coordinator.snapshots.policy import SnapshotPolicy
from shoal_server.coordinator.snapshots.restoring import SnapshotRestorer
from shoal_server.coordinator.snapshots.service import SnapshotService
from shoal_server.coordinator.snapshots.taking import JobPosition, SnapshotTaker, TakenSnapshot
from shoal_server.coordinator.view import CoordinatorView
from shoal_server.core.generations.progress import JobResult
from shoal_server.core.generations.roster import Step
from shoal_server.core.limits import Limits
from shoal_server.etcd.api import Compare, KeyValueStore
from shoal_server.etcd.leader_store import LeaderStore, Term
from shoal_server.serving.admission.config import JobLimits
from shoal_server.serving.tasks import keep_on, running
from shoal_server.status.board import StatusBoard
from shoal_server.status.history.stories import seconds
from shoal_server.status.reading import StatusQueries
from shoal_server.status.shards import ShardReader


class Coordinator:
    """Services and background work of one coordinator, which leads from `lead(conditions)` to
    `step_down()`."""

    def __init__(
        self,
        store: KeyValueStore,
        limits: Limits,
        *,
        copies: int = 2,
        snapshots: SnapshotPolicy | None = None,
        retention: RetentionPolicy | None = None,
        bounds: JobLimits | None = None,
    ) -> None:
        bounds = bounds or JobLimits()
        self.term = Term()
        self.board = StatusBoard()
        shard_reader = ShardReader(store)
        leading = self._store = LeaderStore(store, self.term.conditions, self.term.depose)
        self.registry = Registry(self._job_dependencies(leading, bounds.max_jobs), limits)
        self.samples = SamplesService(
            leading,
            self.registry.authorize,
            self._num_members,
            clock=self.registry.clock,
            on_failed=self.registry.quarantine,
        )
        losses = LossLog(self.board.event)
        self.shards = ShardsService(
            leading,
            self.registry.authorize,
            copies,
            accepting=LossAcceptance(leading, losses, self.samples, self.registry.require_leading),
            call_wait_s=bounds.call_wait_s,
        )
        server_calls = ServerCalls()
        self._closing = (shard_reader.close, server_calls.close)
        state = JobPosition(cursor=self.samples.books, training=self._training)
        taker = SnapshotTaker(self._store, server_calls, state, self._snapshot_taken)
        self.snapshots = self._snapshot_service(
            snapshots or SnapshotPolicy(), losses, server_calls, taker
        )
        self._shard_controller = ShardController(
            leading,
            self.snapshots.restore_lost,
            measure=shard_reader.measure,
            loss_log=losses,
            is_restoring=self.snapshots.is_restoring,
        )
        self._while_leading = AsyncExitStack()
        self.rendezvous = RendezvousService(self.registry, bounds)
        self.clocks = ClocksService(
            self.registry.authorize,
            self.registry.declare_lost,
            self.registry.clock,
            stuck_after_s=limits.collective_s,
        )
        self.weights = WeightSeriesService(
            leading,
            server_calls,
            taker.publish,
            authorize=self.registry.authorize,
            require_leading=self.registry.require_leading,
            is_job=lambda job: not self.registry.is_free(job),
            clock=self.registry.clock,
            call_wait_s=bounds.call_wait_s,
        )
        outputs = OutputsService(self.registry)
        self.resetting = JobReset(
            leading,
            DurableJobs(leading),
            self.registry,
            samples=self.samples,
            clocks=self.clocks,
            rendezvous=self.rendezvous,
            outputs=outputs,
            weights=self.weights,
        )
        self.view = CoordinatorView(
            self.registry,
            self.samples,
            self.clocks,
            shard_reader,
            self.shards,
            outputs=outputs,
            weights=self.weights,
        )
        self.retention = Retention(
            leading,
            self.registry,
            self.resetting,
            samples=self.samples,
            clocks=self.clocks,
            result_of=self._result_of,
            limits=(retention or RetentionPolicy()).limits,
        )

    def _job_dependencies(self, store: LeaderStore, max_jobs: int) -> JobDependencies:
        # The registry calls these services, which are constructed after it: they are looked up
        # late.
        def member_lost(job: str, member_id: str, incarnation: str) -> None:
            self.samples.member_lost(job, member_id, incarnation)
            self.clocks.member_lost(job, member_id, incarnation)

        def job_failed(job: str, error: Exception) -> ShoalError:
            return self.registry.quarantine(job, error)

        def job_changed(job: str) -> None:
            self.rendezvous.drop_dead(job)
            self.retention.changed(job)

        return JobDependencies(
            jobs=DurableJobs(store),
            stored=StoredJobs(store),
            board=self.board,
            clock=steady_unix_clock(),
            on_lost_leadership=self.term.depose,
            on_failed=job_failed,
            on_member_lost=member_lost,
            on_change=job_changed,
            result_of=self._result_of,
            max_jobs=max_jobs,
        )

    async def _take_up_again(self, job: str) -> str:
        self.samples.close_replaced(job)
        actor = await self.registry.take_up_again(job)
        if actor is None:
            return ""
        self.clocks.inherit(job, actor.trainers())
        return actor.job.phase.value

    def _snapshot_service(
        self,
        policy: SnapshotPolicy,
        losses: LossLog,
        server_calls: ServerCalls,
        taker: SnapshotTaker,
    ) -> SnapshotService:
        # `resetting` is constructed after this service: it is looked up late.
        def begun_unix_s(job: str) -> float:
            return self.resetting.ended_unix_s(job)

        return SnapshotService(
            policy,
            taker,
            SnapshotRestorer(self._store, server_calls, self.samples.close_replaced, answering),
            self.registry.require_leading,
            begun_unix_s,
            on_restored=losses.restored,
        )

    def _snapshot_taken(self, taken: TakenSnapshot) -> None:
        manifest, mib = taken.manifest, 2**20
        step = manifest.training.get("step")
        self.board.snapshot_taken(
            manifest.job,
            manifest.taken_unix_s,
            f"snapshot {manifest.number}{f' of step {step}' if step else ''}:"
            f" {manifest.num_bytes / mib:.1f} MiB, {manifest.num_new_bytes / mib:.1f} of them new;"
            f" pushes waited {seconds(taken.pause_s)}",
        )

    def _num_members(self, job: str) -> int:
        actor = self.registry.actor_if_known(job)
        return len(actor.job.members) if actor is not None else 1

    def _training(self, job: str) -> Mapping[str, int]:
        actor = self.registry.actor_if_known(job)
        if actor is None:
            return {}
        steps = [seen.step for seen in actor.last_seen.values()]
        generations = actor.generations_in_force()
        return {"generation": max(generations, default=0), "step": max(steps, default=0)}

    def _result_of(self, job: str) -> JobResult:
        queries = StatusQueries(self.view, self.board)
        summary = queries.summary(queries.job(job))
        return JobResult(
            step=Step(summary.step), loss=summary.loss, num_samples=summary.num_samples
        )

    def add_services(self, server: grpc.aio.Server) -> None:
        membership = MembershipService(
            self.registry,
            self.resetting.reset,
            lambda: self.view.http_url,
            call_wait_s=self.rendezvous.limits.call_wait_s,
        )
        membership_pb2_grpc.add_MembershipServicer_to_server(membership, server)
        rendezvous_pb2_grpc.add_RendezvousServicer_to_server(self.rendezvous, server)
        clocks_pb2_grpc.add_ClocksServicer_to_server(self.clocks, server)
        outputs_pb2_grpc.add_OutputsServicer_to_server(self.view.outputs, server)
        samples_pb2_grpc.add_SamplesServicer_to_server(self.samples, server)
        shards_pb2_grpc.add_ShardsServicer_to_server(self.shards, server)
        snapshots_pb2_grpc.add_SnapshotsServicer_to_server(self.snapshots, server)
        weights_pb2_grpc.add_WeightSeriesServicer_to_server(self.weights, server)
        repairs = RepairService(self._store, self.registry, self._take_up_again)
        repair_pb2_grpc.add_RepairsServicer_to_server(repairs, server)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Coordinator"]:
        """Run the background work that does not depend on leading."""
        async with self.samples:
            try:
                yield self
            finally:
                for close in self._closing:
                    await close()

    async def lead(self, conditions: Sequence[Compare]) -> None:
        """Take over every job. Each write to etcd carries `conditions` and fails if they no longer
        hold."""
        self.term.begin(conditions)
        await self.snapshots.announce_roots(self._store)
        await self.resetting.read()
        await self._while_leading.enter_async_context(self.weights.leading())
        await self.registry.read(self.samples.open_existing)
        for actor in self.registry.begin():
            self.clocks.inherit(actor.job.spec.job, actor.trainers())
        await self._while_leading.enter_async_context(self._shard_controller.working())
        await self._while_leading.enter_async_context(self.snapshots.working(self._store))
        history = HistoryKeeper(self._store, self.registry, self.board)
        work = keep_on(self.retention.run, "retention"), keep_on(history.run, "history")
        await self._while_leading.enter_async_context(running(*work))

    async def step_down(self) -> None:
        """Drop every job: another coordinator leads, or this one ends."""
        await self._while_leading.aclose()
        self.rendezvous.forget_all()
        self.clocks.forget_all()
        self.view.outputs.forget_all()
        await self.registry.step_down()
        await self.samples.hand_over()
        self.term.end()
