"""One worker process, as shoal_client.membership and `shoal.session.elastic_controller` have it.

Method for method: a thread there is a generator here, a wait on the condition a `yield`.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from support.sim.errors import CollectiveFailed, DeadlineExceeded, Drained, RefusedCall, Unavailable
from support.sim.leader import Connection, Leader
from support.sim.virtual_time import Box, Clock, Process, Steps, Wait, sleep

from shoal_server.core.generations.roster import (
    Generation,
    JobSpec,
    MemberInfo,
    Proposal,
    Record,
    Roster,
    StateAction,
    Step,
    Verdict,
)
from shoal_server.core.limits import Limits
from shoal_server.core.membership import events

ATTEND_S = 10.0
LEAVE_S = 3.0


class Surroundings(Protocol):
    """What a member reaches: whoever leads, and its peers."""

    clock: Clock
    limits: Limits
    spec: JobSpec
    checkpoints: list[int]
    """Steps of those that are complete: every member sees the same."""

    def find_leader(self) -> Leader | None: ...
    def request(self, leader: Leader | None, event: events.Event, box: Box) -> None: ...
    def open(self, leader: Leader | None, stream: Connection, event: events.Attended) -> None: ...
    def lose(self) -> bool: ...
    def arrive(self, member: "SimMember", generation: int, key: str, box: Box) -> None: ...
    def part(self, member: "SimMember", generation: int) -> None: ...
    def begins(self, member: "SimMember", step: int) -> None: ...
    def committed(self, member: "SimMember") -> None: ...
    def crosses(self, member: "SimMember", old: int, step: int) -> None: ...
    def source_step(self, record: Record) -> int: ...
    def entered(self, member: "SimMember", record: Record) -> None: ...
    def ended(self, member: "SimMember") -> None: ...


@dataclass(frozen=True)
class Change:
    record: Record
    offer: int
    stop_at: int | None = None


class SimMember:
    def __init__(
        self,
        around: Surroundings,
        name: str,
        incarnation: str,
        fields: dict[str, str],
        *,
        total_steps: int | None = None,
        rejects: bool = False,
        cannot_reach: Callable[[str], bool] = lambda peer: False,
        info: MemberInfo | None = None,
        step: int = 0,
        num_failures: int = 0,
    ) -> None:
        self.around, self.name, self.incarnation = around, name, incarnation
        self.process = Process(around.clock)
        self.total_steps, self.rejects, self.cannot_reach = total_steps, rejects, cannot_reach
        self.info, self._fields = info or MemberInfo(host="h"), fields
        self.step, self.has_state = step, step > 0
        self.num_failures = num_failures
        """So many bring-ups fail by its own fault, as where memory is short."""
        self.is_clumsy = num_failures > 0
        self.failure: Exception | None = None
        self.end: Exception | str | None = None
        """How the process ended, once it has."""
        self.records: dict[int, list[Record]] = {}
        self.prepared: dict[int, tuple[float, Connection]] = {}
        self.stands_by = False
        self.stream: Connection | None = None
        self.generation = 0
        self._leader = around.find_leader()
        self._admitted = self._closing = False
        self._proposal: Proposal | None = None
        self._record: Record | None = None
        self._ready_generation = 0
        self._begun = -1
        self._change: Change | None = None
        self.crossed_at: int | None = None
        self._stood_at: events.Settled | None = None
        self._broken: set[int] = set()
        self._drain_reason = ""
        self._drain_asks: list[str] = []
        self._stands = False
        self._seen = 0
        self.process.start(self._listen())
        self.process.start(self._train())
        self.process.start(self._ask_for_drain())

    @property
    def living(self) -> bool:
        return self.process.alive and self.end is None

    @property
    def to_leave(self) -> bool:
        return bool(self._drain_reason or self._drain_asks)

    @property
    def who(self) -> dict[str, str]:
        return {"member_id": self.name, "incarnation": self.incarnation}

    def is_in(self, roster: Roster | None) -> bool:
        return roster is not None and roster.holds(self.name, self.incarnation)

    def drain(self, reason: str) -> None:
        self._drain_asks.append(reason)
        self.process.changed()

    # --- calls (channel.py) ---

    def _send(self, event: events.Event, timeout_s: float) -> Steps[None]:
        clock = self.around.clock
        give_up_s = clock.now_s + timeout_s
        pause_s = 0.02
        while True:
            leader, box = self._leader, Box(self.process.changed)
            self.around.request(leader, event, box)
            # As a default: the loop binds the box anew.
            if not (yield Wait(lambda box=box: box.done, give_up_s - clock.now_s)):
                raise DeadlineExceeded("no answer")
            if box.error is None:
                return
            if not isinstance(box.error, Unavailable):
                raise box.error
            if clock.now_s + pause_s >= give_up_s:
                raise box.error
            self._move_on(leader)
            yield sleep(pause_s)
            pause_s = min(2 * pause_s, 0.2)

    def _move_on(self, failed: Leader | None) -> None:
        if self._leader is failed:
            self._leader = self.around.find_leader()

    def _call(self, event: events.Event) -> Steps[None]:
        try:
            yield from self._send(event, self.around.limits.join_s)
        except RefusedCall as error:
            self._fail(error)
            raise (self.failure or error) from None

    def _fail(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = error
            self.process.changed()
            if self.generation:
                self._cut(self.generation)

    def _cut(self, generation: int) -> None:
        self.around.part(self, generation)

    # --- the membership's thread ---

    def _listen(self) -> Steps[None]:
        pause_s = 0.02
        clock = self.around.clock
        while not self._closing and self.failure is None:
            leader = self._leader
            stream = Connection(
                clock, self.name, self.incarnation, self.process.changed, self.around.lose
            )
            self.stream = stream
            event = events.Attended(**self.who, spec=self.around.spec, info=self.info)
            self.around.open(leader, stream, event)
            error: Exception | None = None
            try:
                while error is None:
                    yield Wait(lambda stream=stream: bool(stream.inbox) or stream.broken)
                    if not stream.inbox:
                        error = Unavailable("the stream broke")
                        continue
                    item = stream.inbox.pop(0)
                    if isinstance(item, Exception):
                        error = item
                    else:
                        pause_s = 0.02
                        yield from self._take(item)
            except (Unavailable, DeadlineExceeded, RefusedCall, Drained) as answer_error:
                error = answer_error
            if self._closing or self.failure is not None:
                return
            if isinstance(error, RefusedCall):
                self._fail(error)
                return
            self._move_on(leader)
            yield sleep(pause_s)
            pause_s = min(2 * pause_s, 0.2)

    def _take(self, notice: events.Notice | None) -> Steps[None]:
        self.stands_by = isinstance(notice, events.StandbyNotice) or (
            self.stands_by and notice is None
        )
        match notice:
            case None:
                yield from self._take_admitted()
            case events.PrepareNotice():
                yield from self._answer(notice)
            case events.OutcomeNotice() if notice.record.verdict is Verdict.COMMITTED:
                self._note(notice.record)
                yield from self._take_committed(notice.record)
            case events.OutcomeNotice():
                self._note(notice.record)
                yield from self._take_aborted(notice.record)
            case events.StopAtNotice():
                self._take_stop_at(notice)
            case events.BreakNotice():
                self._take_break(notice.generation)
                yield from self._stand_still()
            case events.DrainNotice():
                self._take_drain(notice.now, notice.reason)
            case events.RefusedNotice():
                self._fail(RefusedCall(notice.refusal))
            case _:
                pass

    def _note(self, record: Record) -> None:
        number = record.roster.generation
        if self.is_in(record.roster):
            self.records.setdefault(number, []).append(record)

    def _take_admitted(self) -> Steps[None]:
        again, self._admitted = self._admitted, True
        proposal, ready, stood_at = self._proposal, self._ready_generation, self._stood_at
        self.process.changed()
        if again and self._drain_reason:
            self.drain(self._drain_reason)
        if again and proposal is not None:
            yield from self._call(events.Proposed(**self.who, proposal=proposal))
        if again and stood_at is not None:
            yield from self._call(stood_at)
        elif again and ready and ready == self.generation:
            event = events.BecameReady(
                **self.who, generation=Generation(ready), step=Step(self.step)
            )
            yield from self._call(event)

    def _answer(self, notice: events.PrepareNotice) -> Steps[None]:
        roster = notice.roster
        assert self.stream is not None
        self.prepared.setdefault(roster.generation, (self.around.clock.now_s, self.stream))
        rejections = (
            (events.Rejection(field="custom", seen="1", expected="2"),) if self.rejects else ()
        )
        failed = [n for n in roster.member_ids if n != self.name and self.cannot_reach(n)]
        if failed:
            yield sleep(self.around.limits.probe_s)
        answer = events.Answered(
            **self.who,
            generation=roster.generation,
            digest=notice.digest,
            rejections=rejections,
            unreachable=() if rejections else tuple((name, "refused") for name in failed),
            checkpoint_steps=tuple(map(Step, self.around.checkpoints))
            if roster.from_checkpoint
            else (),
        )
        yield from self._call(answer)

    def _take_committed(self, record: Record) -> Steps[None]:
        number = record.roster.generation
        if number <= self.generation:
            if number == self.generation and self.crossed_at is not None:
                yield from self._offer(number, self.crossed_at)
            return
        trains = self.generation > 0 and self.generation not in self._broken
        if not trains or not record.roster.planned:
            if self.is_in(record.roster):
                self._record = record
                self.process.changed()
            return
        if self._change is None or self._change.record.roster.generation != number:
            self._change = Change(record, self._begun + 1)
        yield from self._offer(number, self._change.offer)

    def _offer(self, number: Generation, step: int) -> Steps[None]:
        offer = events.Offered(**self.who, generation=number, next_step=Step(step))
        yield from self._call(offer)

    def _take_aborted(self, record: Record) -> Steps[None]:
        number = record.roster.generation
        if self._change is not None and self._change.record.roster.generation == number:
            self._change = None
        was_committed = self._record is not None and self._record.roster.generation == number
        self.process.changed()
        if was_committed:
            self._take_break(number)
            yield from self._stand_still()

    def _stand_still(self) -> Steps[None]:
        stood_at = self._stood_at
        if stood_at is None and self.generation == 0 and self._proposal is not None:
            stood_at = self._stand_of(self._proposal)
        if stood_at is not None:
            yield from self._call(stood_at)

    def _stand_of(self, proposal: Proposal) -> events.Settled:
        return events.Settled(
            **self.who,
            step=proposal.step,
            has_state=proposal.has_state,
            left=Generation(self.generation),
        )

    def _take_stop_at(self, notice: events.StopAtNotice) -> None:
        change = self._change
        if change is not None and change.record.roster.generation == notice.generation:
            self._change = replace(change, stop_at=notice.step)
        self.process.changed()

    def _take_drain(self, now: bool, reason: str) -> None:
        self._drain_reason = self._drain_reason or reason
        if now:
            self.failure = self.failure or Drained(reason)
        self.process.changed()

    def _ask_for_drain(self) -> Steps[None]:
        limits, clock = self.around.limits, self.around.clock
        yield Wait(lambda: self._admitted)
        while True:
            yield Wait(lambda: bool(self._drain_asks))
            reason = self._drain_asks.pop(0)
            self._drain_reason = self._drain_reason or reason
            give_up_s = clock.now_s + limits.drain_s
            while not self._closing:
                event = events.DrainAsked(**self.who, reason=reason)
                try:
                    yield from self._send(event, limits.lease_s)
                    break
                except RefusedCall:
                    break
                except (Unavailable, DeadlineExceeded):
                    if clock.now_s >= give_up_s:
                        self._take_drain(True, reason)
                        break

    def _take_break(self, generation: int) -> None:
        if generation in self._broken:
            return
        self._broken |= {generation, min(generation, self.generation)}
        self.process.changed()
        self._cut(generation)

    # --- the trainer's thread ---

    def _train(self) -> Steps[None]:
        try:
            yield Wait(lambda: self._admitted or self.failure is not None, ATTEND_S)
            if self.failure is not None or not self._admitted:
                raise self.failure or DeadlineExceeded("no coordinator admitted it")
            yield from self._propose()
            while self.total_steps is None or self.step < self.total_steps:
                yield from self._train_on()
                yield from self._step()
            yield from self._leave("completed")
        except (
            Unavailable,
            DeadlineExceeded,
            RefusedCall,
            CollectiveFailed,
            Drained,
        ) as error:
            yield from self._leave(error)

    def _propose(self) -> Steps[None]:
        self._proposal = Proposal(
            fields=self._fields, step=Step(self.step), has_state=self.has_state
        )
        self._begun = self.step - 1
        yield from self._call(events.Proposed(**self.who, proposal=self._proposal))

    def _train_on(self) -> Steps[None]:
        while True:
            while not self._stands:
                yield from self._bring_up((yield from self._await_generation()))
            record = yield from self._begin_step()
            if record is not None:
                self.around.part(self, self._seen)
                self._stands = False
                yield from self._bring_up(record)
            elif self.generation in self._broken:
                yield from self._fall(None)
            else:
                return

    def _await_generation(self) -> Steps[Record]:
        clock, give_up_s = self.around.clock, self.around.clock.now_s
        give_up_s += self.around.limits.join_s + ATTEND_S
        while True:
            if self.failure is not None:
                raise self.failure
            record = self._record
            if record is not None:
                number = record.roster.generation
                if number > self._seen and number not in self._broken:
                    self.generation = number
                    self.crossed_at = self._stood_at = None
                    return record
            if clock.now_s >= give_up_s:
                raise DeadlineExceeded("no generation")
            yield Wait(
                lambda seen=record: self._record is not seen or self.failure is not None,
                give_up_s - clock.now_s,
            )

    def _begin_step(self) -> Steps[Record | None]:
        clock, limits = self.around.clock, self.around.limits
        give_up_s: float | None = None
        while True:
            if self.failure is not None:
                raise self.failure
            change = self._change
            if change is None or self.generation in self._broken:
                break
            if self.step < (change.offer if change.stop_at is None else change.stop_at):
                break
            if change.stop_at is not None and self.is_in(change.record.roster):
                self.around.crosses(self, self.generation, change.stop_at)
                self._change, self._record = None, change.record
                self.generation = change.record.roster.generation
                self.crossed_at = change.stop_at
                return change.record
            give_up_s = give_up_s or clock.now_s + 2 * limits.collective_s + limits.bring_up_s
            if not (
                yield Wait(
                    lambda seen=change: (
                        self._change is not seen
                        or self.failure is not None
                        or self.generation in self._broken
                    ),
                    give_up_s - clock.now_s,
                )
            ):
                if change.stop_at is not None:
                    raise Drained("the others did not report that they run")
                raise DeadlineExceeded("the members did not agree on a step to stop at")
        if self.generation not in self._broken:
            self.around.begins(self, self.step)
        self._begun = self.step
        return None

    def _step(self) -> Steps[None]:
        # Its own computation, then the collective that all members of the generation share.
        yield sleep(self.around.clock.random.uniform(0.05, 0.3))
        try:
            yield from self._collective(f"step {self.step}")
        except CollectiveFailed as error:
            yield from self._fall(error)
        else:
            self.step += 1
            self.around.committed(self)

    def _collective(self, key: str) -> Steps[None]:
        box = Box(self.process.changed)
        self.around.arrive(self, self._seen, key, box)
        if not (yield Wait(lambda: box.done, self.around.limits.collective_s)):
            raise CollectiveFailed("timed out")
        if box.error is not None:
            raise box.error

    def _bring_up(self, record: Record) -> Steps[None]:
        self._seen = record.roster.generation
        try:
            yield sleep(self.around.clock.random.uniform(0.0, 0.2))
            if self.num_failures:
                self.num_failures -= 1
                generation = Generation(self._seen)
                yield from self._call(
                    events.Broke(**self.who, generation=generation, error="no memory", own=True)
                )
                raise CollectiveFailed("no memory")
            yield from self._collective("bring up")
        except CollectiveFailed as error:
            self.around.part(self, self._seen)
            yield from self._settle(error)
            return
        entry = next(e for e in record.roster.entries if e.member_id == self.name)
        if entry.state is StateAction.CHECKPOINT:
            self.step = max(self.around.checkpoints)
        elif entry.state is not StateAction.KEEP:
            self.step = self.around.source_step(record)
        self.has_state = True
        self.around.entered(self, record)
        self._stands = True
        self._ready_generation = record.roster.generation
        if self._proposal is not None:
            step = Step(max(self._proposal.step, self.step))
            self._proposal = replace(self._proposal, has_state=True, step=step)
        event = events.BecameReady(
            **self.who, generation=record.roster.generation, step=Step(self.step)
        )
        yield from self._call(event)

    def _fall(self, error: CollectiveFailed | None) -> Steps[None]:
        self._stands = False
        self.around.part(self, self._seen)
        yield from self._settle(error)

    def _settle(self, error: CollectiveFailed | None) -> Steps[None]:
        number, limits = self._seen, self.around.limits
        if number not in self._broken and error is not None:
            generation = Generation(self.generation)
            yield from self._call(
                events.Broke(**self.who, generation=generation, error="connection reset")
            )
        if number not in self._broken and not (
            yield Wait(
                lambda: number in self._broken or self.failure is not None, limits.collective_s
            )
        ):
            raise error or DeadlineExceeded("no word of the break")
        self._change, self._begun = None, self.step - 1
        if self._proposal is not None:
            self._proposal = replace(self._proposal, step=Step(self.step), has_state=self.has_state)
        at = Proposal(step=Step(self.step), has_state=self.has_state)
        self._stood_at = self._stand_of(at)
        yield from self._call(self._stood_at)

    def _leave(self, end: Exception | str) -> Steps[None]:
        completed = end == "completed"
        if self._admitted and (self.failure is None or isinstance(self.failure, Drained)):
            left = events.Left(**self.who, completed=completed, reason=str(end))
            with suppress(Unavailable, DeadlineExceeded, RefusedCall):
                yield from self._send(left, LEAVE_S)
        self._closing = True
        if self.stream is not None:
            self.stream.break_off()
        self.end = end
        self.around.ended(self)
        self.process.die()
