"""The shards of this server, kept in accordance with the assignments in etcd.

The replication core (`core/replication/`) decides how to follow changes of the assignments
(`core/shards/assignments.py`). This module connects the core to the record, the shards, the links,
the disk and the clock.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from functools import partial

import structlog

from shoal_proto.errors import RetryError
from shoal_proto.routes import Route
from shoal_proto.tls.bulk_offers import BulkOffers
from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol import events as ev
from shoal_server.core.replication.protocol.effects import LogLine, ProbePeer
from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.shards.assignments import (
    ShardAssignment,
    ShardContent,
    mark_empty,
    may_be_put_on_disk,
)
from shoal_server.etcd.api import KeyValueStore
from shoal_server.etcd.records.assignment_mirror import AssignmentMirror
from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts
from shoal_server.parameters.cluster.server_directory import ServerDirectory
from shoal_server.parameters.images.shard_image import ShardImage
from shoal_server.parameters.journal.log import Journal
from shoal_server.parameters.journal.replay import RecoveredShard
from shoal_server.parameters.journal.shard_journal import ShardJournal
from shoal_server.parameters.replication.acknowledgements import Acknowledgements
from shoal_server.parameters.replication.comparing import Comparing
from shoal_server.parameters.replication.core_driver import CoreDriver
from shoal_server.parameters.replication.edges import ReplicationEdges
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
from shoal_server.parameters.tables.restore import restore
from shoal_server.serving.identify import answers
from shoal_server.serving.rpc import PEER_OPTIONS
from shoal_server.serving.tasks import SupervisedTasks, run_restarting

log = structlog.get_logger(__name__)


class ShardReplicas:
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
        self.directory = ServerDirectory(store, self._check_empty)
        self._record = AssignmentMirror(store, self._changed, self._record_gone)
        self.images = IncomingImages(driver, catalog=catalog, memory=memory, run=run)
        self._incoming = IncomingLinks()
        self.received = ReceivedUpdates(
            driver,
            catalog=catalog,
            memory=memory,
            run=run,
            is_coming=self.images.is_receiving,
            links=self._incoming,
        )
        links = OutgoingLinks(
            driver,
            me=self.me,
            catalog=catalog,
            directory=self.directory,
            run=run,
            timeouts=timeouts,
        )
        acknowledgements = Acknowledgements(driver, self.me)
        self._roles = ShardRoles(
            driver,
            catalog=catalog,
            images=self.images,
            acknowledgements=acknowledgements,
            links=links,
        )
        self._comparing = Comparing(catalog, links, run)
        self._tasks = SupervisedTasks()
        writer = RecordWriter(driver, self._record)
        self._parts = (self._tasks, writer, links, self.images, self.received, self._roles)
        self._edges = ReplicationEdges(
            links=links,
            received=self.received,
            images=self.images,
            roles=self._roles,
            acknowledgements=acknowledgements,
            writer=writer,
            observer=self,
        )
        driver.set_effect_handler(self._edges.carry_out)
        catalog.whereabouts = self
        self._empty = asyncio.Event()

    async def __aenter__(self) -> "ShardReplicas":
        await self.directory.__aenter__()
        await self._record.__aenter__()
        self._tasks.start(
            run_restarting(self._comparing.run_for_ever, "comparing"), name="comparing"
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._record.__aexit__(*exc)
        self._driver.close()
        for part in self._parts:
            await part.close()
        await self.directory.__aexit__(*exc)

    def servicer(self, offers: BulkOffers) -> ReplicationServicer:
        self._edges.servicer = ReplicationServicer(
            self._driver,
            me=self.me,
            received=self.received,
            links=self._incoming,
            timeouts=self._timeouts,
            offers=offers,
        )
        return self._edges.servicer

    def lease_renewed(self, sent_s: float) -> None:
        """Note a renewal of this server's registration. `sent_s`: time of the request, on the
        loop's clock."""
        self._driver.submit_event(ev.LeaseRenewed(sent_s))

    def lease_ended(self) -> None:
        """The registration is about to be removed: stop acknowledging pushes."""
        self._driver.submit_event(ev.LeaseEnded())

    async def wait_failed(self) -> None:
        await self._record.wait_failed()

    # --- known assignments, versions and routes ---

    @property
    def full_peers(self) -> Mapping[Holder, str]:
        """Servers without memory for backups, and their reasons."""
        return self._driver.core.leading.full.reasons

    def assignment(self, job: str, shard_id: int) -> ShardAssignment | None:
        """The newest assignment seen; None if there is none."""
        return self._record.of_job(job).get(shard_id)

    def versions(self, job: str, shard_id: int) -> Mapping[Holder, int]:
        """Confirmed version of each backup and of a joining server; empty if this server is not the
        primary."""
        led = self._driver.core.find_led((job, shard_id))
        followers = led.followers if led is not None else {}
        return {holder: follower.confirmed for holder, follower in followers.items()}

    def of_job(self, job: str) -> Mapping[int, ShardAssignment]:
        return self._record.of_job(job)

    def placement_id(self, job: str) -> str:
        """`JobAssignments.placement_id`; empty if no shards are placed."""
        return self._record.placement_id(job)

    def members_placement_id(self, job: str) -> str:
        """`JobAssignments.members_placement_id`; empty if no shards are placed."""
        return self._record.members_placement_id(job)

    @property
    def jobs(self) -> Iterator[str]:
        return self._record.jobs

    def route(self, job: str, shard_id: int) -> Route | None:
        """The route to a shard's primary, or its successor during a handover; None without a known
        address."""
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
        """The address of a shard's successor; empty if there is none or its address is unknown."""
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
        """See `AssignmentMirror.change_until_written`."""
        return await self._record.change_until_written(job, shard_ids, change)

    async def refresh(self, job: str, shard_ids: Collection[int] | None = None) -> None:
        """See `AssignmentMirror.refresh`."""
        await self._record.refresh(job, shard_ids)

    async def drop_stale_replicas(self, job: str) -> None:
        """Read the job's newest record, and drop the replicas whose epoch is earlier than the
        record's. Raises what the store raises."""
        await self._record.refresh(job)
        for replica in self._catalog.of_job(job):
            assignment = self.assignment(job, replica.shard_id)
            if assignment is not None and replica.epoch < assignment.epoch:
                self._driver.submit_event(ev.ShardRetired((job, replica.shard_id)))

    def _changed(self, job: str, shard_ids: Collection[int]) -> None:
        for shard_id in shard_ids:
            assignment = self.assignment(job, shard_id)
            self._driver.submit_event(
                ev.ShardAssigned((job, shard_id), assignment, self._record.placement_id(job))
            )
            if assignment is not None and assignment.on_disk == self.me.server_id:
                _log_if_older(job, assignment)
        self._trim_journal(job)

    def _record_gone(self, job: str) -> None:
        self.drop_job(job)
        for key in self._driver.core.keys_of(job):
            self._driver.submit_event(ev.ShardAssigned(key, None))
        self._trim_journal(job)

    # --- creating and dropping shards ---

    def created(self, replica: ShardReplica) -> None:
        """Lead a shard that this server has created or loaded. The shard takes pushes once the
        record says that it has values. If it is to have backups, they get the values before."""
        key = replica.job, replica.shard_id
        self._driver.submit_event(ev.ShardCreated(key, replica.epoch, replica.state.version))

    def replace(self, replica: ShardReplica) -> None:
        """Drop any other replica of the shard here, and lead this one."""
        self._driver.submit_event(ev.ShardRetired((replica.job, replica.shard_id)))
        self._catalog.add(replica)
        self.created(replica)

    async def empty_job(self, job: str) -> None:
        """Note in the record that shards led here have no values, so that they do not count as
        lost. Then drop the job's replicas here. Raises what `change_assignments` raises, with no
        replica dropped."""
        shard_ids = [replica.shard_id for replica in self._catalog.of_job(job)]
        await self.change_assignments(job, shard_ids, partial(mark_empty, primary=self.me))
        self.drop_job(job)

    def drop_job(self, job: str) -> None:
        shards = self._catalog.of_job(job)
        for replica in shards:
            self._driver.submit_event(ev.ShardRetired((job, replica.shard_id)))
        log.info("shards_dropped", job=job, num_shards=len(shards))

    async def wait_empty(self) -> None:
        """Return once this server has no shard in memory and its disk keeps none for another
        primary, or once every other server is leaving."""
        self._check_empty()
        await self._empty.wait()

    @property
    def sole_copies(self) -> Mapping[str, Sequence[int]]:
        """Ids, by job, of the shards that this server leads with no copy in a backup or a
        journal."""
        shard_ids: dict[str, list[int]] = {}
        for replica in self._catalog.shards():
            assignment = self.assignment(replica.job, replica.shard_id)
            is_led = assignment is not None and assignment.primary == self.me
            if is_led and assignment and not assignment.backups and not assignment.on_disk:
                shard_ids.setdefault(replica.job, []).append(replica.shard_id)
        return shard_ids

    def _check_empty(self) -> None:
        shard_journal = self._roles.shard_journal
        is_bare = next(self._catalog.shards(), None) is None
        # What only this disk has must be on another disk first.
        is_bare = is_bare and (shard_journal is None or not shard_journal.keeps_for_others)
        if is_bare or not self.directory.has_others(self.me):
            self._empty.set()
        else:
            self._empty.clear()

    # --- the disk ---

    @asynccontextmanager
    async def shard_journal(self, journal: Journal, pool: Executor) -> AsyncIterator[ShardJournal]:
        async with ShardJournal(
            journal,
            pool,
            take=self._take,
            make=restore,
            on_disk=self._on_disk,
            on_failure=self._disk_failed,
        ) as shard_journal:
            self._roles.shard_journal = shard_journal
            self._driver.core.leading.keeps_journal = True
            try:
                yield shard_journal
            finally:
                self._roles.shard_journal = None

    async def _take(self, replica: ShardReplica) -> ShardImage:
        return await replica.run_in_order(self._run, replica.state.memory_bytes, replica.image)

    def _on_disk(self, replica: ShardReplica, version: int) -> None:
        if not replica.is_led:
            return  # Dropped while its data were written.
        self._driver.submit_event(ev.VersionJournaled((replica.job, replica.shard_id), version))

    def _disk_failed(self, replica: ShardReplica) -> None:
        self._driver.submit_event(ev.VersionJournaled((replica.job, replica.shard_id), None))

    def is_kept(self, job: str, shard_id: int) -> bool:
        """True if this server's journal may have the shard, which this server does not lead."""
        shard_journal = self._roles.shard_journal
        return shard_journal is not None and shard_journal.keeps(job, shard_id)

    def adopt_journaled(self, recovered: Mapping[Key, RecoveredShard[AnyShard]]) -> None:
        """Report shards in the journal to the core, and keep in memory those that it may claim."""
        shard_journal = self._roles.shard_journal
        assert shard_journal is not None
        shard_journal.keep(recovered)
        known = set(self.jobs)
        foreign = {
            k
            for k, f in recovered.items()
            if f.is_of_another_placement(self._record.placement_id(k[0]))
        }
        # Shards of other placements or unknown jobs stay on disk, to be read later.
        self._roles.recovered.update(
            {k: shard for k, shard in recovered.items() if k[0] in known and k not in foreign}
        )
        for key, shard in recovered.items():
            if key in foreign:
                _log_foreign(key, shard.placement_id, self._record.placement_id(key[0]))
                # Version 0 stands for a shard of another placement: it is never led, and the record
                # says that this journal is not the right one (`record_older_copy`).
                self._driver.submit_event(ev.JournalShardFound(key, 0, 0))
            else:
                self._driver.submit_event(
                    ev.JournalShardFound(key, shard.epoch, shard.state.version)
                )
        for job in {job for job, _ in recovered}:
            if job in known:
                self._trim_journal(job)
            else:
                # The job may be over, or this may be the wrong etcd.
                log.warning("journal_has_unknown_job", job=job)

    @property
    def in_journal(self) -> Collection[Key]:
        shard_journal = self._roles.shard_journal
        return () if shard_journal is None else shard_journal.all_keys

    @property
    def has_lost_disk(self) -> bool:
        """True if the journal's disk cannot be written: another process may use the disk, and may
        have written newer shards."""
        shard_journal = self._roles.shard_journal
        return shard_journal is not None and shard_journal.failure is not None

    @property
    def open_claims(self) -> Collection[Key]:
        """Shards in the journal that are not led from it, perhaps because another server has a
        newer copy."""
        return self._driver.core.open_claims

    def servers_seen(
        self, present: frozenset[Holder], asked_s: float, ended: frozenset[Holder]
    ) -> None:
        """`asked_s`: time of the request to etcd, on the loop's clock."""
        self._driver.submit_event(ev.ServersListed(present, asked_s, ended))

    def _trim_journal(self, job: str) -> None:
        """Remove shards from the journal that the record does not allow on this disk. Free
        recovered shards that are not to be claimed."""
        shard_journal = self._roles.shard_journal
        if shard_journal is not None and shard_journal.keeps_for_others:
            known = self._record.of_job(job).items()
            mine = {shard_id for shard_id, a in known if may_be_put_on_disk(a, self.me)}
            shard_journal.release_job(job, but=mine)
            claimed = set(self.open_claims)
            for key in [k for k in self._roles.recovered if k not in claimed]:
                del self._roles.recovered[key]
        self._check_empty()

    # --- primaries ---

    def probe_peer(self, effect: ProbePeer) -> None:
        self._tasks.start(self._ask(effect.peer))

    def log_line(self, effect: LogLine) -> None:
        fields: dict[str, object] = {}
        if effect.key is not None:
            fields["job"], fields["shard_id"] = effect.key
        if effect.peer is not None:
            fields["server"] = effect.peer.server_id
        if effect.detail:
            fields["why"] = effect.detail
        log.warning(effect.what, **fields)

    async def _ask(self, peer: Holder) -> None:
        try:
            address = await self.directory.find_address(peer)
        except RetryError as error:
            log.warning("server_not_looked_up", server=peer.server_id, reason=str(error))
            address = None
        is_there = address is not None and await answers(
            peer, address, options=PEER_OPTIONS, within_s=self._timeouts.silence_s / 2
        )
        self._driver.submit_event(ev.PeerProbed(peer, is_there))


def _log_if_older(job: str, assignment: ShardAssignment) -> None:
    if assignment.found_version and assignment.content is not ShardContent.LOST:
        log.error(
            "journal_outdated",
            job=job,
            shard_id=assignment.shard_id,
            seen=f"version {assignment.found_version}",
            expected=f"at least version {assignment.disk_version} of epoch {assignment.disk_epoch}",
            fix="Stop this server, put the newest copy of its journal back, and start it again.",
        )


def _log_foreign(key: Key, seen: str, expected: str) -> None:
    log.error(
        "journal_is_of_another_run",
        job=key[0],
        shard_id=key[1],
        seen=f"a shard of placement {seen}",
        expected=f"a shard of placement {expected}",
        fix="Is this journal another cluster's, or older than the job's last start or restore? Stop"
        " this server, put its own journal back, and start it again.",
    )
