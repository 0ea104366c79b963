"""What this server holds, made to follow the record in etcd: leading, backing up, handing over.

The record says who holds what (`core/shards/assignments.py`); every change of it, whoever
made it, is carried out here.
This server itself changes it in four cases: a joiner is in step or a backup is gone
(`copying.py`), a primary is gone (`watching.py`), a shard is handed over (`handing_over.py`).
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
    Holding,
    Holdings,
    ShardContent,
    emptied,
    put_on_disk,
)
from shoal_server.etcd.api import KeyValueStore
from shoal_server.parameters.cluster.assignment_table import RecordOfHolders
from shoal_server.parameters.cluster.background import Background
from shoal_server.parameters.cluster.peer_timeouts import Patience
from shoal_server.parameters.cluster.server_directory import Roster
from shoal_server.parameters.journal.log import Journal
from shoal_server.parameters.journal.shard_journal import Journaling
from shoal_server.parameters.replication.frames import Arrived
from shoal_server.parameters.replication.handover import HandingOver
from shoal_server.parameters.replication.primary_failure_detector import Watching
from shoal_server.parameters.replication.primary_replicator import Copying
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.replica import Held, Receipts, Role
from shoal_server.parameters.shard.workers import Runner

log = structlog.get_logger(__name__)

Settle = Callable[[Held], Coroutine[Any, Any, None]]


class Custody:
    """Lives on the event loop. `run` does work on so many bytes without holding the loop up."""

    def __init__(
        self, store: KeyValueStore, me: Holder, catalog: Catalog, run: Runner, patience: Patience
    ) -> None:
        self.me = me
        self.settle: Settle
        """Waits until all that was received for a shard is applied; set before anything comes."""
        self._catalog = catalog
        self._roster = Roster(store, self._look_whether_empty)
        self._record = RecordOfHolders(store, self._carry_out, self._record_gone)
        parts: dict[str, Any] = {
            "record": self._record,
            "catalog": catalog,
            "roster": self._roster,
            "patience": patience,
        }
        self._copying = Copying(me, run=run, **parts)
        self._watching = Watching(me, **parts)
        self._handing_over = HandingOver(me, self._record)
        catalog.route = self._route
        catalog.is_kept = self._is_kept
        self._background = Background()
        self._empty = asyncio.Event()

    async def __aenter__(self) -> "Custody":
        await self._roster.__aenter__()
        await self._record.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._record.__aexit__(*exc)
        for part in (self._background, self._handing_over, self._copying, self._watching):
            await part.close()
        await self._roster.__aexit__(*exc)

    @asynccontextmanager
    async def journaling(self, journal: Journal, pool: Executor) -> AsyncIterator[Journaling]:
        """Keep what is led here in a journal too, as long as the block runs."""
        async with Journaling(journal, pool, self._copying.take, self._put_on_disk) as journaling:
            self._copying.journaling = journaling
            try:
                yield journaling
            finally:
                self._copying.journaling = None

    async def _put_on_disk(self, job: str, shard_ids: Collection[int]) -> None:
        change = partial(put_on_disk, primary=self.me)
        await self.change_record(job, partial(Holdings.changed, shard_ids=shard_ids, change=change))

    async def wait_failed(self) -> None:
        """Return never; raise what ended the watch of the record."""
        await self._record.wait_failed()

    @property
    def full_peers(self) -> Mapping[Holder, str]:
        """Servers that have no memory for copies of shards led here, and what they said."""
        return self._copying.full_peers

    def holding(self, job: str, shard_id: int) -> Holding | None:
        """Who holds a shard, as of the newest record seen."""
        return self._record.holding(job, shard_id)

    def _is_kept(self, job: str, shard_id: int) -> bool:
        journaling = self._copying.journaling
        return journaling is not None and journaling.keeps(job, shard_id)

    def _route(self, job: str, shard_id: int) -> Route | None:
        """Where a shard is led, or is about to be; None where that is not known."""
        holding = self.holding(job, shard_id)
        if holding is None:
            return None
        held = self._catalog.find(job, shard_id)
        leader, epoch = holding.primary, holding.epoch
        if held is not None and held.is_handing_over and holding.successor is not None:
            leader, epoch = holding.successor, epoch + 1
        address = self._roster.address(leader)
        return None if address is None else Route(shard_id, epoch, leader.server_id, address)

    def of_job(self, job: str) -> Mapping[int, Holding]:
        """Who holds each shard of a job, as of the newest record seen."""
        return self._record.of_job(job)

    @property
    def jobs(self) -> Iterator[str]:
        """Jobs that have a record."""
        return self._record.jobs

    async def change_record(self, job: str, change: Callable[[Holdings], Holdings]) -> bool:
        """Make a change to the record; see `RecordOfHolders.change`."""
        return await self._record.change(job, change)

    async def refresh(self, job: str) -> None:
        """Read the job's record anew. Raises what the store raises."""
        await self._record.refresh(job)

    async def begin_anew(self, job: str) -> None:
        """Let go of what is held by an earlier epoch than the record's, which was written anew.

        Raises what the store raises.
        """
        await self._record.refresh(job)
        for held in self._catalog.of_job(job):
            holding = self.holding(job, held.shard_id)
            if holding is not None and held.epoch < holding.epoch:
                self._drop(held)

    async def wait_empty(self) -> None:
        """Return once nothing is held here any more, or nobody else is there to hold it."""
        self._look_whether_empty()
        await self._empty.wait()

    def _look_whether_empty(self) -> None:
        journaling = self._copying.journaling
        is_bare = next(self._catalog.shards(), None) is None
        # What only this disk has goes on to another server's before this one leaves.
        is_bare = is_bare and (journaling is None or not journaling.keeps_for_others)
        if is_bare or not self._roster.has_others(self.me):
            self._empty.set()
        else:
            self._empty.clear()

    # What follows from the record.

    def _carry_out(self, job: str) -> None:
        for held in self._catalog.of_job(job):
            holding = self.holding(job, held.shard_id)
            if holding is None or self.me not in holding.holders:
                self._drop(held)
            elif holding.primary == self.me:
                self._lead(held, holding)
            elif held.role is Role.PRIMARY:
                self._step_down(held, holding)
        for holding in self.of_job(job).values():
            if self.me in (holding.joining, holding.successor):
                self._copying.connect(holding.primary)
        self._watching.look(job)
        self._let_journal_go(job)

    def _record_gone(self, job: str) -> None:
        self._copying.forget(job)
        self.drop_job(job)
        self._let_journal_go(job)

    def keep_in_journal(self, keys: Collection[tuple[str, int]]) -> None:
        """Shards that the last process of this server left in its journal, by job and id."""
        assert self._copying.journaling is not None
        self._copying.journaling.keep(keys)
        for job in {job for job, _ in keys}:
            self._let_journal_go(job)

    def _let_journal_go(self, job: str) -> None:
        """Of what the record names another disk for."""
        journaling = self._copying.journaling
        if journaling is not None and journaling.keeps_for_others:
            on_disk = {shard_id: h.on_disk for shard_id, h in self._record.of_job(job).items()}
            mine = {shard_id for shard_id, disk in on_disk.items() if disk == self.me.server_id}
            journaling.let_go(job, but=mine)
        self._look_whether_empty()

    def created(self, held: Held) -> None:
        """A shard has got its first values here. It may be pushed to once its backup has them, and
        the record says that there are some."""
        holding = self.holding(held.job, held.shard_id)
        if holding is not None and holding.primary == self.me:
            held.is_forming = len(holding.holders) > 1
            self._begin_to_lead(held, holding)

    def _begin_to_lead(self, held: Held, holding: Holding) -> None:
        held.is_forming |= holding.content is not ShardContent.PRESENT
        held.state.keep(partial(self._copying.tell, held))
        if self._copying.journaling is not None:
            self._copying.journaling.lead(held)
        self._lead(held, holding)

    def _lead(self, held: Held, holding: Holding) -> None:
        if held.role is Role.BACKUP or held.epoch != holding.epoch:
            self._background.start(("promote", held), self._promote(held))
            return
        self._copying.follow_as_written(held, holding)
        if holding.successor is not None:
            self._handing_over.begin(held)

    async def _promote(self, held: Held) -> None:
        """What came from the last primary is applied first: some of it was acknowledged."""
        await self.settle(held)
        holding = self.holding(held.job, held.shard_id)
        if holding is None or holding.primary != self.me:
            return
        if self._catalog.find(held.job, held.shard_id) is not held:
            return  # What was received could not be applied, or another copy is in its place.
        held.state.enter_epoch(holding.epoch)
        held.epoch = holding.epoch
        held.receipts, held.disk = Receipts(), Receipts()
        held.role = Role.PRIMARY
        log.info("shard_led", job=held.job, shard_id=held.shard_id, epoch=held.epoch)
        self._begin_to_lead(held, holding)
        await self._catalog.notify()

    def _step_down(self, held: Held, holding: Holding) -> None:
        self._end(held)
        held.state.enter_epoch(holding.epoch)
        held.role = Role.BACKUP
        held.epoch = holding.epoch
        held.is_handing_over = False
        log.info("shard_no_longer_led", job=held.job, shard_id=held.shard_id)

    def _end(self, held: Held) -> None:
        held.end()
        held.state.keep(None)
        self._copying.let_go(held)
        if self._copying.journaling is not None:
            self._copying.journaling.end(held)

    def _drop(self, held: Held) -> None:
        self._end(held)
        # A push that has been let in already must not be applied to what nobody will see.
        held.state.enter_epoch(held.epoch + 1)
        self._catalog.remove(held)

    async def empty_job(self, job: str) -> int:
        """Forget all shards of a job because somebody wants it so: they are not lost. How many
        there were."""
        shard_ids = [held.shard_id for held in self._catalog.of_job(job)]
        change = partial(emptied, primary=self.me)
        await self.change_record(job, partial(Holdings.changed, shard_ids=shard_ids, change=change))
        return self.drop_job(job)

    def drop_job(self, job: str) -> int:
        """Forget all shards of a job; how many there were."""
        shards = self._catalog.of_job(job)
        for held in shards:
            self._drop(held)
        log.info("shards_dropped", job=job, num_shards=len(shards))
        return len(shards)

    # What comes from primaries.

    def held(self, job: str, shard_id: int) -> Held | None:
        return self._catalog.find(job, shard_id)

    async def refresh_source(self, arrived: Arrived, primary: Holder) -> None:
        """Look whether the record names that primary by now, if it did not as last seen."""
        holding = self.holding(arrived.job, arrived.shard_id)
        if not self._may_tell(holding, arrived, primary):
            # The primary may have seen a newer record than this server.
            await self.refresh(arrived.job)

    def check_source(self, arrived: Arrived, primary: Holder) -> None:
        """Raise WrongEpoch unless that primary may tell this server of the shard."""
        holding = self.holding(arrived.job, arrived.shard_id)
        if not self._may_tell(holding, arrived, primary):
            raise WrongEpoch(
                f"shard {arrived.shard_id} of job {arrived.job} is held in another way",
                seen=f"epoch {arrived.epoch} of {primary.server_id}, for {self.me.server_id}",
                expected="nothing: it is not known here" if holding is None else str(holding),
                fix="Look at the record of holders again.",
            )

    def _may_tell(self, holding: Holding | None, arrived: Arrived, primary: Holder) -> bool:
        return (
            holding is not None
            and (holding.epoch, holding.primary) == (arrived.epoch, primary)
            and self.me in holding.holders[1:]
        )

    def adopt(self, held: Held) -> None:
        """Keep a shard, in place of what was kept of it before."""
        before = self._catalog.find(held.job, held.shard_id)
        if before is not None:
            self._drop(before)
        self._catalog.add(held)

    def discard(self, held: Held) -> None:
        """Keep a copy no longer: it is not what it should be."""
        if self._catalog.find(held.job, held.shard_id) is held:
            self._drop(held)

    def stream_opened(self, primary: Holder) -> None:
        self._watching.stream_opened(primary)

    def stream_ended(self, primary: Holder, reason: str) -> None:
        log.info("stream_ended", primary=primary.server_id, reason=reason)
        self._watching.stream_ended(primary)
