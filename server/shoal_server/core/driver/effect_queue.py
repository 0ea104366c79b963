"""Order of a job's effects, some of which wait for durable writes.

`WriteGeneration`, `SaveJobRecord` and `FinishJob` are durable before any later effect. Keys of
members are written with the next such write, or before the call is answered. Events that arrive
during a write share the next write.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic

from shoal_server.core.driver.actions import AnswerCall, CallT, PersistWrite, PublishRecord
from shoal_server.core.driver.job_write import JobWrite, PendingWrite
from shoal_server.core.job.job import Job
from shoal_server.core.membership.events import (
    AdmitMember,
    Effect,
    ExpelMember,
    FinishJob,
    LogJobEvent,
    SaveJobRecord,
    SendNotice,
    WriteGeneration,
)

Carried = PersistWrite | PublishRecord | ExpelMember | SendNotice | LogJobEvent


@dataclass(frozen=True, kw_only=True)
class QueuedEffects(Generic[CallT]):
    """Effects of one event, and the call that waits for them."""

    effects: Sequence[Effect]
    call: CallT
    error: Exception | None = None
    """Error for the call."""


class EffectQueue(Generic[CallT]):
    """Effects of one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._pending = PendingWrite(job)
        self._waiting: list[QueuedEffects[CallT]] = []
        self._batch: list[QueuedEffects[CallT]] = []
        self._effects: deque[Effect] = deque()
        self._write: JobWrite | None = None
        self.begun_s = math.inf
        """Start of this batch; infinite without one."""
        self._postponed_s = math.inf
        """Time up to which the job's limits were extended."""

    @property
    def is_writing(self) -> bool:
        """True while a decision is not durable."""
        return self._write is not None

    def submit(
        self, entry: QueuedEffects[CallT], now_s: float
    ) -> list[Carried | AnswerCall[CallT]]:
        """Add the entry, and return what is to be carried out."""
        self._waiting.append(entry)
        return [] if self.is_writing else list(self._go_on(now_s))

    def written(self, now_s: float) -> list[Carried | AnswerCall[CallT]]:
        """Continue after a durable write."""
        write, self._write = self._write, None
        assert write is not None
        published = [PublishRecord(record=write.record)] if write.record is not None else []
        return [*published, *self._go_on(now_s)]

    def postpone(self, now_s: float) -> None:
        """Extend the job's limits during a slow batch, since members cannot be notified. Call
        before any other check."""
        if now_s - self.begun_s > self._job.limits.heartbeat_s:
            self._job.postpone(now_s - self._postponed_s)
            self._postponed_s = now_s

    def fail(self, error: Exception) -> list[AnswerCall[CallT]]:
        """Drop all effects, and answer their calls with the error."""
        entries = self._batch + self._waiting
        self._waiting, self._batch, self._write = [], [], None
        self._effects.clear()
        self.begun_s = math.inf
        return [AnswerCall(call=entry.call, error=error) for entry in entries]

    def _go_on(self, now_s: float) -> Iterator[Carried | AnswerCall[CallT]]:
        while self._batch or self._waiting:
            if not self._batch:
                self._batch, self._waiting = self._waiting, []
                self._effects.extend(e for entry in self._batch for e in entry.effects)
                self.begun_s = self._postponed_s = now_s
            while self._effects:
                yield from self._carry_out(self._effects.popleft())
                if self._write is not None:
                    return
            yield from self._flush()
            if self._write is not None:
                return
            yield from self._end_batch(now_s)

    def _end_batch(self, now_s: float) -> Iterator[AnswerCall[CallT]]:
        self.postpone(now_s)
        batch, self._batch, self.begun_s = self._batch, [], math.inf
        for entry in batch:
            yield AnswerCall(call=entry.call, error=entry.error)

    def _carry_out(self, effect: Effect) -> Iterator[Carried]:
        match effect:
            case WriteGeneration():
                # Durable before any member is notified.
                yield from self._flush(effect)
            case AdmitMember():
                member = self._job.members.get(effect.member_id)
                # The member may be gone or replaced.
                if member is not None and member.incarnation == effect.incarnation:
                    self._pending.admit(member)
            case ExpelMember():
                self._pending.expel(effect.member_id)
                yield effect
            case SaveJobRecord():
                self._pending.save()
                yield from self._flush()
            case FinishJob():
                self._pending.finish()
                yield from self._flush()
            case SendNotice() | LogJobEvent():
                yield effect

    def _flush(self, effect: WriteGeneration | None = None) -> Iterator[Carried]:
        self._write = self._pending.take(effect.record if effect is not None else None)
        if self._write is not None:
            yield PersistWrite(write=self._write)
