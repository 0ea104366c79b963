"""A backup's side of copies: whether its primaries live, and taking over from one that does not."""

import asyncio
from collections import defaultdict
from collections.abc import Collection
from functools import partial

import structlog

from shoal_server.core.shards.assignments import Holder, ShardAssignment, promoted
from shoal_server.parameters.cluster.assignment_table import AssignmentTable
from shoal_server.parameters.cluster.peer_timeouts import PEER_OPTIONS, PeerTimeouts
from shoal_server.parameters.cluster.server_directory import ServerDirectory
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.serving.identify import answers
from shoal_server.serving.tasks import SupervisedTasks

log = structlog.get_logger(__name__)


class PrimaryFailureDetector:
    """Lives on the event loop. Every primary of which this server is a backup has a stream to here;
    one that has not, and does not answer either, is succeeded."""

    def __init__(
        self,
        me: Holder,
        *,
        record: AssignmentTable,
        catalog: Catalog,
        directory: ServerDirectory,
        timeouts: PeerTimeouts,
    ) -> None:
        self._me = me
        self._record = record
        self._catalog = catalog
        self._directory = directory
        self._timeouts = timeouts
        self._tasks = SupervisedTasks()
        self._streams: dict[Holder, int] = defaultdict(int)

    async def close(self) -> None:
        await self._tasks.close()

    def stream_opened(self, primary: Holder) -> None:
        self._streams[primary] += 1

    def stream_ended(self, primary: Holder) -> None:
        self._streams[primary] -= 1
        if not self._streams[primary]:
            del self._streams[primary]
        for job in self._record.jobs:
            self.look(job, self._record.of_job(job))

    def look(self, job: str, shard_ids: Collection[int]) -> None:
        """See after every primary of these shards of the job that is silent."""
        for shard_id in shard_ids:
            assignment = self._record.assignment(job, shard_id)
            if (
                assignment is not None
                and self._me in assignment.backups
                and assignment.primary not in self._streams
            ):
                self._tasks.start(self._see_after(assignment.primary), key=assignment.primary)

    async def _see_after(self, primary: Holder) -> None:
        """Return once its stream is there, or this server is its backup no longer; else, once it
        does not answer, take over from it."""
        while primary not in self._streams and (jobs := self._backed(primary)):
            if await self._answers(primary):
                await asyncio.sleep(self._timeouts.beat_s)
                continue
            for job in jobs:
                # It may have come back while it was waited for, or while etcd was.
                if primary in self._streams:
                    break
                log.warning("primary_lost", server=primary.server_id, job=job)
                shard_ids = self._backed_of(primary, job)
                await self._record.change(job, shard_ids, partial(self._taken_over, primary, job))

    def _taken_over(
        self, primary: Holder, job: str, assignment: ShardAssignment
    ) -> ShardAssignment:
        """The shard led by this server, if it has a copy now, and not only when it first looked."""
        if self._catalog.find(job, assignment.shard_id) is None:
            return assignment
        return promoted(assignment, lost=primary, backup=self._me)

    def _backed(self, primary: Holder) -> list[str]:
        """Jobs with shards of that primary of which this server has a copy in step."""
        return [job for job in self._record.jobs if self._backed_of(primary, job)]

    def _backed_of(self, primary: Holder, job: str) -> list[int]:
        return [
            shard_id
            for shard_id, h in self._record.of_job(job).items()
            if h.primary == primary
            and self._me in h.backups
            and self._catalog.find(job, shard_id) is not None
        ]

    async def _answers(self, holder: Holder) -> bool:
        """Whether that very process answers at its address."""
        address = await self._directory.reach(holder)
        if address is None:
            return False
        within_s = self._timeouts.silence_s / 2
        return await answers(holder, address, options=PEER_OPTIONS, within_s=within_s)
