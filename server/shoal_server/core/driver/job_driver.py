"""Driver of one job's state machine: takes events one at a time and returns actions.

Its edge carries out the actions in order, and calls `wake` at `wakes_s`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Generic

from shoal_server.core.driver.actions import (
    Action,
    AnswerCall,
    CallT,
    CloseStream,
    ForgetMember,
    PersistWrite,
    PublishRecord,
    SendOnStream,
    StreamT,
)
from shoal_server.core.driver.effect_queue import Carried, EffectQueue, QueuedEffects
from shoal_server.core.driver.liveness import Liveness
from shoal_server.core.generations.progress import JobResult
from shoal_server.core.generations.roster import Step
from shoal_server.core.job.job import Job
from shoal_server.core.membership.events import (
    Effect,
    EventRefused,
    ExpelMember,
    HeartbeatReceived,
    LogJobEvent,
    MemberEvent,
    MemberLost,
    SendNotice,
    StreamDisconnected,
)
from shoal_server.core.membership.phases import OVER


class _InternalCall(Enum):
    EVENT = "event"
    TICK = "tick"


class JobDriver(Generic[StreamT, CallT]):
    """Driver of one job, until the leader's term ends or a write fails."""

    def __init__(self, job: Job, now_s: float) -> None:
        self.job = job
        self.failure: Exception | None = None
        """Error for all calls once the driver has ended."""
        self.liveness = Liveness(job.limits, job.members, now_s)
        self._queue: EffectQueue[CallT | _InternalCall] = EffectQueue(job)
        self._streams: dict[str, StreamT] = {}
        self._scanned_s = now_s
        self._is_ticking = False

    @property
    def is_writing(self) -> bool:
        """True while a decision is not durable."""
        return self._queue.is_writing

    @property
    def streams(self) -> Iterable[StreamT]:
        """Newest stream of each member."""
        return self._streams.values()

    # --- inputs ---

    def submit(self, event: MemberEvent, call: CallT, now_s: float) -> list[Action[StreamT, CallT]]:
        """Apply the event. Its call is answered once all effects are durable: with EventRefused for
        a refused event, with `failure` after the end."""
        if self.failure is not None:
            return [AnswerCall(call=call, error=self.failure)]
        return self._take(event, call, now_s)

    def stop(self, reason: str, call: CallT, now_s: float) -> list[Action[StreamT, CallT]]:
        """Make all members leave at a step boundary, which ends the job."""
        return self._decided(lambda: self.job.stop(reason, now_s), call, now_s)

    def abandon(self, reason: str, call: CallT, now_s: float) -> list[Action[StreamT, CallT]]:
        """End a job without members as failed, unless it is over."""
        return self._decided(lambda: self.job.abandon(reason, now_s), call, now_s)

    def keep_result(
        self, result: JobResult, call: CallT, now_s: float
    ) -> list[Action[StreamT, CallT]]:
        """Note the result in the record of a job that is over."""
        return self._decided(lambda: self.job.keep_result(result), call, now_s)

    def retry(
        self, reason: str, call: CallT, now_s: float, *, from_scratch: bool
    ) -> list[Action[StreamT, CallT]]:
        """Allow joins again for a job that is over."""
        return self._decided(
            lambda: self.job.retry(reason, now_s, from_scratch=from_scratch), call, now_s
        )

    def wait(self, call: CallT, now_s: float) -> list[Action[StreamT, CallT]]:
        """Answer the call once all earlier decisions are durable."""
        return self._carry((), call, None, now_s)

    def open_stream(self, stream: StreamT, now_s: float) -> list[Action[StreamT, CallT]]:
        """Send the member's notices on this stream, and close its old one."""
        old = self._streams.get(stream.member_id)
        self._streams[stream.member_id] = stream
        member = self.job.members.get(stream.member_id)
        if member is not None and member.incarnation != stream.incarnation:
            # The replaced process' heartbeats say nothing about this one.
            self.liveness.forget(stream.member_id)
        self.liveness.joined(stream.member_id, now_s)
        return [CloseStream(stream=old)] if old is not None else []

    def end_stream(self, stream: StreamT, now_s: float) -> list[Action[StreamT, CallT]]:
        """Note a stream's end, which may disconnect its member."""
        if self._streams.get(stream.member_id) is not stream:
            return []
        del self._streams[stream.member_id]
        if stream.member_id not in self.job.members:
            self.liveness.forget(stream.member_id)
        event = StreamDisconnected(member_id=stream.member_id, incarnation=stream.incarnation)
        return self.note(event, now_s)

    def note(self, event: MemberEvent, now_s: float) -> list[Action[StreamT, CallT]]:
        """Apply the event, for which no call waits."""
        if self.failure is not None:
            return []
        return self._take(event, _InternalCall.EVENT, now_s)

    def heartbeat(self, event: HeartbeatReceived, step: int, now_s: float) -> None:
        """Note a heartbeat."""
        self.liveness.record_heartbeat(event.member_id, step, now_s)
        self.job.note_step(event.member_id, event.incarnation, Step(step))
        self.job.heartbeat(event, now_s)

    def written(self, now_s: float) -> list[Action[StreamT, CallT]]:
        """Continue after a durable write."""
        return self._translated(self._queue.written(now_s))

    def fail(self, error: Exception) -> list[Action[StreamT, CallT]]:
        """End the driver and fail all waiting calls."""
        self.failure = error
        return self._translated(self._queue.fail(error))

    def end(self, error: Exception) -> list[Action[StreamT, CallT]]:
        """End the driver as `fail` does, and close all streams."""
        streams, self._streams = self._streams, {}
        return [*self.fail(error), *(CloseStream(stream=each) for each in streams.values())]

    # --- time ---

    def wakes_s(self, now_s: float) -> float:
        """Return the time of the next call of `wake`; infinite if none is needed."""
        if not self._may_wake:
            return math.inf
        scans_s = self._scans_s if self.job.members else math.inf
        return min(scans_s, self._deadline_s(now_s))

    def wake(self, now_s: float) -> list[Action[StreamT, CallT]]:
        """Find silent members, and act on passed deadlines."""
        actions: list[Action[StreamT, CallT]] = []
        if not self._may_wake:
            return actions
        if now_s >= self._scans_s:
            for event in self._silent(now_s):
                actions += self._take(event, _InternalCall.EVENT, now_s)
        if now_s >= self._deadline_s(now_s):
            self._is_ticking = True
            actions += self._carry(self.job.tick(now_s), _InternalCall.TICK, None, now_s)
        return actions

    @property
    def _may_wake(self) -> bool:
        # No tick before the previous one's effects are durable.
        over = self.failure is not None or self.job.phase in OVER
        return not over and not self._is_ticking

    @property
    def _scans_s(self) -> float:
        return self._scanned_s + self.job.limits.heartbeat_s

    def _deadline_s(self, now_s: float) -> float:
        """Return the next deadline; infinite without the store, since members cannot be
        notified."""
        if now_s - self._queue.begun_s > self.job.limits.heartbeat_s:
            return math.inf
        deadline_s = self.job.next_deadline_s()
        return math.inf if deadline_s is None else deadline_s

    def _silent(self, now_s: float) -> list[MemberLost]:
        # A process that stood still cannot tell which members were silent. Nor can it if the store
        # did not answer: members send heartbeats only once their attendance is durable.
        stood_still = now_s - self._scanned_s > self.job.limits.lease_s / 2
        paused = stood_still or self._queue.begun_s < self._scanned_s
        self._scanned_s = now_s
        if paused:
            self.liveness.resume(now_s)
            return []
        return list(self._silent_too_long(now_s))

    def _silent_too_long(self, now_s: float) -> Iterator[MemberLost]:
        for name in self.liveness.silent_members(now_s):
            member = self.job.members.get(name)
            if member is None:
                self.liveness.forget(name)
            elif member.disconnected_s is None and (reason := self.liveness.why_lost(name, now_s)):
                process = {"member_id": name, "incarnation": member.incarnation}
                cause = f"silent for {self.liveness.silent_s(name, now_s):.3g} s"
                yield MemberLost(**process, reason=reason, cause=cause)

    # --- effects into actions ---

    def _take(
        self, event: MemberEvent, call: CallT | _InternalCall, now_s: float
    ) -> list[Action[StreamT, CallT]]:
        return self._decided(lambda: self.job.handle(event, now_s), call, now_s)

    def _decided(
        self, decide: Callable[[], Sequence[Effect]], call: CallT | _InternalCall, now_s: float
    ) -> list[Action[StreamT, CallT]]:
        self._queue.postpone(now_s)
        try:
            effects = decide()
        except EventRefused as refused:
            # The reason must be durable before the caller gets it.
            return self._carry((), call, refused, now_s)
        return self._carry(effects, call, None, now_s)

    def _carry(
        self,
        effects: Sequence[Effect],
        call: CallT | _InternalCall,
        error: Exception | None,
        now_s: float,
    ) -> list[Action[StreamT, CallT]]:
        if self.failure is not None:
            error, effects = self.failure, ()
        entry = QueuedEffects(effects=effects, call=call, error=error)
        return self._translated(self._queue.submit(entry, now_s))

    def _translated(
        self, carried: Iterable[Carried | AnswerCall[CallT | _InternalCall]]
    ) -> list[Action[StreamT, CallT]]:
        return [action for each in carried for action in self._actions(each)]

    def _actions(
        self, carried: Carried | AnswerCall[CallT | _InternalCall]
    ) -> Iterator[Action[StreamT, CallT]]:
        match carried:
            case SendNotice():
                stream = self._streams.get(carried.member_id)
                # The stream may be a later process's.
                if stream is not None and stream.incarnation == carried.incarnation:
                    yield SendOnStream(stream=stream, notice=carried.notice)
            case ExpelMember():
                yield from self._expelled(carried)
            case AnswerCall(call=call, error=error):
                if not isinstance(call, _InternalCall):
                    yield AnswerCall(call=call, error=error)
                elif call is _InternalCall.TICK:
                    self._is_ticking = False
            case PersistWrite() | PublishRecord() | LogJobEvent():
                yield carried

    def _expelled(self, effect: ExpelMember) -> Iterator[Action[StreamT, CallT]]:
        stream = self._streams.get(effect.member_id)
        if stream is not None and stream.incarnation == effect.incarnation:
            del self._streams[effect.member_id]
            yield CloseStream(stream=stream)
            stream = None
        if stream is None:
            # Else the member has a new process, whose silence counts from its stream.
            self.liveness.forget(effect.member_id)
        yield ForgetMember(member_id=effect.member_id, incarnation=effect.incarnation)
