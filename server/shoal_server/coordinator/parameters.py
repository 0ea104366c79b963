"""The plug-in for parameters on servers."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict

import grpc.aio

from shoal_proto.v1 import clocks_pb2_grpc, samples_pb2_grpc, shards_pb2_grpc, snapshots_pb2_grpc
from shoal_proto.v1.snapshots_pb2 import PublishCutRequest
from shoal_server.coordinator.clocks import ClocksService
from shoal_server.coordinator.plug_in.interface import Host, PlugIn, PublishedCut
from shoal_server.coordinator.plug_in.options import ParameterOptions
from shoal_server.coordinator.samples import stored_ledger
from shoal_server.coordinator.samples.service import SamplesService
from shoal_server.coordinator.servers.answering import answering
from shoal_server.coordinator.shards.controller import ShardController
from shoal_server.coordinator.shards.loss_acceptance import LossAcceptance
from shoal_server.coordinator.shards.loss_log import LossLog
from shoal_server.coordinator.shards.service import ShardsService
from shoal_server.coordinator.snapshots.restoring import SnapshotRestorer
from shoal_server.coordinator.snapshots.service import SnapshotService
from shoal_server.coordinator.snapshots.taking import JobPosition, SnapshotTaker, TakenSnapshot
from shoal_server.core.processes import MemberProcess
from shoal_server.core.samples.requests import LedgerCounts
from shoal_server.etcd import keys
from shoal_server.etcd.api import KeyValue
from shoal_server.etcd.records import assignments, shard_map
from shoal_server.status.board import StatusBoard
from shoal_server.status.history.change_reports import seconds
from shoal_server.status.shards import ShardReader
from shoal_server.status.views import EpochSamplesView, SamplesView, ShardsView


class ParametersPlugIn(PlugIn):
    """Services for jobs with parameters on servers."""

    def __init__(self, host: Host, options: ParameterOptions) -> None:
        self._host = host
        store, calls = host.store, host.server_calls
        self._shard_reader = ShardReader(store)
        self.sample_service = SamplesService(
            store,
            host.authorize,
            host.num_members,
            clock=host.clock,
            on_failed=host.quarantine,
        )
        losses = LossLog(host.board.event)
        self.shard_service = ShardsService(
            store,
            host.authorize,
            options.copies,
            accepting=LossAcceptance(store, losses, self.sample_service, host.require_leading),
            call_wait_s=host.call_wait_s,
        )
        position = JobPosition(cursor=self.sample_service.ledger_json, training=host.training)
        self._taker = SnapshotTaker(store, calls, position, _noting_snapshots(host.board))
        self.snapshot_service = SnapshotService(
            options.snapshots,
            self._taker,
            SnapshotRestorer(store, calls, self.sample_service.close_replaced, answering),
            host.require_leading,
            on_restored=losses.restored,
        )
        self.take_snapshot = self.snapshot_service.take
        self._controller = ShardController(
            store,
            self.snapshot_service.restore_lost,
            measure=self._shard_reader.measure,
            loss_log=losses,
            is_restoring=self.snapshot_service.is_restoring,
        )
        self.clock_service = ClocksService(
            host.authorize, host.declare_lost, host.clock, stuck_after_s=host.stuck_after_s
        )

    # --- services and background work ---

    def add_services(self, server: grpc.aio.Server) -> None:
        clocks_pb2_grpc.add_ClocksServicer_to_server(self.clock_service, server)
        samples_pb2_grpc.add_SamplesServicer_to_server(self.sample_service, server)
        shards_pb2_grpc.add_ShardsServicer_to_server(self.shard_service, server)
        snapshots_pb2_grpc.add_SnapshotsServicer_to_server(self.snapshot_service, server)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.sample_service:
            try:
                yield
            finally:
                await self._shard_reader.close()

    async def begin(self) -> None:
        await self.snapshot_service.announce_roots(self._host.store)

    async def open_job(self, job: str) -> None:
        await self.sample_service.open_existing(job)

    def inherit(self, job: str, trainers: Sequence[MemberProcess]) -> None:
        self.clock_service.inherit(job, trainers)

    @asynccontextmanager
    async def leading(self) -> AsyncIterator[None]:
        try:
            async with (
                self._controller.working(),
                self.snapshot_service.working(self._host.store),
            ):
                yield
        finally:
            self.clock_service.forget_all()

    async def hand_over(self) -> None:
        await self.sample_service.hand_over()

    def member_lost(self, job: str, member_id: str, incarnation: str) -> None:
        self.sample_service.member_lost(job, member_id, incarnation)
        self.clock_service.member_lost(job, member_id, incarnation)

    async def publish_cut(
        self, job: str, request_to: Callable[[str], PublishCutRequest]
    ) -> PublishedCut:
        return await self._taker.publish(job, request_to)

    # --- retention, reset and repair ---

    def closed_ledger(self, job: str) -> AbstractAsyncContextManager[None]:
        return self.sample_service.closed_ledger(job)

    def forget(self, job: str) -> None:
        self.clock_service.forget(job)

    def reopen(self, job: str) -> None:
        self.sample_service.close_replaced(job)

    async def num_samples(self, job: str) -> int | None:
        counts = await self.sample_service.counts(job)
        return None if counts is None else counts.completed

    def check_record(self, job: str, item: KeyValue, items: Sequence[KeyValue]) -> None:
        check_record(job, item, items)

    # --- view ---

    def clocks(self, job: str) -> Mapping[str, int]:
        return self.clock_service.clocks(job)

    def waiting(self, job: str) -> Mapping[str, tuple[str, float]]:
        waits: dict[str, tuple[str, float]] = {}
        for service in (self.shard_service, self.sample_service, self.clock_service):
            waits |= service.waiting(job)
        return waits

    def samples(self, job: str) -> SamplesView | None:
        counts = self.sample_service.summary(job)
        return None if counts is None else samples_view(counts)

    async def shards(self, job: str) -> ShardsView | None:
        return await self._shard_reader.read(job)


def samples_view(counts: LedgerCounts) -> SamplesView:
    """Convert counts for the status page, which cannot import `core.samples`."""
    numbers = asdict(counts)
    epochs = tuple(EpochSamplesView(**epoch) for epoch in numbers.pop("epochs"))
    return SamplesView(**numbers, repeated_max=counts.repeated_max, epochs=epochs)


def _noting_snapshots(board: StatusBoard) -> Callable[[TakenSnapshot], None]:
    def taken(snapshot: TakenSnapshot) -> None:
        manifest, mib = snapshot.manifest, 2**20
        step = manifest.training.get("step")
        board.snapshot_taken(
            manifest.job,
            f"snapshot {manifest.number}{f' of step {step}' if step else ''}:"
            f" {manifest.num_bytes / mib:.1f} MiB, {manifest.num_new_bytes / mib:.1f} of them new;"
            f" pushes waited {seconds(snapshot.pause_s)}",
        )

    return taken


def check_record(job: str, item: KeyValue, items: Sequence[KeyValue]) -> None:
    """Raise UnreadableRecord or ShoalError for an unreadable record of samples or shards."""
    if item.key == keys.sample_ledger(job):
        prefix = keys.sample_deltas(job)
        deltas = {each.key: each.value for each in items if each.key.startswith(prefix)}
        stored_ledger.ledger_in(job, item.value, deltas)
    elif item.key == keys.shard_map(job):
        shard_map.parse(job, items)
    elif item.key.startswith(keys.assignments(job)):
        assignments.parse(item)
