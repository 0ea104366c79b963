"""The question whether this coordinator still leads, asked of etcd for many callers at once."""

import asyncio

from shoal_server.etcd.leader_store import LeaderStore


class LeadingCheck:
    """Check that this coordinator leads. One read of etcd at a time serves all earlier callers."""

    def __init__(self, store: LeaderStore) -> None:
        self._store = store
        self._current: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def confirm(self) -> None:
        """Return once etcd has said that this coordinator leads, at a time after this was called.

        Raises NotLeader, and RetryError if etcd does not say.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._ask_after(self._current), name="leading-check")
            # Whoever has asked may wait no longer.
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._next)

    async def _ask_after(self, before: "asyncio.Task[None] | None") -> None:
        if before is not None:
            await asyncio.wait([before])
        self._current, self._next = self._next, None
        await self._store.confirm()
