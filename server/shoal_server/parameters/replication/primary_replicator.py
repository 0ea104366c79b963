"""A primary's side of copies: who is sent which shards, who counts, who is gone on without."""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial

import structlog

from shoal_proto.errors import Overloaded, ShoalError, WrongEpoch
from shoal_server.core.shards.assignments import (
    Holder,
    Holding,
    Holdings,
    ShardContent,
    filled,
    in_step,
    without_backup,
)
from shoal_server.parameters.cluster.assignment_table import RecordOfHolders
from shoal_server.parameters.cluster.background import Background
from shoal_server.parameters.cluster.full_peers import FullPeers
from shoal_server.parameters.cluster.peer_timeouts import Patience
from shoal_server.parameters.cluster.server_directory import Roster
from shoal_server.parameters.journal.shard_journal import Journaling
from shoal_server.parameters.replication.replication_stream import Link
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.image import Image, Record
from shoal_server.parameters.shard.replica import Held, Role, num_bytes_of
from shoal_server.parameters.shard.workers import Runner

log = structlog.get_logger(__name__)


class Copying:
    """Lives on the event loop. For the shards that this server leads, it makes the record's backups
    and joiners follow, writes down who is in step, and takes out who is lost."""

    def __init__(
        self,
        me: Holder,
        *,
        record: RecordOfHolders,
        catalog: Catalog,
        roster: Roster,
        run: Runner,
        patience: Patience,
    ) -> None:
        self._me = me
        self._record = record
        self._catalog = catalog
        self._roster = roster
        self._run = run
        self._patience = patience
        self._background = Background()
        self._links: dict[Holder, Link] = {}
        self._full = FullPeers(patience.full_s, self._offer_again)
        self._level: dict[str, dict[tuple[int, Holder], object]] = defaultdict(dict)
        """Joiners that have their shard: each time one gets there, by a token of its own."""
        self._formed: dict[str, set[Held]] = defaultdict(set)
        """By job: shards with first values, of which the record does not tell yet."""
        self._loop = asyncio.get_running_loop()
        self.journaling: Journaling | None = None
        """The disk, as one more that has copies."""

    async def close(self) -> None:
        self._full.close()
        await self._background.close()
        for link in list(self._links.values()):
            await link.close()

    def tell(self, held: Held, record: Record) -> None:
        """A push was applied. From any thread, within the shard's lock: so the loop gets them in
        order."""
        held.pushed_bytes += num_bytes_of(record)
        if self._links or self.journaling is not None:
            self._loop.call_soon_threadsafe(self._pass_on, held, record)

    def _pass_on(self, held: Held, record: Record) -> None:
        for link in self._links.values():
            link.tell(held, record)
        if self.journaling is not None:
            self.journaling.tell(held, record)

    def follow_as_written(self, held: Held, holding: Holding) -> None:
        """Make exactly those follow a shard, and count, whom the record names."""
        joining = holding.joining
        is_put_off = joining is not None and self._is_put_off(held, joining)
        wanted = holding.backups if is_put_off else holding.holders[1:]
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
        counted = [joining] if joining and (held.shard_id, joining) in level else []
        held.receipts.require([*holding.backups, *counted])
        safe = held.receipts.safe_version
        is_alone = joining is None or is_put_off
        if not held.is_forming or not is_alone or safe == 0:
            return
        if holding.content is ShardContent.PRESENT:
            held.is_forming = False
            self._background.start(("notify", held), self._catalog.notify())
        else:
            self._formed[held.job].add(held)
            self._background.start(("fill", held.job), self._fill(held.job))

    async def _fill(self, job: str) -> None:
        """Write down that shards have values, before anybody sees them or pushes to them: for as
        many at once as there are by then."""
        while formed := self._formed.pop(job, None):
            await self._record.change(job, partial(self._filled, formed))

    def _filled(self, formed: Collection[Held], holdings: Holdings) -> Holdings:
        for held in formed:
            if held.role is Role.PRIMARY and self._catalog.find(held.job, held.shard_id) is held:
                change = partial(filled, primary=self._me, epoch=held.epoch)
                holdings = holdings.changed([held.shard_id], change)
        return holdings

    def connect(self, holder: Holder) -> None:
        """It is to follow shards from here soon: pushes will wait for it, and not for a stream."""
        self._link(holder)

    def let_go(self, held: Held) -> None:
        """Nobody follows the shard from here any more."""
        for link in self._links.values():
            if link.follows(held):
                link.unfollow(held.job, held.shard_id)

    def forget(self, job: str) -> None:
        """The job's record is gone."""
        self._level.pop(job, None)
        self._formed.pop(job, None)

    def _link(self, to: Holder) -> Link:
        link = self._links.get(to)
        if link is None:
            link = self._links[to] = Link(self._me, to, self, self.take, self._patience)
            link.start()
        return link

    async def take(self, held: Held) -> Image:
        """A shard's image, without holding up the event loop."""
        return await held.in_turn(self._run, held.state.memory_bytes, held.state.image)

    # What links report.

    async def address(self, holder: Holder) -> str | None:
        return await self._roster.reach(holder)

    def caught_up(self, link: Link, held: Held) -> None:
        self._full.took(link.to)
        holding = self._record.holding(held.job, held.shard_id)
        if holding is None or holding.primary != self._me or held.role is not Role.PRIMARY:
            return
        if holding.joining == link.to:
            self._level[held.job][held.shard_id, link.to] = object()
            self._background.start(("admit", held.job), self._admit(held.job))
        self.follow_as_written(held, holding)

    async def _admit(self, job: str) -> None:
        """Write down who is in step, for as many shards at once as there are by then."""
        level = self._level[job]
        while ready := dict(level):
            for shard_id in {shard_id for shard_id, _ in ready}:
                await self._draw_level(job, shard_id)
            await self._record.change(job, partial(self._admitted, ready))
            for joiner, token in ready.items():
                if level.get(joiner) is token:
                    del level[joiner]
            for shard_id in {shard_id for shard_id, _ in ready}:
                self._recount(job, shard_id)

    async def _draw_level(self, job: str, shard_id: int) -> None:
        """Pushes that were acknowledged before the joiner counted must have reached it too."""
        held = self._catalog.find(job, shard_id)
        if held is not None and held.role is Role.PRIMARY:
            # Where the shard has another primary now, the change of the record changes nothing.
            with suppress(WrongEpoch):
                await held.receipts.wait_safe(held.state.version)

    def _admitted(self, ready: Mapping[tuple[int, Holder], object], holdings: Holdings) -> Holdings:
        level = self._level[holdings.job]
        # One that was lost meanwhile may be level once more: that is another time.
        still = [joiner for joiner, token in ready.items() if level.get(joiner) is token]
        for holder in {holder for _, holder in still}:
            shard_ids = [shard_id for shard_id, h in still if h == holder]
            change = partial(in_step, primary=self._me, joined=holder)
            holdings = holdings.changed(shard_ids, change)
        return holdings

    def _recount(self, job: str, shard_id: int) -> None:
        """One that the record does not list after all counts no longer."""
        held = self._catalog.find(job, shard_id)
        holding = self._record.holding(job, shard_id)
        leads = held is not None and held.role is Role.PRIMARY
        if held is not None and leads and holding is not None and holding.primary == self._me:
            self.follow_as_written(held, holding)

    def refused(self, link: Link, held: Held, error: ShoalError) -> None:
        if isinstance(error, Overloaded):
            self._full.refused(link.to, error)
            for other in self._waiting_for(link):
                link.unfollow(other.job, other.shard_id)
                self._give_up(link.to, other)
        else:
            log.warning("copy_refused", job=held.job, shard_id=held.shard_id, why=str(error))
        self._give_up(link.to, held)

    def _give_up(self, holder: Holder, held: Held) -> None:
        work = self._go_on_without(holder, held.job, [held.shard_id])
        self._background.start(("refused", held, holder), work)

    def _waiting_for(self, link: Link) -> list[Held]:
        """Shards that the other end is to get, and that were not sent yet. Once they are out of
        the record, the coordinator may give them to a server that has room."""
        return [
            held
            for held in link.shards
            if not link.is_sending(held)
            and (holding := self._record.holding(held.job, held.shard_id)) is not None
            and (holding.joining, holding.primary) == (link.to, self._me)
        ]

    @property
    def full_peers(self) -> Mapping[Holder, str]:
        """Servers that have no memory for more copies, and what they said."""
        return self._full.reasons

    def _is_put_off(self, held: Held, joining: Holder) -> bool:
        """Whether a joiner is not sent a shard for now, because it had no room for others."""
        link = self._links.get(joining)
        return self._full.is_full(joining) and (link is None or not link.is_sending(held))

    def _offer_again(self, holder: Holder) -> bool:
        """Send it what it is still to get; whether there is anything."""
        wanted = [
            (job, shard_id)
            for job in self._record.jobs
            for shard_id, holding in self._record.of_job(job).items()
            if (holding.joining, holding.primary) == (holder, self._me)
        ]
        for job, shard_id in wanted:
            self._recount(job, shard_id)
        return bool(wanted)

    def lost(self, link: Link, reason: str) -> None:
        self._links.pop(link.to, None)
        self._full.forget(link.to)
        jobs = frozenset(held.job for held in link.end())
        if jobs:
            log.warning("backup_lost", server=link.to.server_id, reason=reason)
        self._background.start(("lost", link.to, jobs), self._lost(link.to, jobs))

    async def _lost(self, lost: Holder, jobs: Collection[str]) -> None:
        for job in jobs:
            mine = [i for i, h in self._record.of_job(job).items() if h.primary == self._me]
            await self._go_on_without(lost, job, mine)

    async def _go_on_without(self, lost: Holder, job: str, shard_ids: Collection[int]) -> None:
        for shard_id in shard_ids:
            self._level[job].pop((shard_id, lost), None)
        change = partial(without_backup, primary=self._me, lost=lost)
        await self._record.change(
            job, partial(Holdings.changed, shard_ids=shard_ids, change=change)
        )
