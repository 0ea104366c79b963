"""Log of lost, restored and moved shards."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping

import structlog

from shoal_server.core.processes import Holder
from shoal_server.core.shards import losses, moves
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment, ShardContent
from shoal_server.serving.unix_clock import unix_s

log = structlog.get_logger(__name__)

QUIET_S = 2.0
"""Time without a move after which moves are reported."""
AT_MOST_S = 20.0
"""Maximum time from the first move to the report."""

RecordEvent = Callable[[str, str, str], object]
"""Called with (job, kind, reason)."""


def _discard(job: str, kind: str, reason: str) -> None:
    """Drop the event."""


class LossLog:
    """Reports lost, restored and moved shards to the log and to `on_event`, and keeps each shard's
    newest reported version. Lives on a leader's event loop."""

    def __init__(self, on_event: RecordEvent = _discard) -> None:
        self._on_event = on_event
        self._moves = MoveLog(lambda job, message: self._note(job, "shards_moved", message))
        self._versions: dict[str, dict[int, int]] = {}

    def measured(self, job: str, versions: Mapping[int, int]) -> None:
        """Record the versions that servers reported."""
        self._versions.setdefault(job, {}).update(versions)

    def versions(self, job: str) -> Mapping[int, int]:
        """Newest reported version of each shard."""
        return self._versions.get(job, {})

    def forget(self, job: str, shard_ids: Collection[int] | None = None) -> None:
        """Drop what is known of a job; with `shard_ids`, only these shards' versions."""
        if shard_ids is None:
            self._moves.forget(job)
        known = self._versions.get(job, {})
        for shard_id in tuple(known) if shard_ids is None else shard_ids:
            known.pop(shard_id, None)
        if not known:
            self._versions.pop(job, None)

    def _note(self, job: str, kind: str, message: str) -> None:
        log.info(kind, job=job, reason=message)
        self._on_event(job, kind, message)

    def with_loss_details(
        self, before: JobAssignments, after: JobAssignments, snapshot: str
    ) -> JobAssignments:
        """Return `after` with details of each lost shard. `snapshot`: outcome of a restore."""
        known = self.versions(before.job)
        return losses.with_losses(before, after, known, snapshot, unix_s())

    def log_changes(
        self,
        before: JobAssignments | None,
        after: JobAssignments,
        present: Collection[Holder] = (),
    ) -> None:
        """Report the changes from `before` to `after`; without `before`, the lost shards.
        `present`: the registered servers."""
        if before is None:
            if lost := losses.lost(after):
                self._lost(after.job, lost)
            return
        changed = [
            (old, new)
            for old, new in zip(before.shards, after.shards, strict=False)
            if old.shard_id == new.shard_id and old.content is not new.content
        ]
        for kind, message in moves.changes_between(before, after, present):
            self._note(after.job, kind, message)
        self._moves.add(after.job, moves.moved(before, after, present))
        lost = [new for _, new in changed if new.content is ShardContent.LOST]
        recovered = [
            (old, new)
            for old, new in changed
            if old.content is ShardContent.LOST and new.content is ShardContent.PRESENT
        ]
        if lost:
            self._lost(after.job, lost)
        if recovered:
            servers = ", ".join(sorted({new.primary.server_id for _, new in recovered}))
            message = losses.shards_in_short(old for old, _ in recovered)
            self._restored(after.job, f"{message}: recovered from the journal of {servers}")

    def record_acceptance(
        self, job: str, shards: Collection[ShardAssignment], by: str, samples: str
    ) -> None:
        """Report that an operator gave up these shards. `samples`: what becomes of the samples."""
        self.forget(job, [shard.shard_id for shard in shards])
        message = f"the loss of {losses.shards_in_short(shards)} was accepted by {by}"
        log.warning(
            "loss_accepted",
            job=job,
            by=by,
            shards=losses.shards_in_short(shards),
            samples=samples,
        )
        message = f"{message}; a worker may create them with initial values; {samples}"
        self._on_event(job, "loss_accepted", message)

    def restored(self, job: str, shards: Collection[ShardAssignment], snapshot: str) -> None:
        """Report that the job was restored from a snapshot; `shards` had been lost."""
        losses_note = f" ({losses.shards_in_short(shards)} had been lost)" if shards else ""
        self._restored(job, f"all shards are as of {snapshot}{losses_note}")

    def _lost(self, job: str, shards: Collection[ShardAssignment]) -> None:
        listed = losses.shards_in_short(shards)
        log.error("shards_lost", job=job, num_shards=len(shards), shards=listed)
        cure = losses.recovery_advice(job, next(iter(shards)))
        message = f"{listed}: the last server that held them is gone. {cure}"
        self._on_event(job, "shards_lost", message)

    def _restored(self, job: str, reason: str) -> None:
        log.warning("shards_restored", job=job, reason=reason)
        self._on_event(job, "shards_restored", reason)


class MoveLog:
    """Moves, reported together once they pause: a line for each would hide other events."""

    def __init__(self, log_line: Callable[[str, str], object]) -> None:
        self._log_line = log_line
        self._pending: dict[str, moves.Moves] = {}
        self._report_by_s: dict[str, float] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def add(self, job: str, moved: moves.Moves) -> None:
        if not moved:
            return
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        self._pending.setdefault(job, Counter()).update(moved)
        by_s = self._report_by_s.setdefault(job, now_s + AT_MOST_S)
        if job in self._timers:
            self._timers[job].cancel()
        self._timers[job] = loop.call_at(min(now_s + QUIET_S, by_s), self._report, job)

    def forget(self, job: str) -> None:
        """Drop the job's pending moves."""
        self._pending.pop(job, None)
        self._report_by_s.pop(job, None)
        if (timer := self._timers.pop(job, None)) is not None:
            timer.cancel()

    def _report(self, job: str) -> None:
        moved = self._pending[job]
        self.forget(job)
        for line in moves.moves_in_words(moved):
            self._log_line(job, line)
