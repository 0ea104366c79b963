"""What this server holds, made to follow the record in etcd: leading, backing up, taking over.

The record says who holds what (`core/holdings.py`); every change of it, whoever made it, is carried
out here. This server itself changes it in four cases: a joiner is in step, a backup is gone, a
primary is gone, a shard is handed over.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

import grpc
import grpc.aio
import structlog

from shoal_proto.errors import RetryError, ShoalError, WrongEpoch
from shoal_proto.v1 import replication_pb2 as pb
from shoal_proto.v1.replication_pb2_grpc import ReplicationStub
from shoal_server.core.holdings import (
    Holder,
    Holding,
    Holdings,
    handed_over,
    in_step,
    promoted,
    without_backup,
)
from shoal_server.etcd import holdings as records
from shoal_server.etcd import keys
from shoal_server.etcd.api import EventKind, KeyValue, KeyValueStore, Revision
from shoal_server.parameters.catalog import Catalog
from shoal_server.parameters.frames import Arrived
from shoal_server.parameters.held import Held, Receipts, Role
from shoal_server.parameters.image import Image, Record
from shoal_server.parameters.link import PEER_OPTIONS, Link, Patience
from shoal_server.parameters.roster import Roster
from shoal_server.parameters.work import Runner

log = structlog.get_logger(__name__)

RETRY_PAUSE_S = 0.1

Settle = Callable[[Held], Coroutine[Any, Any, None]]


class Custody:
    """Lives on the event loop. `settle` waits until all that was received for a shard is applied;
    `run` does work on so many bytes without holding the loop up."""

    def __init__(
        self, store: KeyValueStore, me: Holder, catalog: Catalog, run: Runner, patience: Patience
    ) -> None:
        self.me = me
        self.settle: Settle
        self._store = store
        self._catalog = catalog
        self._run = run
        self._patience = patience
        self._roster = Roster(store, self._look_whether_empty)
        self._records: dict[str, records.Entry] = {}
        self._holdings: dict[str, dict[int, Holding]] = {}
        self._links: dict[Holder, Link] = {}
        self._level: dict[str, dict[tuple[int, Holder], object]] = defaultdict(dict)
        """Joiners that have their shard: each time one gets there, by a token of its own."""
        self._streams: dict[Holder, int] = defaultdict(int)
        self._stream_opened = asyncio.Condition()
        self._tasks: dict[object, asyncio.Task[None]] = {}
        self._empty = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> "Custody":
        await self._roster.__aenter__()
        snapshot = await self._store.range(keys.HOLDINGS)
        for item in snapshot.items:
            self._note_entry(item)
        self._following = asyncio.create_task(self._follow(snapshot.revision), name="holdings")
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = [*self._tasks.values(), *filter(None, [self._following])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in list(self._links.values()):
            await link.close()
        await self._roster.__aexit__(*exc)

    async def wait_failed(self) -> None:
        """Return never; raise what ended the watch."""
        assert self._following is not None
        await asyncio.shield(self._following)

    # What the record says.

    def holding(self, job: str, shard_id: int) -> Holding | None:
        """Who holds a shard, as of the newest record seen."""
        return self._holdings.get(job, {}).get(shard_id)

    async def refresh(self, job: str) -> None:
        """Read the job's record anew. Raises what the store raises."""
        entry = await records.read(self._store, job)
        if entry is not None:
            self._note(entry)

    async def begin_anew(self, job: str) -> None:
        """Let go of what is held by an earlier epoch than the record's, which was written anew.

        Raises what the store raises.
        """
        entry = await records.read(self._store, job)
        if entry is None:
            return
        epochs = {holding.shard_id: holding.epoch for holding in entry.holdings.shards}
        for held in self._catalog.of_job(job):
            if held.epoch < epochs.get(held.shard_id, 0):
                self._drop(held)
        self._note(entry)

    async def _follow(self, revision: int) -> None:
        watch = self._store.watch(keys.HOLDINGS, Revision(revision + 1))
        async with aclosing(watch) as batches:
            async for batch in batches:
                for event in batch.events:
                    job = event.key.removeprefix(keys.HOLDINGS)
                    if event.kind is EventKind.DELETE:
                        known = self._records.get(job)
                        # One that was written anew since may have been read already.
                        if known is None or known.revision < event.mod_revision:
                            self._forget(job)
                    else:
                        revision_of = Revision(event.mod_revision)
                        item = KeyValue(event.key, event.value, revision_of, revision_of, 1)
                        self._note_entry(item)

    def _note_entry(self, item: KeyValue) -> None:
        try:
            entry = records.parse(item)
        except ShoalError:
            log.exception("holdings_unreadable", key=item.key)
            return
        self._note(entry)

    def _note(self, entry: records.Entry) -> None:
        job = entry.holdings.job
        known = self._records.get(job)
        if known is not None and known.revision >= entry.revision:
            return
        self._records[job] = entry
        self._holdings[job] = {h.shard_id: h for h in entry.holdings.shards}
        self._carry_out(job)

    def _forget(self, job: str) -> None:
        self._records.pop(job, None)
        self._holdings.pop(job, None)
        self._level.pop(job, None)
        self.drop_job(job)

    # What follows from it.

    def _carry_out(self, job: str) -> None:
        for held in self._catalog.of_job(job):
            holding = self.holding(job, held.shard_id)
            if holding is None or self.me not in holding.holders:
                self._drop(held)
            elif holding.primary == self.me:
                self._lead(held, holding)
            else:
                self._back(held, holding)
        self._expect_primaries(job)
        self._look_whether_empty()

    def _look_whether_empty(self) -> None:
        if next(self._catalog.shards(), None) is None or not self._roster.has_others(self.me):
            self._empty.set()
        else:
            self._empty.clear()

    async def wait_empty(self) -> None:
        """Return once nothing is held here any more, or nobody else is there to hold it."""
        self._look_whether_empty()
        await self._empty.wait()

    def created(self, held: Held) -> None:
        """A shard has got its first values here. It may be pushed to once its backup has them."""
        holding = self.holding(held.job, held.shard_id)
        if holding is not None and holding.primary == self.me:
            held.is_forming = len(holding.holders) > 1
            self._lead(held, holding)

    def _lead(self, held: Held, holding: Holding) -> None:
        if held.role is Role.BACKUP or held.epoch != holding.epoch:
            self._start(("promote", held), self._promote(held))
            return
        held.state.keep(partial(self._tell, held))
        self._set_followers(held, holding)
        safe = held.receipts.safe_version
        if held.is_forming and holding.joining is None and (safe is None or safe > 0):
            held.is_forming = False
            self._start(("notify", held), self._catalog.notify())
        if holding.successor is not None and not held.is_handing_over:
            held.is_handing_over = True
            self._start(("hand over", held), self._hand_over(held))

    async def _promote(self, held: Held) -> None:
        """What came from the last primary is applied first: some of it was acknowledged."""
        await self.settle(held)
        holding = self.holding(held.job, held.shard_id)
        if holding is None or holding.primary != self.me:
            return
        held.state.enter_epoch(holding.epoch)
        held.epoch = holding.epoch
        held.receipts = Receipts()
        held.role = Role.PRIMARY
        log.info("shard_led", job=held.job, shard_id=held.shard_id, epoch=held.epoch)
        self._lead(held, holding)
        await self._catalog.notify()

    def _back(self, held: Held, holding: Holding) -> None:
        if held.role is Role.PRIMARY:
            held.end()
            held.state.keep(None)
            self._unfollow(held)
            held.state.enter_epoch(holding.epoch)
            held.role = Role.BACKUP
            held.epoch = holding.epoch
            held.is_handing_over = False
            log.info("shard_no_longer_led", job=held.job, shard_id=held.shard_id)

    def drop_job(self, job: str) -> int:
        """Forget all shards of a job; how many there were."""
        shards = self._catalog.of_job(job)
        for held in shards:
            self._drop(held)
        log.info("shards_dropped", job=job, num_shards=len(shards))
        return len(shards)

    def _drop(self, held: Held) -> None:
        held.end()
        held.state.keep(None)
        self._unfollow(held)
        self._catalog.remove(held)

    def _set_followers(self, held: Held, holding: Holding) -> None:
        wanted = holding.holders[1:]
        for holder, link in self._links.items():
            if holder not in wanted and link.follows(held):
                link.unfollow(held.job, held.shard_id)
        for holder in wanted:
            link = self._link(holder)
            if not link.follows(held):
                link.follow(held)
        # One that is level counts before the record says so: then nothing is acknowledged that
        # it has not, by the time it may take over.
        level = self._level[held.job]
        joining = holding.joining
        counted = [joining] if joining and (held.shard_id, joining) in level else []
        held.receipts.require([*holding.backups, *counted])

    def _unfollow(self, held: Held) -> None:
        for link in self._links.values():
            if link.follows(held):
                link.unfollow(held.job, held.shard_id)

    def _tell(self, held: Held, record: Record) -> None:
        """From any thread, within the shard's lock: so the loop gets them in order."""
        if self._links:
            self._loop.call_soon_threadsafe(self._pass_on, held, record)

    def _pass_on(self, held: Held, record: Record) -> None:
        for link in self._links.values():
            link.tell(held, record)

    # Changes that this server makes to the record.

    async def _change(self, job: str, change: Callable[[Holdings], Holdings]) -> bool:
        """Make a change, however often etcd has to be asked; whether there still is a record."""
        while True:
            entry = self._records.get(job)
            if entry is None:
                return False
            try:
                changed = await records.change(self._store, entry, change)
            except RetryError as error:
                log.warning("holdings_not_changed", job=job, reason=str(error))
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            if changed is None:
                self._forget(job)
                return False
            self._note(changed)
            return True

    async def _hand_over(self, held: Held) -> None:
        """Stop, let every backup draw level, change places with the successor."""
        # From here on pushes of this epoch are refused; the next one is the successor's.
        held.state.enter_epoch(held.epoch + 1)
        try:
            await held.receipts.wait_safe(held.state.version)
            handed = partial(handed_over, primary=self.me)
            await self._change(held.job, lambda h: h.changed([held.shard_id], handed))
        except WrongEpoch:
            return  # Somebody else leads it already.
        holding = self.holding(held.job, held.shard_id)
        if held.role is Role.PRIMARY and holding is not None and holding.epoch == held.epoch:
            held.state.enter_epoch(held.epoch)
            held.is_handing_over = False

    def _link(self, to: Holder) -> Link:
        link = self._links.get(to)
        if link is None:
            link = self._links[to] = Link(self.me, to, self, self._take, self._patience)
            link.start()
        return link

    async def _take(self, held: Held) -> Image:
        return await self._run(held.state.memory_bytes, held.state.image)

    async def address(self, holder: Holder) -> str | None:
        try:
            return await self._roster.find(holder)
        except RetryError as error:
            log.warning("server_not_looked_up", server=holder.server_id, reason=str(error))
            return self._roster.address(holder)

    def caught_up(self, link: Link, held: Held) -> None:
        holding = self.holding(held.job, held.shard_id)
        if holding is None or holding.primary != self.me:
            return
        if holding.joining != link.to:
            self._lead(held, holding)
            return
        self._level[held.job][held.shard_id, link.to] = object()
        held.receipts.require([*holding.backups, link.to])
        self._start(("admit", held.job), self._admit(held.job))

    async def _admit(self, job: str) -> None:
        """Write down who is in step, for as many shards at once as there are by then."""
        level = self._level[job]
        while ready := dict(level):
            for shard_id in {shard_id for shard_id, _ in ready}:
                await self._draw_level(job, shard_id)
            await self._change(job, partial(self._admitted, ready))
            for joiner, token in ready.items():
                if level.get(joiner) is token:
                    del level[joiner]
            # Those that the record does not list after all count no longer.
            self._carry_out(job)

    def _admitted(self, ready: Mapping[tuple[int, Holder], object], holdings: Holdings) -> Holdings:
        level = self._level[holdings.job]
        # One that was lost meanwhile may be level once more: that is another time.
        still = [joiner for joiner, token in ready.items() if level.get(joiner) is token]
        for holder in {holder for _, holder in still}:
            shard_ids = [shard_id for shard_id, h in still if h == holder]
            change = partial(in_step, primary=self.me, joined=holder)
            holdings = holdings.changed(shard_ids, change)
        return holdings

    async def _draw_level(self, job: str, shard_id: int) -> None:
        """Pushes that were acknowledged before the joiner counted must have reached it too."""
        held = self._catalog.find(job, shard_id)
        if held is not None and held.role is Role.PRIMARY:
            # Where the shard has another primary now, the change of the record changes nothing.
            with suppress(WrongEpoch):
                await held.receipts.wait_safe(held.state.version)

    def refused(self, link: Link, held: Held, error: ShoalError) -> None:
        log.warning("copy_refused", job=held.job, shard_id=held.shard_id, why=str(error))
        self._start(
            ("refused", held, link.to), self._go_on_without(link.to, held.job, [held.shard_id])
        )

    def lost(self, link: Link, reason: str) -> None:
        log.warning("backup_lost", server=link.to.server_id, reason=reason)
        self._links.pop(link.to, None)
        self._start(("lost", link.to), self._lost(link))

    async def _lost(self, link: Link) -> None:
        jobs = {held.job for held in link.shards}
        for job in jobs:
            mine = [i for i, h in self._holdings.get(job, {}).items() if h.primary == self.me]
            await self._go_on_without(link.to, job, mine)
        await link.close()

    async def _go_on_without(self, lost: Holder, job: str, shard_ids: Collection[int]) -> None:
        for shard_id in shard_ids:
            self._level[job].pop((shard_id, lost), None)
        change = partial(without_backup, primary=self.me, lost=lost)
        await self._change(job, lambda holdings: holdings.changed(shard_ids, change))

    # What a backup does for its primaries.

    def held(self, job: str, shard_id: int) -> Held | None:
        return self._catalog.find(job, shard_id)

    async def check_source(self, arrived: Arrived, primary: Holder) -> None:
        holding = self.holding(arrived.job, arrived.shard_id)
        if not self._may_tell(holding, arrived, primary) and isinstance(arrived.content, Image):
            # The primary may have seen a newer record than this server.
            await self.refresh(arrived.job)
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

    async def adopt(self, held: Held) -> None:
        before = self._catalog.find(held.job, held.shard_id)
        if before is not None:
            self._drop(before)
        self._catalog.add(held)

    async def discard(self, held: Held) -> None:
        if self._catalog.find(held.job, held.shard_id) is held:
            self._drop(held)

    def stream_opened(self, primary: Holder) -> None:
        self._streams[primary] += 1

    def stream_ended(self, primary: Holder, reason: str) -> None:
        self._streams[primary] -= 1
        for job in list(self._records):
            self._expect_primaries(job)

    def _expect_primaries(self, job: str) -> None:
        """Each primary that this server is a backup of has a stream to here, or is looked for."""
        for holding in self._holdings.get(job, {}).values():
            if self.me in holding.backups and not self._streams[holding.primary]:
                self._start(("expect", holding.primary), self._expect(holding.primary))

    async def _expect(self, primary: Holder) -> None:
        """Return once its stream is there, or this server is its backup no longer; else, once it
        does not answer, take over from it."""
        while not self._streams[primary] and (jobs := self._backed(primary)):
            if await self._answers(primary):
                await asyncio.sleep(self._patience.beat_s)
                continue
            for job, shard_ids in jobs.items():
                log.warning(
                    "primary_lost", server=primary.server_id, job=job, num_shards=len(shard_ids)
                )
                mine = partial(promoted, lost=primary, backup=self.me)
                change = partial(Holdings.changed, shard_ids=shard_ids, change=mine)
                await self._change(job, change)

    def _backed(self, primary: Holder) -> dict[str, list[int]]:
        """By job: the shards of that primary of which this server has a copy in step."""
        found = {
            job: [
                h.shard_id
                for h in holdings.values()
                if h.primary == primary
                and self.me in h.backups
                and self._catalog.find(job, h.shard_id) is not None
            ]
            for job, holdings in self._holdings.items()
        }
        return {job: shard_ids for job, shard_ids in found.items() if shard_ids}

    async def _answers(self, holder: Holder) -> bool:
        """Whether that very process answers at its address."""
        address = await self.address(holder)
        if address is None:
            return False
        async with grpc.aio.insecure_channel(address, options=PEER_OPTIONS) as channel:
            try:
                found = await ReplicationStub(channel).Identify(
                    pb.IdentifyRequest(), timeout=self._patience.silence_s / 2
                )
            except grpc.RpcError:
                return False
        return Holder(found.server_id, found.incarnation) == holder

    def _start(self, key: object, work: Coroutine[Any, Any, None]) -> None:
        """Run in the background, unless work of that key is under way."""
        known = self._tasks.get(key)
        if known is not None and not known.done():
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks[key] = task
        task.add_done_callback(partial(self._ended, key))

    def _ended(self, key: object, task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if not task.cancelled() and task.exception() is not None:
            log.error("custody_work_failed", work=str(key), exc_info=task.exception())

    @property
    def queued(self) -> int:
        """Records and images that are still to be sent to backups."""
        return sum(link.queued for link in self._links.values())
