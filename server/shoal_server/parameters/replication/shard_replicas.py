"""What this server holds, made to follow the record in etcd: leading, backing up, handing over.

The record says who holds what (`core/shards/assignments.py`); every change of it, whoever made
it, is carried out here. This server itself changes it in four cases: a joiner is in step or a
backup is gone (`primary_replicator.py`), a primary is gone (`primary_failure_detector.py`), a shard
is handed over (`handover.py`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import structlog

from shoal_proto.errors import WrongEpoch
from shoal_proto.routes import Route
from shoal_server.core.shards.assignments import (
    Holder,
    ShardAssignment,
    ShardContent,
    emptied,
    put_on_disk,
)
from shoal_server.etcd.api import KeyValueStore
from shoal_server.parameters.cluster.assignment_table import AssignmentTable
from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts
from shoal_server.parameters.cluster.server_directory import ServerDirectory
from shoal_server.parameters.journal.log import Journal
from shoal_server.parameters.journal.shard_journal import ShardJournal
from shoal_server.parameters.replication.frames import Arrived
from shoal_server.parameters.replication.handover import ShardHandover
from shoal_server.parameters.replication.primary_failure_detector import PrimaryFailureDetector
from shoal_server.parameters.replication.primary_replicator import PrimaryReplicator
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.replica import Receipts, Role, ShardReplica
from shoal_server.parameters.shard.workers import Runner
from shoal_server.serving.tasks import SupervisedTasks

log = structlog.get_logger(__name__)

Settle = Callable[[ShardReplica], Coroutine[Any, Any, None]]


class ShardReplicas:
    """Lives on the event loop. `run` does work on so many bytes without holding the loop up;
    `settle` waits until all that was received for a shard is applied."""

    def __init__(
        self,
        store: KeyValueStore,
        me: Holder,
        catalog: Catalog,
        *,
        settle: Settle,
        run: Runner,
        timeouts: PeerTimeouts,
    ) -> None:
        self.me = me
        self.settle = settle
        self._catalog = catalog
        self._directory = ServerDirectory(store, self._look_whether_empty)
        self._record = AssignmentTable(store, self._carry_out, self._record_gone)
        self._replicator = PrimaryReplicator(
            me,
            record=self._record,
            catalog=catalog,
            directory=self._directory,
            run=run,
            timeouts=timeouts,
        )
        self._failure_detector = PrimaryFailureDetector(
            me,
            record=self._record,
            catalog=catalog,
            directory=self._directory,
            timeouts=timeouts,
        )
        self._handover = ShardHandover(me, self._record)
        catalog.route = self._route
        catalog.is_kept = self._is_kept
        self._tasks = SupervisedTasks()
        self._empty = asyncio.Event()

    async def __aenter__(self) -> "ShardReplicas":
        await self._directory.__aenter__()
        await self._record.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._record.__aexit__(*exc)
        for part in (self._tasks, self._handover, self._replicator, self._failure_detector):
            await part.close()
        await self._directory.__aexit__(*exc)

    @asynccontextmanager
    async def shard_journal(self, journal: Journal, pool: Executor) -> AsyncIterator[ShardJournal]:
        """Keep what is led here in a journal too, as long as the block runs."""
        async with ShardJournal(
            journal, pool, self._replicator.cut, self._put_on_disk
        ) as shard_journal:
            self._replicator.shard_journal = shard_journal
            try:
                yield shard_journal
            finally:
                self._replicator.shard_journal = None

    async def _put_on_disk(self, job: str, shard_ids: Collection[int]) -> None:
        await self.change_assignments(job, shard_ids, partial(put_on_disk, primary=self.me))

    async def wait_failed(self) -> None:
        """Return never; raise what ended the watch of the record."""
        await self._record.wait_failed()

    @property
    def full_peers(self) -> Mapping[Holder, str]:
        """Servers that have no memory for copies of shards led here, and what they said."""
        return self._replicator.full_peers

    def assignment(self, job: str, shard_id: int) -> ShardAssignment | None:
        """Who holds a shard, as of the newest record seen."""
        return self._record.assignment(job, shard_id)

    def _is_kept(self, job: str, shard_id: int) -> bool:
        shard_journal = self._replicator.shard_journal
        return shard_journal is not None and shard_journal.keeps(job, shard_id)

    def _route(self, job: str, shard_id: int) -> Route | None:
        """Where a shard is led, or is about to be; None where that is not known."""
        assignment = self.assignment(job, shard_id)
        if assignment is None:
            return None
        replica = self._catalog.find(job, shard_id)
        leader, epoch = assignment.primary, assignment.epoch
        if replica is not None and replica.is_handing_over and assignment.successor is not None:
            leader, epoch = assignment.successor, epoch + 1
        address = self._directory.address(leader)
        return None if address is None else Route(shard_id, epoch, leader.server_id, address)

    def of_job(self, job: str) -> Mapping[int, ShardAssignment]:
        """Who holds each shard of a job, as of the newest record seen."""
        return self._record.of_job(job)

    @property
    def jobs(self) -> Iterator[str]:
        """Jobs that have a record."""
        return self._record.jobs

    async def change_assignments(
        self,
        job: str,
        shard_ids: Collection[int],
        change: Callable[[ShardAssignment], ShardAssignment],
    ) -> bool:
        """Make a change to each of these shards; see `AssignmentTable.change`."""
        return await self._record.change(job, shard_ids, change)

    async def refresh(self, job: str, shard_ids: Collection[int] | None = None) -> None:
        """Read the records of these shards of a job anew, or of all. Raises what the store
        raises."""
        await self._record.refresh(job, shard_ids)

    async def begin_anew(self, job: str) -> None:
        """Let go of what is held by an earlier epoch than the record's, which was written anew.

        Raises what the store raises.
        """
        await self._record.refresh(job)
        for replica in self._catalog.of_job(job):
            assignment = self.assignment(job, replica.shard_id)
            if assignment is not None and replica.epoch < assignment.epoch:
                self._drop(replica)

    async def wait_empty(self) -> None:
        """Return once nothing is held here any more, or nobody else is there to hold it."""
        self._look_whether_empty()
        await self._empty.wait()

    def _look_whether_empty(self) -> None:
        shard_journal = self._replicator.shard_journal
        is_bare = next(self._catalog.shards(), None) is None
        # What only this disk has goes on to another server's before this one leaves.
        is_bare = is_bare and (shard_journal is None or not shard_journal.keeps_for_others)
        if is_bare or not self._directory.has_others(self.me):
            self._empty.set()
        else:
            self._empty.clear()

    # What follows from the record.

    def _carry_out(self, job: str, shard_ids: Collection[int]) -> None:
        for shard_id in shard_ids:
            assignment, replica = self.assignment(job, shard_id), self._catalog.find(job, shard_id)
            if replica is not None:
                self._follow_record(replica, assignment)
            if assignment is not None and self.me in (assignment.joining, assignment.successor):
                self._replicator.connect(assignment.primary)
        self._failure_detector.look(job, shard_ids)
        self._let_journal_go(job)

    def _follow_record(self, replica: ShardReplica, assignment: ShardAssignment | None) -> None:
        if assignment is None or self.me not in assignment.holders:
            self._drop(replica)
        elif assignment.primary == self.me:
            self._lead(replica, assignment)
        elif replica.role is Role.PRIMARY:
            self._step_down(replica, assignment)

    def _record_gone(self, job: str) -> None:
        self._replicator.forget(job)
        self.drop_job(job)
        self._let_journal_go(job)

    def keep_in_journal(self, keys: Collection[tuple[str, int]]) -> None:
        """Shards that the last process of this server left in its journal, by job and id."""
        assert self._replicator.shard_journal is not None
        self._replicator.shard_journal.keep(keys)
        for job in {job for job, _ in keys}:
            self._let_journal_go(job)

    def _let_journal_go(self, job: str) -> None:
        """Of what the record names another disk for."""
        shard_journal = self._replicator.shard_journal
        if shard_journal is not None and shard_journal.keeps_for_others:
            on_disk = {shard_id: h.on_disk for shard_id, h in self._record.of_job(job).items()}
            mine = {shard_id for shard_id, disk in on_disk.items() if disk == self.me.server_id}
            shard_journal.let_go(job, but=mine)
        self._look_whether_empty()

    def created(self, replica: ShardReplica) -> None:
        """A shard has got its first values here. It may be pushed to once its backup has them, and
        the record says that there are some."""
        assignment = self.assignment(replica.job, replica.shard_id)
        if assignment is not None and assignment.primary == self.me:
            replica.is_forming = len(assignment.holders) > 1
            self._begin_to_lead(replica, assignment)

    def _begin_to_lead(self, replica: ShardReplica, assignment: ShardAssignment) -> None:
        replica.is_forming |= assignment.content is not ShardContent.PRESENT
        replica.state.subscribe(partial(self._replicator.tell, replica))
        if self._replicator.shard_journal is not None:
            self._replicator.shard_journal.lead(replica)
        self._lead(replica, assignment)

    def _lead(self, replica: ShardReplica, assignment: ShardAssignment) -> None:
        if replica.role is Role.BACKUP or replica.epoch != assignment.epoch:
            self._tasks.start(self._promote(replica), key=("promote", replica))
            return
        self._replicator.follow_as_written(replica, assignment)
        if assignment.successor is not None:
            self._handover.begin(replica)

    async def _promote(self, replica: ShardReplica) -> None:
        """What came from the last primary is applied first: some of it was acknowledged."""
        await self.settle(replica)
        assignment = self.assignment(replica.job, replica.shard_id)
        if assignment is None or assignment.primary != self.me:
            return
        if self._catalog.find(replica.job, replica.shard_id) is not replica:
            return  # What was received could not be applied, or another copy is in its place.
        replica.state.enter_epoch(assignment.epoch)
        replica.epoch = assignment.epoch
        replica.receipts, replica.disk = Receipts(), Receipts()
        replica.role = Role.PRIMARY
        log.info("shard_led", job=replica.job, shard_id=replica.shard_id, epoch=replica.epoch)
        self._begin_to_lead(replica, assignment)
        await self._catalog.notify()

    def _step_down(self, replica: ShardReplica, assignment: ShardAssignment) -> None:
        self._end(replica)
        replica.state.enter_epoch(assignment.epoch)
        replica.role = Role.BACKUP
        replica.epoch = assignment.epoch
        replica.is_handing_over = False
        log.info("shard_no_longer_led", job=replica.job, shard_id=replica.shard_id)

    def _end(self, replica: ShardReplica) -> None:
        replica.end()
        replica.state.subscribe(None)
        self._replicator.let_go(replica)
        if self._replicator.shard_journal is not None:
            self._replicator.shard_journal.end(replica)

    def _drop(self, replica: ShardReplica) -> None:
        self._end(replica)
        # A push that has been let in already must not be applied to what nobody will see.
        replica.state.enter_epoch(replica.epoch + 1)
        self._catalog.remove(replica)

    async def empty_job(self, job: str) -> int:
        """Forget all shards of a job because somebody wants it so: they are not lost. How many
        there were."""
        shard_ids = [replica.shard_id for replica in self._catalog.of_job(job)]
        await self.change_assignments(job, shard_ids, partial(emptied, primary=self.me))
        return self.drop_job(job)

    def drop_job(self, job: str) -> int:
        """Forget all shards of a job; how many there were."""
        shards = self._catalog.of_job(job)
        for replica in shards:
            self._drop(replica)
        log.info("shards_dropped", job=job, num_shards=len(shards))
        return len(shards)

    # What comes from primaries.

    def replica(self, job: str, shard_id: int) -> ShardReplica | None:
        return self._catalog.find(job, shard_id)

    async def refresh_source(self, arrived: Arrived, primary: Holder) -> None:
        """Look whether the record names that primary by now, if it did not as last seen."""
        assignment = self.assignment(arrived.job, arrived.shard_id)
        if not self._may_tell(assignment, arrived, primary):
            # The primary may have seen a newer record than this server.
            await self.refresh(arrived.job, [arrived.shard_id])

    def check_source(self, arrived: Arrived, primary: Holder) -> None:
        """Raise WrongEpoch unless that primary may tell this server of the shard."""
        assignment = self.assignment(arrived.job, arrived.shard_id)
        if not self._may_tell(assignment, arrived, primary):
            raise WrongEpoch(
                f"shard {arrived.shard_id} of job {arrived.job} is held in another way",
                seen=f"epoch {arrived.epoch} of {primary.server_id}, for {self.me.server_id}",
                expected="nothing: it is not known here" if assignment is None else str(assignment),
                fix="Read the assignment table again.",
            )

    def _may_tell(
        self, assignment: ShardAssignment | None, arrived: Arrived, primary: Holder
    ) -> bool:
        return (
            assignment is not None
            and (assignment.epoch, assignment.primary) == (arrived.epoch, primary)
            and self.me in assignment.holders[1:]
        )

    def adopt(self, replica: ShardReplica) -> None:
        """Keep a shard, in place of what was kept of it before."""
        before = self._catalog.find(replica.job, replica.shard_id)
        if before is not None:
            self._drop(before)
        self._catalog.add(replica)

    def discard(self, replica: ShardReplica) -> None:
        """Keep a copy no longer: it is not what it should be."""
        if self._catalog.find(replica.job, replica.shard_id) is replica:
            self._drop(replica)

    def stream_opened(self, primary: Holder) -> None:
        self._failure_detector.stream_opened(primary)

    def stream_ended(self, primary: Holder, reason: str) -> None:
        log.info("stream_ended", primary=primary.server_id, reason=reason)
        self._failure_detector.stream_ended(primary)
