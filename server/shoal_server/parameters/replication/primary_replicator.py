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
    ShardAssignment,
    ShardContent,
    filled,
    in_step,
    without_backup,
)
from shoal_server.parameters.cluster.assignment_table import AssignmentTable
from shoal_server.parameters.cluster.full_peers import FullPeers
from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts
from shoal_server.parameters.cluster.server_directory import ServerDirectory
from shoal_server.parameters.cuts.shard_cut import ShardCut
from shoal_server.parameters.journal.shard_journal import ShardJournal
from shoal_server.parameters.replication.replication_stream import ReplicationStream
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.image import Image, UpdateRecord
from shoal_server.parameters.shard.replica import Role, ShardReplica, num_bytes_of
from shoal_server.parameters.shard.workers import Runner
from shoal_server.serving.tasks import SupervisedTasks

log = structlog.get_logger(__name__)


class PrimaryReplicator:
    """Lives on the event loop. For the shards that this server leads, it makes the record's backups
    and joiners follow, writes down who is in step, and takes out who is lost."""

    def __init__(
        self,
        me: Holder,
        *,
        record: AssignmentTable,
        catalog: Catalog,
        directory: ServerDirectory,
        run: Runner,
        timeouts: PeerTimeouts,
    ) -> None:
        self._me = me
        self._record = record
        self._catalog = catalog
        self._directory = directory
        self._run = run
        self._timeouts = timeouts
        self._tasks = SupervisedTasks()
        self._streams: dict[Holder, ReplicationStream] = {}
        self._full = FullPeers(timeouts.full_s, self._offer_again)
        self._level: dict[str, dict[tuple[int, Holder], object]] = defaultdict(dict)
        """Joiners that have their shard: each time one gets there, by a token of its own."""
        self._formed: dict[str, set[ShardReplica]] = defaultdict(set)
        """By job: shards with first values, of which the record does not tell yet."""
        self._loop = asyncio.get_running_loop()
        self.shard_journal: ShardJournal | None = None
        """The disk, as one more that has copies."""

    async def close(self) -> None:
        self._full.close()
        await self._tasks.close()
        for stream in list(self._streams.values()):
            await stream.close()

    def tell(self, replica: ShardReplica, record: UpdateRecord) -> None:
        """A push was applied. From any thread, within the shard's lock: so the loop gets them in
        order."""
        replica.pushed_bytes += num_bytes_of(record)
        if self._streams or self.shard_journal is not None:
            self._loop.call_soon_threadsafe(self._pass_on, replica, record)

    def _pass_on(self, replica: ShardReplica, record: UpdateRecord) -> None:
        for stream in self._streams.values():
            stream.tell(replica, record)
        if self.shard_journal is not None:
            self.shard_journal.tell(replica, record)

    def follow_as_written(self, replica: ShardReplica, assignment: ShardAssignment) -> None:
        """Make exactly those follow a shard, and count, whom the record names."""
        joining = assignment.joining
        is_put_off = joining is not None and self._is_put_off(replica, joining)
        wanted = assignment.backups if is_put_off else assignment.holders[1:]
        for holder, stream in self._streams.items():
            if holder not in wanted and stream.follows(replica):
                stream.unfollow(replica.job, replica.shard_id)
        for holder in wanted:
            stream = self._stream_to(holder)
            if not stream.follows(replica):
                stream.follow(replica)
        # One that is level counts before the record says so: then nothing is acknowledged that
        # it has not, by the time it may take over.
        level = self._level[replica.job]
        counted = [joining] if joining and (replica.shard_id, joining) in level else []
        replica.receipts.require([*assignment.backups, *counted])
        safe = replica.receipts.safe_version
        is_alone = joining is None or is_put_off
        if not replica.is_forming or not is_alone or safe == 0:
            return
        if assignment.content is ShardContent.PRESENT:
            replica.is_forming = False
            self._tasks.start(self._catalog.notify(), key=("notify", replica))
        else:
            self._formed[replica.job].add(replica)
            self._tasks.start(self._fill(replica.job), key=("fill", replica.job))

    async def _fill(self, job: str) -> None:
        """Write down that shards have values, before anybody sees them or pushes to them: for as
        many at once as there are by then."""
        while formed := self._formed.pop(job, None):
            by_shard = {replica.shard_id: replica for replica in formed}
            await self._record.change(job, by_shard, partial(self._filled, by_shard))

    def _filled(
        self, formed: Mapping[int, ShardReplica], assignment: ShardAssignment
    ) -> ShardAssignment:
        replica = formed[assignment.shard_id]
        if (
            replica.role is not Role.PRIMARY
            or self._catalog.find(replica.job, replica.shard_id) is not replica
        ):
            return assignment
        return filled(assignment, primary=self._me, epoch=replica.epoch)

    def connect(self, holder: Holder) -> None:
        """It is to follow shards from here soon: pushes will wait for it, and not for a stream."""
        self._stream_to(holder)

    def let_go(self, replica: ShardReplica) -> None:
        """Nobody follows the shard from here any more."""
        for stream in self._streams.values():
            if stream.follows(replica):
                stream.unfollow(replica.job, replica.shard_id)

    def forget(self, job: str) -> None:
        """The job's record is gone."""
        self._level.pop(job, None)
        self._formed.pop(job, None)

    def _stream_to(self, to: Holder) -> ReplicationStream:
        stream = self._streams.get(to)
        if stream is None:
            stream = self._streams[to] = ReplicationStream(
                self._me, to, self, self.take, self._timeouts
            )
            stream.start()
        return stream

    async def take(self, replica: ShardReplica) -> Image:
        """A shard's image, without holding up the event loop."""
        return await replica.in_turn(self._run, replica.state.memory_bytes, replica.state.image)

    async def cut(self, replica: ShardReplica) -> ShardCut:
        """A shard as it is now, without holding up the event loop. To be closed."""
        return await replica.in_turn(self._run, replica.state.memory_bytes, replica.state.cut)

    # What links report.

    async def address(self, holder: Holder) -> str | None:
        return await self._directory.reach(holder)

    def caught_up(self, stream: ReplicationStream, replica: ShardReplica) -> None:
        self._full.took(stream.to)
        assignment = self._record.assignment(replica.job, replica.shard_id)
        if assignment is None or assignment.primary != self._me or replica.role is not Role.PRIMARY:
            return
        if assignment.joining == stream.to:
            self._level[replica.job][replica.shard_id, stream.to] = object()
            self._tasks.start(self._admit(replica.job), key=("admit", replica.job))
        self.follow_as_written(replica, assignment)

    async def _admit(self, job: str) -> None:
        """Write down who is in step, for as many shards at once as there are by then."""
        level = self._level[job]
        while ready := dict(level):
            shard_ids = {shard_id for shard_id, _ in ready}
            for shard_id in shard_ids:
                await self._draw_level(job, shard_id)
            await self._record.change(job, shard_ids, partial(self._admitted, job, ready))
            for joiner, token in ready.items():
                if level.get(joiner) is token:
                    del level[joiner]
            for shard_id in shard_ids:
                self._recount(job, shard_id)

    async def _draw_level(self, job: str, shard_id: int) -> None:
        """Pushes that were acknowledged before the joiner counted must have reached it too."""
        replica = self._catalog.find(job, shard_id)
        if replica is not None and replica.role is Role.PRIMARY:
            # Where the shard has another primary now, the change of the record changes nothing.
            with suppress(WrongEpoch):
                await replica.receipts.wait_safe(replica.state.version)

    def _admitted(
        self,
        job: str,
        ready: Mapping[tuple[int, Holder], object],
        assignment: ShardAssignment,
    ) -> ShardAssignment:
        joining = assignment.joining
        if joining is None:
            return assignment
        joiner = assignment.shard_id, joining
        # One that was lost meanwhile may be level once more: that is another time.
        if joiner not in ready or self._level[job].get(joiner) is not ready[joiner]:
            return assignment
        return in_step(assignment, primary=self._me, joined=joining)

    def _recount(self, job: str, shard_id: int) -> None:
        """One that the record does not list after all counts no longer."""
        replica = self._catalog.find(job, shard_id)
        assignment = self._record.assignment(job, shard_id)
        leads = replica is not None and replica.role is Role.PRIMARY
        if (
            replica is not None
            and leads
            and assignment is not None
            and assignment.primary == self._me
        ):
            self.follow_as_written(replica, assignment)

    def refused(self, stream: ReplicationStream, replica: ShardReplica, error: ShoalError) -> None:
        if isinstance(error, Overloaded):
            self._full.refused(stream.to, error)
            for other in self._waiting_for(stream):
                stream.unfollow(other.job, other.shard_id)
                self._give_up(stream.to, other)
        else:
            log.warning("copy_refused", job=replica.job, shard_id=replica.shard_id, why=str(error))
        self._give_up(stream.to, replica)

    def _give_up(self, holder: Holder, replica: ShardReplica) -> None:
        work = self._go_on_without(holder, replica.job, [replica.shard_id])
        self._tasks.start(work, key=("refused", replica, holder))

    def _waiting_for(self, stream: ReplicationStream) -> list[ShardReplica]:
        """Shards that the other end is to get, and that were not sent yet. Once they are out of
        the record, the coordinator may give them to a server that has room."""
        return [
            replica
            for replica in stream.shards
            if not stream.is_sending(replica)
            and (assignment := self._record.assignment(replica.job, replica.shard_id)) is not None
            and (assignment.joining, assignment.primary) == (stream.to, self._me)
        ]

    @property
    def full_peers(self) -> Mapping[Holder, str]:
        """Servers that have no memory for more copies, and what they said."""
        return self._full.reasons

    def _is_put_off(self, replica: ShardReplica, joining: Holder) -> bool:
        """Whether a joiner is not sent a shard for now, because it had no room for others."""
        stream = self._streams.get(joining)
        return self._full.is_full(joining) and (stream is None or not stream.is_sending(replica))

    def _offer_again(self, holder: Holder) -> bool:
        """Send it what it is still to get; whether there is anything."""
        wanted = [
            (job, shard_id)
            for job in self._record.jobs
            for shard_id, assignment in self._record.of_job(job).items()
            if (assignment.joining, assignment.primary) == (holder, self._me)
        ]
        for job, shard_id in wanted:
            self._recount(job, shard_id)
        return bool(wanted)

    def lost(self, stream: ReplicationStream, reason: str) -> None:
        self._streams.pop(stream.to, None)
        self._full.forget(stream.to)
        jobs = frozenset(replica.job for replica in stream.end())
        if jobs:
            log.warning("backup_lost", server=stream.to.server_id, reason=reason)
        self._tasks.start(self._lost(stream.to, jobs), key=("lost", stream.to, jobs))

    async def _lost(self, lost: Holder, jobs: Collection[str]) -> None:
        for job in jobs:
            mine = [i for i, h in self._record.of_job(job).items() if h.primary == self._me]
            await self._go_on_without(lost, job, mine)

    async def _go_on_without(self, lost: Holder, job: str, shard_ids: Collection[int]) -> None:
        for shard_id in shard_ids:
            self._level[job].pop((shard_id, lost), None)
        change = partial(without_backup, primary=self._me, lost=lost)
        await self._record.change(job, shard_ids, change)
