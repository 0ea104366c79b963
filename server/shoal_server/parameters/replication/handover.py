"""Giving shards that are led here to the successors that the record names, one pause for each.

A push that comes while a shard is handed over is sent on to the successor at once, which keeps it
waiting until it leads the shard. So the pause is as long as the change of the record takes.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from shoal_proto.errors import WrongEpoch
from shoal_server.core.shards.assignments import Holder, Holdings, handed_over
from shoal_server.parameters.cluster.assignment_table import RecordOfHolders
from shoal_server.parameters.cluster.background import Background
from shoal_server.parameters.shard.replica import Held, Role


class HandingOver:
    """Lives on the event loop."""

    def __init__(self, me: Holder, record: RecordOfHolders) -> None:
        self._me = me
        self._record = record
        self._background = Background()
        self._level: dict[str, list[Held]] = defaultdict(list)
        """By job: those that stopped, and whose backups have all that was applied."""

    async def close(self) -> None:
        await self._background.close()

    def begin(self, held: Held) -> None:
        """The record names a successor."""
        if not held.is_handing_over:
            self._background.start(held, self._stop(held))

    async def _stop(self, held: Held) -> None:
        """Apply nothing more, and let every backup draw level."""
        try:
            # Once while pushes still come: then there is little to wait for when none do.
            await held.receipts.wait_safe(held.state.version)
            if not self._is_wanted(held):
                return
            held.is_handing_over = True
            # From here on pushes of this epoch are refused; the next one is the successor's.
            held.state.enter_epoch(held.epoch + 1)
            await held.receipts.wait_safe(held.state.version)
        except WrongEpoch:
            return  # Somebody else leads it already.
        self._level[held.job].append(held)
        self._background.start(held.job, self._write(held.job))

    def _is_wanted(self, held: Held) -> bool:
        holding = self._record.holding(held.job, held.shard_id)
        return (
            held.role is Role.PRIMARY
            and holding is not None
            and (holding.primary, holding.epoch) == (self._me, held.epoch)
            and holding.successor is not None
        )

    async def _write(self, job: str) -> None:
        """Change places with the successors, of as many shards at once as are level by then."""
        while level := self._level.pop(job, None):
            # Those that were told to go together draw level in one go.
            await asyncio.sleep(0)
            level += self._level.pop(job, [])
            shard_ids = [held.shard_id for held in level]
            change = partial(handed_over, primary=self._me)
            try:
                await self._record.change(
                    job, partial(Holdings.changed, shard_ids=shard_ids, change=change)
                )
            finally:
                # Also where the record could not be changed: nobody else leads them then.
                self._go_on(level)

    def _go_on(self, level: Sequence[Held]) -> None:
        """Where the successor was lost meanwhile, lead as before."""
        for held in level:
            holding = self._record.holding(held.job, held.shard_id)
            leads = held.role is Role.PRIMARY and holding is not None
            if leads and holding is not None and holding.epoch == held.epoch:
                held.state.enter_epoch(held.epoch)
                held.is_handing_over = False


__all__ = ["HandingOver"]
