"""Automatic restores of jobs with lost shards from their snapshots."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from shoal_proto.errors import NoServers, NothingLost, RetryError, ShoalError
from shoal_server.core.shards.assignments import ShardAssignment
from shoal_server.core.shards.losses import RestoreAttempt
from shoal_server.serving.tasks import SupervisedTasks

log = structlog.get_logger(__name__)

RESTORES_AT_ONCE = 4
RESTORE_AGAIN_S = 5.0
REPORTED_AFTER_S = 30.0
"""Duration of a restore after which its shards are reported lost."""


Restore = Callable[[str, Sequence[ShardAssignment]], Awaitable[RestoreAttempt]]
"""Called with (job, lost shards). Raises NothingLost if no shard of the job is lost any more."""


class AutomaticRestores:
    """Restores of jobs, at most four at a time, on one event loop."""

    def __init__(
        self,
        restore: Restore | None,
        on_news: Callable[[str], None],
        is_restoring: Callable[[str], bool] = lambda job: False,
    ) -> None:
        """`on_news` is called with a job if its `outcome` may have changed. `is_restoring`: True
        while this coordinator restores the job for any reason."""
        self.is_restoring = is_restoring
        self._restore = restore
        self._on_news = on_news
        self._tasks = SupervisedTasks()
        self._slots = asyncio.Semaphore(RESTORES_AT_ONCE)
        self._wanted: dict[str, RestoreAttempt | None] = {}

    def outcome(self, job: str, lost: Sequence[ShardAssignment]) -> RestoreAttempt | None:
        """Reason why the job is not restored (empty without `restore`); None if none is known.

        The first call starts the restore, which is retried until `forget` if storage, etcd or
        servers cannot be reached. A restore in progress may have a reason, too. `lost`: the records
        of the lost shards. The restore changes nothing if it finds that all of these have changed,
        and that no shard of the job is recorded as lost.
        """
        if self._restore is None:
            return RestoreAttempt(is_restored=False)
        if job not in self._wanted:
            self._wanted[job] = None
            self._tasks.start(self._attempt(job, lost, self._restore), key=job)
            asyncio.get_running_loop().call_later(REPORTED_AFTER_S, self._note_slow, job)
        return self._wanted[job]

    def forget(self, job: str) -> None:
        """Drop a job without lost shards; no further restore follows."""
        self._wanted.pop(job, None)

    async def close(self) -> None:
        await self._tasks.close()
        self._wanted.clear()

    def _note_slow(self, job: str) -> None:
        if job in self._wanted and self._wanted[job] is None:
            self._note(job, "Its restore is still in progress.")

    def _note(self, job: str, why: str) -> None:
        if job in self._wanted:
            self._wanted[job] = RestoreAttempt(is_restored=False, reason=why)
            self._on_news(job)

    async def _attempt(self, job: str, lost: Sequence[ShardAssignment], restore: Restore) -> None:
        while job in self._wanted:
            try:
                async with self._slots:
                    if job not in self._wanted:
                        return
                    attempt = await restore(job, lost)
            except NothingLost as error:
                log.info("lost_shards_not_restored", job=job, reason=str(error))
                self.forget(job)
                # A shard may have been lost since: then another restore begins.
                self._on_news(job)
                return
            except (RetryError, NoServers) as error:
                log.warning("lost_shards_not_restored", job=job, reason=str(error))
                self._note(job, f"Its restore is retried: {error}.")
                await asyncio.sleep(RESTORE_AGAIN_S)
            except ShoalError as error:
                log.error("lost_shards_not_restored", job=job, reason=str(error))
                self._note(job, f"Its restore failed: {error}.")
                return
            else:
                if attempt.is_restored:
                    self.forget(job)
                    self._on_news(job)
                else:
                    self._note(job, attempt.reason)
                return
