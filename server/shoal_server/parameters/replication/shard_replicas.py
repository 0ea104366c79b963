"""What this server holds, made to follow the record in etcd: leading, backing up, handing over.

The record says who holds what (`core/shards/assignments.py`); every change of it, whoever made
it, is carried out here. What is to be done is decided by the replication core
(`core/replication/`); this is what stands around it: the record, the shards, links, disk, time.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from functools import partial

import structlog

from shoal_proto.routes import Route
from shoal_server.core.replication.protocol import events as ev
from shoal_server.core.replication.protocol.effects import Note, Probe
from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.shards.assignments import (
    Holder,
    ShardAssignment,
    ShardContent,
    emptied,
    may_be_put_on_disk,
)
from shoal_server.etcd.api import KeyValueStore
from shoal_server.parameters.bulk.offers import Offers
from shoal_server.parameters.cluster.assignment_table import AssignmentTable
from shoal_server.parameters.cluster.peer_timeouts import PEER_OPTIONS, PeerTimeouts
from shoal_server.parameters.cluster.server_directory import ServerDirectory
from shoal_server.parameters.cuts.shard_cut import ShardCut
from shoal_server.parameters.journal.log import Journal
from shoal_server.parameters.journal.replay import Recovered
from shoal_server.parameters.journal.shard_journal import ShardJournal
from shoal_server.parameters.replication.acknowledgements import Acknowledgements
from shoal_server.parameters.replication.comparing import Comparing
from shoal_server.parameters.replication.core_driver import CoreDriver
from shoal_server.parameters.replication.incoming_images import IncomingImages
from shoal_server.parameters.replication.incoming_links import IncomingLinks
from shoal_server.parameters.replication.outgoing_links import OutgoingLinks
from shoal_server.parameters.replication.received_updates import ReceivedUpdates
from shoal_server.parameters.replication.record_writer import RecordWriter
from shoal_server.parameters.replication.replication_servicer import ReplicationServicer
from shoal_server.parameters.replication.shard_roles import ShardRoles
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.shard.replica import ShardReplica
from shoal_server.parameters.shard.versioned import AnyShard
from shoal_server.parameters.shard.workers import Runner
from shoal_server.serving.identify import answers
from shoal_server.serving.tasks import SupervisedTasks

log = structlog.get_logger(__name__)


class ShardReplicas:
    """Lives on the event loop. `run` does work on so many bytes without holding the loop up."""

    def __init__(
        self,
        store: KeyValueStore,
        driver: CoreDriver,
        catalog: Catalog,
        *,
        memory: Memory,
        run: Runner,
        timeouts: PeerTimeouts,
    ) -> None:
        self.me = driver.core.me
        self._driver = driver
        self._catalog = catalog
        self._run = run
        self._timeouts = timeouts
        self.directory = ServerDirectory(store, self._look_whether_empty)
        """Of all servers."""
        self._record = AssignmentTable(store, self._changed, self._record_gone)
        self._images = IncomingImages(driver, catalog=catalog, memory=memory, run=run)
        self._incoming = IncomingLinks()
        self.received = ReceivedUpdates(
            driver,
            catalog=catalog,
            memory=memory,
            run=run,
            is_coming=self._images.is_coming,
            links=self._incoming,
        )
        links = OutgoingLinks(
            driver, catalog=catalog, directory=self.directory, run=run, timeouts=timeouts
        )
        self._roles = ShardRoles(
            driver,
            catalog=catalog,
            images=self._images,
            acknowledgements=Acknowledgements(driver),
            links=links,
        )
        self._comparing = Comparing(catalog, links, run)
        self._tasks = SupervisedTasks()
        writer = RecordWriter(driver, self._record)
        self._parts = (self._tasks, writer, links, self._images, self.received, self._roles)
        driver.carry_out({Probe: self._probe, Note: _note})
        catalog.whereabouts = self
        self._empty = asyncio.Event()

    async def __aenter__(self) -> "ShardReplicas":
        await self.directory.__aenter__()
        await self._record.__aenter__()
        self._tasks.start(self._comparing.run_for_ever(), name="comparing")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._record.__aexit__(*exc)
        self._driver.close()
        for part in self._parts:
            await part.close()
        await self.directory.__aexit__(*exc)

    def servicer(self, offers: Offers) -> ReplicationServicer:
        """What other servers tell this one by."""
        return ReplicationServicer(
            self._driver,
            received=self.received,
            links=self._incoming,
            timeouts=self._timeouts,
            offers=offers,
        )

    def lease_renewed(self, sent_s: float) -> None:
        """etcd has renewed this server's registration; asked for then, on the loop's clock."""
        self._driver.tell(ev.LeaseRenewed(sent_s))

    def lease_ended(self) -> None:
        """The registration is about to be taken away: nothing is acknowledged any more."""
        self._driver.tell(ev.LeaseEnded())

    async def wait_failed(self) -> None:
        """Return never; raise what ended the watch of the record."""
        await self._record.wait_failed()

    # --- what is known ---

    @property
    def full_peers(self) -> Mapping[Holder, str]:
        """Servers that have no memory for copies of shards led here, and what they said."""
        return self._driver.core.leading.full.reasons

    def assignment(self, job: str, shard_id: int) -> ShardAssignment | None:
        """Who holds a shard, as of the newest record seen."""
        return self._record.assignment(job, shard_id)

    def versions(self, job: str, shard_id: int) -> Mapping[Holder, int]:
        """Of a shard that is led here: up to which version its followers are known to have it."""
        led = self._driver.core.led((job, shard_id))
        followers = led.followers if led is not None else {}
        return {holder: follower.confirmed for holder, follower in followers.items()}

    def of_job(self, job: str) -> Mapping[int, ShardAssignment]:
        """Who holds each shard of a job, as of the newest record seen."""
        return self._record.of_job(job)

    def run(self, job: str) -> str:
        """Of which run the records of the job's shards are; empty: they are not placed."""
        return self._record.run(job)

    def job_run(self, job: str) -> str:
        """Which run of the job its members go by; empty: its shards are not placed."""
        return self._record.job_run(job)

    @property
    def jobs(self) -> Iterator[str]:
        """Jobs that have a record."""
        return self._record.jobs

    def route(self, job: str, shard_id: int) -> Route | None:
        """Where a shard is led, or is about to be; None where that is not known."""
        assignment = self.assignment(job, shard_id)
        if assignment is None:
            return None
        replica = self._catalog.find(job, shard_id)
        leader, epoch = assignment.primary, assignment.epoch
        if replica is not None and replica.is_handing_over and assignment.successor is not None:
            leader, epoch = assignment.successor, epoch + 1
        address = self.directory.address(leader)
        return None if address is None else Route(shard_id, epoch, leader.server_id, address)

    def next_address(self, job: str, shard_id: int) -> str:
        """Of the server that a shard is to be handed over to; empty: none is known."""
        assignment = self.assignment(job, shard_id)
        successor = assignment.successor if assignment is not None else None
        return (self.directory.address(successor) or "") if successor is not None else ""

    # --- the record ---

    async def change_assignments(
        self,
        job: str,
        shard_ids: Collection[int],
        change: Callable[[ShardAssignment], ShardAssignment],
    ) -> bool:
        """Make a change to shards' records; see `AssignmentTable.change`."""
        return await self._record.change(job, shard_ids, change)

    async def refresh(self, job: str, shard_ids: Collection[int] | None = None) -> None:
        """Read the job's records anew, or those of some shards. Raises what the store raises."""
        await self._record.refresh(job, shard_ids)

    async def begin_anew(self, job: str) -> None:
        """Let go of what is held by an earlier epoch than the record's, which was written anew.

        Raises what the store raises.
        """
        await self._record.refresh(job)
        for replica in self._catalog.of_job(job):
            assignment = self.assignment(job, replica.shard_id)
            if assignment is not None and replica.epoch < assignment.epoch:
                self._driver.tell(ev.Forget((job, replica.shard_id)))

    def _changed(self, job: str, shard_ids: Collection[int]) -> None:
        for shard_id in shard_ids:
            assignment = self.assignment(job, shard_id)
            self._driver.tell(ev.Assigned((job, shard_id), assignment, self._record.run(job)))
            if assignment is not None and assignment.on_disk == self.me.server_id:
                _tell_if_older(job, assignment)
        self._let_journal_go(job)

    def _record_gone(self, job: str) -> None:
        self.drop_job(job)
        for key in self._driver.core.known(job):
            self._driver.tell(ev.Assigned(key, None))
        self._let_journal_go(job)

    # --- shards that come and go ---

    def created(self, replica: ShardReplica) -> None:
        """A shard has got its first values here, or has been loaded. It may be pushed to once its
        backup has them, and the record says that there are some."""
        key = replica.job, replica.shard_id
        self._driver.tell(ev.Created(key, replica.epoch, replica.state.version))

    def replace(self, replica: ShardReplica) -> None:
        """The same, in place of what may be here of that shard."""
        self._driver.tell(ev.Forget((replica.job, replica.shard_id)))
        self._catalog.add(replica)
        self.created(replica)

    async def empty_job(self, job: str) -> int:
        """Forget all shards of a job because somebody wants it so: they are not lost. How many
        there were."""
        shard_ids = [replica.shard_id for replica in self._catalog.of_job(job)]
        await self.change_assignments(job, shard_ids, partial(emptied, primary=self.me))
        self.drop_job(job)
        return len(shard_ids)

    def drop_job(self, job: str) -> int:
        """Forget all shards of a job; how many there were."""
        shards = self._catalog.of_job(job)
        for replica in shards:
            self._driver.tell(ev.Forget((job, replica.shard_id)))
        log.info("shards_dropped", job=job, num_shards=len(shards))
        return len(shards)

    async def wait_empty(self) -> None:
        """Return once nothing is held here any more, or nobody else is there to hold it."""
        self._look_whether_empty()
        await self._empty.wait()

    @property
    def only_here(self) -> Mapping[str, Sequence[int]]:
        """By job, the shards that are lost with this process: no other server has a copy, and no
        disk."""
        found: dict[str, list[int]] = {}
        for replica in self._catalog.shards():
            assignment = self.assignment(replica.job, replica.shard_id)
            is_led = assignment is not None and assignment.primary == self.me
            if is_led and assignment and not assignment.backups and not assignment.on_disk:
                found.setdefault(replica.job, []).append(replica.shard_id)
        return found

    def _look_whether_empty(self) -> None:
        shard_journal = self._roles.shard_journal
        is_bare = next(self._catalog.shards(), None) is None
        # What only this disk has goes on to another server's before this one leaves.
        is_bare = is_bare and (shard_journal is None or not shard_journal.keeps_for_others)
        if is_bare or not self.directory.has_others(self.me):
            self._empty.set()
        else:
            self._empty.clear()

    # --- the disk ---

    @asynccontextmanager
    async def shard_journal(self, journal: Journal, pool: Executor) -> AsyncIterator[ShardJournal]:
        """Keep what is led here in a journal too, as long as the block runs."""
        async with ShardJournal(
            journal, pool, take=self._take, on_disk=self._on_disk, on_failure=self._disk_failed
        ) as shard_journal:
            self._roles.shard_journal = shard_journal
            self._driver.core.leading.keeps_journal = True
            try:
                yield shard_journal
            finally:
                self._roles.shard_journal = None

    async def _take(self, replica: ShardReplica) -> ShardCut:
        """A cut through a shard, taken without holding up the event loop."""
        return await replica.in_turn(self._run, replica.state.memory_bytes, replica.state.cut)

    def _on_disk(self, replica: ShardReplica, version: int) -> None:
        if not replica.is_led:
            return  # It was let go of while it was written.
        self._driver.tell(ev.OnDisk((replica.job, replica.shard_id), version))

    def _disk_failed(self, replica: ShardReplica) -> None:
        self._driver.tell(ev.DiskFailed((replica.job, replica.shard_id)))

    def is_kept(self, job: str, shard_id: int) -> bool:
        """Whether this server's journal has a shard that is not led here."""
        shard_journal = self._roles.shard_journal
        return shard_journal is not None and shard_journal.keeps(job, shard_id)

    def found_in_journal(self, recovered: Mapping[Key, Recovered[AnyShard]]) -> None:
        """Shards that the last process of this server left in its journal."""
        shard_journal = self._roles.shard_journal
        assert shard_journal is not None
        shard_journal.keep(recovered)
        known = set(self.jobs)
        foreign = {k for k, f in recovered.items() if f.is_of_another_run(self._record.run(k[0]))}
        # The others may be read once more.
        self._roles.recovered.update(
            {k: found for k, found in recovered.items() if k[0] in known and k not in foreign}
        )
        for key, found in recovered.items():
            if key in foreign:
                _tell_foreign(key, found.run, self._record.run(key[0]))
                # Less than the disk had of this run: it is waited for until that is back.
                self._driver.tell(ev.JournalHas(key, 0, 0))
            else:
                self._driver.tell(ev.JournalHas(key, found.epoch, found.state.version))
        for job in {job for job, _ in recovered}:
            if job in known:
                self._let_journal_go(job)
            else:
                # It may be over. Or this is another etcd than the one that knows of it.
                log.warning("journal_has_unknown_job", job=job)

    @property
    def in_journal(self) -> Collection[Key]:
        """What this server's journal has, of what is led here and of what is not."""
        shard_journal = self._roles.shard_journal
        return () if shard_journal is None else shard_journal.all_keys

    @property
    def has_lost_disk(self) -> bool:
        """Whether the journal's disk takes nothing now: another process may have it, and on it what
        is not here."""
        shard_journal = self._roles.shard_journal
        return shard_journal is not None and shard_journal.failure is not None

    @property
    def open_claims(self) -> Collection[Key]:
        """What the journal has and others may have too."""
        return self._driver.core.open_claims

    def servers_seen(
        self, present: frozenset[Holder], asked_s: float, ended: frozenset[Holder]
    ) -> None:
        """The servers that etcd listed when it was asked, by the clock of the event loop, and
        processes that are known to have ended."""
        self._driver.tell(ev.ServersSeen(present, asked_s, ended))

    def _let_journal_go(self, job: str) -> None:
        """Of what the record names another disk for, or none."""
        shard_journal = self._roles.shard_journal
        if shard_journal is not None and shard_journal.keeps_for_others:
            known = self._record.of_job(job).items()
            mine = {shard_id for shard_id, a in known if may_be_put_on_disk(a, self.me)}
            shard_journal.let_go(job, but=mine)
            claimed = set(self.open_claims)
            for key in [k for k in self._roles.recovered if k not in claimed]:
                del self._roles.recovered[key]
        self._look_whether_empty()

    # --- primaries ---

    def _probe(self, effect: Probe) -> None:
        self._tasks.start(self._ask(effect.peer))

    async def _ask(self, peer: Holder) -> None:
        address = await self.directory.reach(peer)
        is_there = address is not None and await answers(
            peer, address, options=PEER_OPTIONS, within_s=self._timeouts.silence_s / 2
        )
        self._driver.tell(ev.Probed(peer, is_there))


def _tell_if_older(job: str, assignment: ShardAssignment) -> None:
    if assignment.found_version and assignment.content is not ShardContent.LOST:
        log.error(
            "journal_is_older",
            job=job,
            shard_id=assignment.shard_id,
            seen=f"version {assignment.found_version}",
            expected=f"at least version {assignment.disk_version} of epoch {assignment.disk_epoch}",
            fix="Stop this server, put the newest copy of its journal back, and start it again.",
        )


def _tell_foreign(key: Key, seen: str, expected: str) -> None:
    log.error(
        "journal_is_of_another_run",
        job=key[0],
        shard_id=key[1],
        seen=f"a shard of run {seen}",
        expected=f"one of run {expected}",
        fix="Is this journal another cluster's, or older than the job's last start or restore? Stop"
        " this server, put its own journal back, and start it again.",
    )


def _note(note: Note) -> None:
    """What the core has to say, in the log."""
    fields: dict[str, object] = {}
    if note.key is not None:
        fields["job"], fields["shard_id"] = note.key
    if note.peer is not None:
        fields["server"] = note.peer.server_id
    if note.detail:
        fields["why"] = note.detail
    log.warning(note.what, **fields)
