"""In which order a job's effects are carried out, and what waits for a durable write.

Effects are carried out one after the other, in the order in which they came. A record, the job's
own key and its end are durable before anything behind them happens; members' keys are written with
what comes next, at the latest before any call is answered that waits for them. While a write is
under way everything waits, and what many events led to meanwhile is carried out together: one
write for all of them.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic

from shoal_server.core.driver.actions import CallT, Persist, Publish, Reply
from shoal_server.core.driver.job_write import JobWrite, PendingWrite
from shoal_server.core.job.job import Job
from shoal_server.core.membership.events import (
    Admit,
    Effect,
    Expel,
    Finish,
    Log,
    Save,
    Tell,
    Write,
)

Carried = Persist | Publish | Expel | Tell | Log


@dataclass(frozen=True, kw_only=True)
class Entry(Generic[CallT]):
    """What one event led to."""

    effects: Sequence[Effect]
    call: CallT
    error: Exception | None = None
    """What the call is answered with once all before it is durable."""


class EffectQueue(Generic[CallT]):
    """The effects of one job. After `fail` nothing leaves any more."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._pending = PendingWrite(job)
        self._waiting: list[Entry[CallT]] = []
        """What events led to while a write is under way; each of their callers waits for it."""
        self._batch: list[Entry[CallT]] = []
        self._effects: deque[Effect] = deque()
        """Of the batch, those that are not carried out yet."""
        self._write: JobWrite | None = None
        self.begun_s = math.inf
        """Since when this batch is being carried out; infinite while nothing is."""
        self._postponed_s = math.inf
        """Up to when the time that it takes is given back to the members."""

    @property
    def is_writing(self) -> bool:
        """Whether something that was decided is not durable yet."""
        return self._write is not None

    def put(self, entry: Entry[CallT], now_s: float) -> list[Carried | Reply[CallT]]:
        """Carry the entry's effects out, now or behind those that wait already."""
        self._waiting.append(entry)
        return [] if self.is_writing else list(self._go_on(now_s))

    def written(self, now_s: float) -> list[Carried | Reply[CallT]]:
        """The write under way is durable: go on behind it."""
        write, self._write = self._write, None
        assert write is not None
        published = [Publish(record=write.record)] if write.record is not None else []
        return [*published, *self._go_on(now_s)]

    def postpone(self, now_s: float) -> None:
        """Before anything is looked at: while the store is away no limit runs for the members, for
        nobody can tell them what to do."""
        if now_s - self.begun_s > self._job.limits.heartbeat_s:
            self._job.postpone(now_s - self._postponed_s)
            self._postponed_s = now_s

    def fail(self, error: Exception) -> list[Reply[CallT]]:
        """Answer everybody who waits: the state is ahead of what is durable, and stays so."""
        entries = self._batch + self._waiting
        self._waiting, self._batch, self._write = [], [], None
        self._effects.clear()
        self.begun_s = math.inf
        return [Reply(call=entry.call, error=error) for entry in entries]

    def _go_on(self, now_s: float) -> Iterator[Carried | Reply[CallT]]:
        """Carry out what waits, up to the next write."""
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

    def _end_batch(self, now_s: float) -> Iterator[Reply[CallT]]:
        self.postpone(now_s)
        batch, self._batch, self.begun_s = self._batch, [], math.inf
        for entry in batch:
            yield Reply(call=entry.call, error=entry.error)

    def _carry_out(self, effect: Effect) -> Iterator[Carried]:
        match effect:
            case Write():
                # Durable before anybody is told.
                yield from self._flush(effect)
            case Admit():
                member = self._job.members.get(effect.member_id)
                # It may be gone by now, or replaced.
                if member is not None and member.incarnation == effect.incarnation:
                    self._pending.admit(member)
            case Expel():
                self._pending.expel(effect.member_id)
                yield effect
            case Save():
                self._pending.save()
                yield from self._flush()
            case Finish():
                self._pending.finish()
                yield from self._flush()
            case Tell() | Log():
                yield effect

    def _flush(self, effect: Write | None = None) -> Iterator[Carried]:
        self._write = self._pending.take(effect.record if effect is not None else None)
        if self._write is not None:
            yield Persist(write=self._write)
