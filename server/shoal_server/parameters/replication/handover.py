"""Giving shards that are led here to the successors that the record names, one pause for each.

A push that comes while a shard is handed over is sent on to the successor at once, which keeps it
waiting until it leads the shard. So the pause is as long as the change of the record takes.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from shoal_proto.errors import WrongEpoch
from shoal_server.core.shards.assignments import Holder, handed_over
from shoal_server.parameters.cluster.assignment_table import AssignmentTable
from shoal_server.parameters.shard.replica import Role, ShardReplica
from shoal_server.serving.tasks import SupervisedTasks


class ShardHandover:
    """Lives on the event loop."""

    def __init__(self, me: Holder, record: AssignmentTable) -> None:
        self._me = me
        self._record = record
        self._tasks = SupervisedTasks()
        self._level: dict[str, list[ShardReplica]] = defaultdict(list)
        """By job: those that stopped, and whose backups have all that was applied."""

    async def close(self) -> None:
        await self._tasks.close()

    def begin(self, replica: ShardReplica) -> None:
        """The record names a successor."""
        if not replica.is_handing_over:
            self._tasks.start(self._stop(replica), key=replica)

    async def _stop(self, replica: ShardReplica) -> None:
        """Apply nothing more, and let every backup draw level."""
        try:
            # Once while pushes still come: then there is little to wait for when none do.
            await replica.receipts.wait_safe(replica.state.version)
            if not self._is_wanted(replica):
                return
            replica.is_handing_over = True
            # From here on pushes of this epoch are refused; the next one is the successor's.
            replica.state.enter_epoch(replica.epoch + 1)
            await replica.receipts.wait_safe(replica.state.version)
        except WrongEpoch:
            return  # Somebody else leads it already.
        self._level[replica.job].append(replica)
        self._tasks.start(self._write(replica.job), key=replica.job)

    def _is_wanted(self, replica: ShardReplica) -> bool:
        assignment = self._record.assignment(replica.job, replica.shard_id)
        return (
            replica.role is Role.PRIMARY
            and assignment is not None
            and (assignment.primary, assignment.epoch) == (self._me, replica.epoch)
            and assignment.successor is not None
        )

    async def _write(self, job: str) -> None:
        """Change places with the successors, of as many shards at once as are level by then."""
        while level := self._level.pop(job, None):
            # Those that were told to go together draw level in one go.
            await asyncio.sleep(0)
            level += self._level.pop(job, [])
            shard_ids = [replica.shard_id for replica in level]
            change = partial(handed_over, primary=self._me)
            try:
                await self._record.change(job, shard_ids, change)
            finally:
                # Also where the record could not be changed: nobody else leads them then.
                self._go_on(level)

    def _go_on(self, level: Sequence[ShardReplica]) -> None:
        """Where the successor was lost meanwhile, lead as before."""
        for replica in level:
            assignment = self._record.assignment(replica.job, replica.shard_id)
            leads = replica.role is Role.PRIMARY and assignment is not None
            if leads and assignment is not None and assignment.epoch == replica.epoch:
                replica.state.enter_epoch(replica.epoch)
                replica.is_handing_over = False
