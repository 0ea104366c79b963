"""Changes of a replica's role."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog

from shoal_proto.errors import ShoalError
from shoal_proto.pieces import Buffer
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_server.core.replication.protocol.effects import (
    AdoptImage,
    DropShard,
    EnterEpoch,
    LeadShard,
    LoadJournal,
    OpenShard,
    ResumePushes,
    SetFollowers,
    SetUnreplicated,
    StepDown,
    StopPushes,
)
from shoal_server.core.replication.protocol.events import (
    CopySettled,
    JournalShardMissing,
    PushApplied,
    PushesStopped,
    ShardCreated,
    ShardRetired,
)
from shoal_server.core.replication.protocol.messages import Key
from shoal_server.parameters.journal.replay import RecoveredShard
from shoal_server.parameters.journal.shard_journal import ShardJournal
from shoal_server.parameters.replication.acknowledgements import Acknowledgements, AnswerT
from shoal_server.parameters.replication.core_driver import CoreDriver
from shoal_server.parameters.replication.incoming_images import IncomingImages
from shoal_server.parameters.replication.outgoing_links import OutgoingLinks
from shoal_server.parameters.replication.outgoing_record import OutgoingRecord
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.record import UpdateRecord
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica
from shoal_server.parameters.shard.versioned import AnyShard
from shoal_server.serving.tasks import SupervisedTasks

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _ReplicaLeadership:
    replica: ShardReplica
    acknowledgements: Acknowledgements
    report_applied: Callable[[], None]

    async def wait_acknowledged(self, version: int, level: Acknowledgement.ValueType) -> None:
        await self.acknowledgements.wait(self.replica, version, level)

    def when_acknowledged(
        self, version: int, level: Acknowledgement.ValueType, answer: AnswerT
    ) -> "asyncio.Future[AnswerT | ShoalError]":
        return self.acknowledgements.when_acknowledged(self.replica, version, level, answer)

    def check_lease(self) -> None:
        self.acknowledgements.check_lease()


class ShardRoles:
    def __init__(
        self,
        driver: CoreDriver,
        *,
        catalog: Catalog,
        images: IncomingImages,
        acknowledgements: Acknowledgements,
        links: OutgoingLinks,
    ) -> None:
        self._driver = driver
        self._catalog = catalog
        self._images = images
        self._acknowledgements = acknowledgements
        self._links = links
        self._loop = asyncio.get_running_loop()
        self._applied: deque[tuple[ShardReplica, UpdateRecord]] = deque()
        self._applied_lock = threading.Lock()
        self._loop_thread = threading.get_ident()
        self._tasks = SupervisedTasks()
        self.shard_journal: ShardJournal | None = None
        self.recovered: dict[Key, RecoveredShard[AnyShard]] = {}
        """Shards from the journal, until the core loads them or may no longer claim them."""

    async def close(self) -> None:
        await self._tasks.close()

    # --- pushes ---

    def _on_applied(self, replica: ShardReplica, record: UpdateRecord) -> None:
        """Queue an applied push. Any thread calls it, but in order: within the shard's lock."""
        with self._applied_lock:
            is_first = not self._applied
            self._applied.append((replica, record))
        if is_first and threading.get_ident() == self._loop_thread:
            self._loop.call_soon(self._report_all)
        elif is_first:
            self._loop.call_soon_threadsafe(self._report_all)

    def _keep(self, replica: ShardReplica, data: Buffer) -> Buffer:
        """Memory for a push's data; see `Keep`. On the event loop, a push is reported before a
        backup can join: the data are copied only for a backup or a journal. In another thread, or
        while earlier pushes are unreported, a backup may join first: the data are copied."""
        if threading.get_ident() != self._loop_thread or self._applied:
            return bytes(data)
        if self.shard_journal is not None:
            return bytes(data)
        if not replica.is_followed:
            return data
        return self._links.draft(replica, memoryview(data)) or bytes(data)

    def _report_applied(self) -> None:
        if threading.get_ident() == self._loop_thread:
            self._report_all()

    def _report_all(self) -> None:
        while self._applied:
            with self._applied_lock:
                replica, record = self._applied.popleft()
            replica.pushed_bytes += record.num_bytes
            key = replica.job, replica.shard_id
            if not replica.is_led or self._catalog.find(*key) is not replica:
                continue
            if self.shard_journal is not None:
                self.shard_journal.append_update(replica, record)
            outgoing = OutgoingRecord(record)
            give_back = outgoing.before_reuse() if record.is_lent else None
            self._driver.submit_event(PushApplied(key, outgoing))
            # Only the core may have a reference to the record from here. If it has none,
            # `give_back` copies nothing.
            del outgoing
            if give_back is not None:
                give_back()

    # --- primaries ---

    def lead_shard(self, effect: LeadShard) -> None:
        replica = self._replica(effect.key)
        replica.state.enter_epoch(effect.epoch)
        replica.epoch, replica.role = effect.epoch, ReplicaRole.PRIMARY
        replica.is_forming, replica.is_handing_over = True, False
        replica.is_led = True
        replica.leading = _ReplicaLeadership(replica, self._acknowledgements, self._report_applied)
        replica.state.subscribe(partial(self._on_applied, replica), partial(self._keep, replica))
        if self.shard_journal is not None:
            self.shard_journal.start_journaling(replica, effect.placement_id)
        log.info("shard_led", job=replica.job, shard_id=replica.shard_id, epoch=replica.epoch)
        self._notify()

    def open_shard(self, effect: OpenShard) -> None:
        self._replica(effect.key).is_forming = False
        self._notify()

    def _notify(self) -> None:
        self._tasks.start(self._catalog.notify(), key="notify")

    def stop_pushes(self, effect: StopPushes) -> None:
        replica = self._replica(effect.key)
        replica.is_handing_over = True
        # The next epoch is the successor's.
        replica.state.refuse_pushes()
        self._report_all()
        self._driver.submit_event(PushesStopped(effect.key, replica.state.version))

    def resume_pushes(self, effect: ResumePushes) -> None:
        replica = self._replica(effect.key)
        replica.state.enter_epoch(replica.epoch)
        replica.is_handing_over = False

    def set_followers(self, effect: SetFollowers) -> None:
        replica = self._replica(effect.key)
        replica.is_followed, replica.links = effect.is_followed, effect.links

    def set_unreplicated(self, effect: SetUnreplicated) -> None:
        self._replica(effect.key).unreplicated_bytes = effect.num_bytes

    # --- copies ---

    def step_down(self, effect: StepDown) -> None:
        replica = self._replica(effect.key)
        replica.state.enter_epoch(effect.epoch)
        self._end(replica)
        replica.role, replica.epoch = ReplicaRole.BACKUP, effect.epoch
        replica.is_handing_over = False
        log.info("shard_no_longer_led", job=replica.job, shard_id=replica.shard_id)
        self._driver.submit_event(CopySettled(effect.key, replica.state.version))

    def adopt_image(self, effect: AdoptImage) -> None:
        replica = self._images.take(effect)
        before = self._catalog.find(*effect.key)
        if before is not None:
            self._remove(before)
        self._catalog.add(replica)

    def enter_epoch(self, effect: EnterEpoch) -> None:
        replica = self._replica(effect.key)
        replica.epoch = effect.epoch
        replica.state.enter_epoch(effect.epoch)

    def load_journal(self, effect: LoadJournal) -> None:
        self._tasks.start(self._load_from_journal(effect))

    async def _load_from_journal(self, effect: LoadJournal) -> None:
        shard = self.recovered.pop(effect.key, None)
        if shard is None and self.shard_journal is not None:
            # This process led the shard before, and dropped it.
            shard = await self.shard_journal.read(*effect.key)
        if shard is None:
            self._driver.submit_event(JournalShardMissing(effect.key, effect.epoch))
            return
        self._load_recovered(effect, shard)

    def _load_recovered(self, effect: LoadJournal, shard: RecoveredShard[AnyShard]) -> None:
        replica = ShardReplica(shard.job, shard.state, ReplicaRole.PRIMARY, effect.epoch)
        replica.is_forming = True
        shard.state.enter_epoch(effect.epoch)
        self._driver.submit_event(ShardRetired(effect.key))
        self._catalog.add(replica)
        log.info(
            "shard_recovered_from_journal",
            job=shard.job,
            shard_id=replica.shard_id,
            version=shard.state.version,
            num_replayed=shard.num_replayed,
        )
        self._driver.submit_event(ShardCreated(effect.key, effect.epoch, shard.state.version))

    # --- the end ---

    def drop_shard(self, effect: DropShard) -> None:
        replica = self._catalog.find(*effect.key)
        if replica is not None:
            self._remove(replica)

    def _remove(self, replica: ShardReplica) -> None:
        # An admitted push must not be applied to a dropped replica.
        replica.state.refuse_pushes()
        self._end(replica)
        self._catalog.remove(replica)

    def _end(self, replica: ShardReplica) -> None:
        self._report_all()
        replica.state.subscribe(None)
        replica.is_led = replica.is_followed = False
        replica.links, replica.unreplicated_bytes = (), 0
        if self.shard_journal is not None:
            self.shard_journal.end(replica)

    def _replica(self, key: Key) -> ShardReplica:
        replica = self._catalog.find(*key)
        assert replica is not None, key
        return replica
