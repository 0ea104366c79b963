"""Check in etcd that this coordinator still leads, shared by many callers."""

import asyncio

from shoal_server.etcd.leader_store import LeaderStore


class LeadingCheck:
    """Check that this coordinator leads. One read of etcd serves all callers that wait for it."""

    def __init__(self, store: LeaderStore) -> None:
        self._store = store
        self._current: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def confirm(self) -> None:
        """Return once a read that began after this call has shown that this coordinator leads.

        Raises NotLeader, and RetryError if etcd does not answer.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._read_after(self._current), name="leading-check")
            # Retrieves the error even if no caller waits any more.
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._next)

    async def _read_after(self, previous: "asyncio.Task[None] | None") -> None:
        if previous is not None:
            await asyncio.wait([previous])
        self._current, self._next = self._next, None
        await self._store.confirm()
