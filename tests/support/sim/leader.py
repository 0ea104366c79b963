"""One coordinator's term as the leader, and the store it writes to: as the real one does it.

Mirrors coordinator/jobs/job_actor.py (order of effects, what waits for a write) and
coordinator/persistence/durable.py (what a write holds, what a new leader loads).
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from support.sim.errors import RefusedCall, Unavailable
from support.sim.virtual_time import Box, Clock, Process, Steps, Wait

from shoal_server.core.generations.progress import Progress
from shoal_server.core.generations.roster import (
    Generation,
    JobSpec,
    MemberInfo,
    Record,
    Roster,
    Verdict,
)
from shoal_server.core.limits import Limits
from shoal_server.core.membership import events
from shoal_server.core.membership.job import Job
from shoal_server.core.membership.member import Member
from shoal_server.core.membership.restore import Saved, restored

MAX_TICKS_AT_ONCE = 5


def digest_of(roster: Roster) -> str:
    return hashlib.sha256(repr(roster).encode()).hexdigest()


class Deposed(Exception):
    """Another coordinator leads: its write is refused."""


@dataclass(frozen=True)
class Write:
    """One transaction."""

    members: dict[str, Member | None]
    last_generation: Generation | None
    reason: str
    finished: bool
    progress: Progress
    lost: str | None
    record: Record | None


class Store:
    """etcd: writes of the leader alone count; while it is away they wait."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.leader: Leader | None = None
        self.back_s = 0.0
        self.exists = False
        self.last_generation, self.reason, self.finished = Generation(0), "", False
        self.progress = Progress()
        self.lost: str | None = None
        self.members: dict[str, tuple[str, MemberInfo]] = {}
        self.records: dict[Generation, list[Record]] = {}
        """All that were written, by generation; the last of each stands."""
        self.on_write: Callable[[Record], None] = lambda record: None

    def transact(self, leader: "Leader", write: Write, reply: Box) -> None:
        at_s = max(self._clock.now_s, self.back_s) + self._clock.random.random() * 0.02
        self._clock.later(at_s - self._clock.now_s, lambda: self._apply(leader, write, reply))

    def _apply(self, leader: "Leader", write: Write, reply: Box) -> None:
        if self._clock.now_s < self.back_s:
            self.transact(leader, write, reply)
            return
        error = None if leader is self.leader else Deposed()
        if error is None:
            self._put(write)
        # The reply may find its leader dead: what is durable is durable.
        self._clock.soon(lambda: reply.set(error), 0.02)

    def _put(self, write: Write) -> None:
        for name, member in write.members.items():
            if member is None:
                self.members.pop(name, None)
            else:
                self.members[name] = (member.incarnation, member.info)
        if write.last_generation is not None:
            self.exists = True
            self.last_generation, self.reason = write.last_generation, write.reason
            self.finished, self.lost = write.finished, write.lost
            self.progress = write.progress
        if write.record is not None:
            self.records.setdefault(write.record.roster.generation, []).append(write.record)
            self.on_write(write.record)

    def load(self, now_s: float) -> Saved | None:
        if not self.exists:
            return None
        newest = [self.records[number][-1] for number in sorted(self.records)]
        committed = [r for r in newest if r.verdict is Verdict.COMMITTED]
        return Saved(
            last_generation=Generation(max([self.last_generation, *self.records])),
            record=committed[-1] if committed else None,
            before=committed[-2] if len(committed) > 1 else None,
            members=tuple(
                Member(
                    member_id=name,
                    incarnation=incarnation,
                    info=info,
                    attended_s=now_s,
                    waiting_since_s=now_s,
                )
                for name, (incarnation, info) in sorted(self.members.items())
            ),
            finished=self.finished,
            reason=self.reason,
            progress=replace(self.progress),
            lost=self.lost,
        )


@dataclass(eq=False)
class Connection:
    """A member's stream of notices."""

    clock: Clock
    member_id: str
    incarnation: str
    on_notice: Callable[[], None]
    loss: Callable[[], bool]
    inbox: list[events.Notice | Exception | None] = field(default_factory=list)
    """None: admitted."""
    broken: bool = False
    """As the member sees it."""
    ended: bool = False
    """As the leader sees it."""
    leader: "Leader | None" = None
    _held: list[events.Notice] = field(default_factory=list)
    _admitted: bool = False
    _free_s: float = 0.0

    def admit(self) -> None:
        self._send(None)
        self._admitted = True
        held, self._held = self._held, []
        for notice in held:
            self._send(notice)

    def put(self, notice: events.Notice) -> None:
        if self._admitted:
            self._send(notice)
        else:
            self._held.append(notice)

    def end(self, error: Exception) -> None:
        """The leader's side closes it; what is on its way arrives first."""
        if not self.ended:
            self.ended = True
            self._send(error)

    def _send(self, item: events.Notice | Exception | None) -> None:
        if self.loss():
            self.break_off()
        slow_s = 0.5 if self.clock.random.random() < 0.05 else 0.02
        self._free_s = max(self._free_s, self.clock.now_s + self.clock.random.random() * slow_s)
        self.clock.later(self._free_s - self.clock.now_s, lambda: self._deliver(item))

    def _deliver(self, item: events.Notice | Exception | None) -> None:
        if not self.broken:
            self.inbox.append(item)
            self.on_notice()

    def break_off(self) -> None:
        """The connection breaks: what is under way is lost, either side finds out in its time."""
        if not self.broken:
            self.broken = True
            self.clock.soon(self.on_notice, 0.3)
        leader = self.leader
        if leader is not None:
            self.clock.soon(lambda: leader.process.do(lambda: leader.closed(self)), 1.0)


class Leader:
    """Takes calls in, lets the job decide, carries out what follows."""

    def __init__(self, clock: Clock, store: Store, spec: JobSpec, limits: Limits) -> None:
        self.clock, self.store, self._spec, self._limits = clock, store, spec, limits
        self.process = Process(clock)
        self.leads = False
        self.started_s = clock.now_s
        self.job = Job(spec=spec, limits=limits, digest_of=digest_of, phase_since_s=clock.now_s)
        self.streams: dict[str, Connection] = {}
        self.pending: dict[Box, None] = {}
        """Calls whose callers wait."""
        self.check: Callable[[], None] = lambda: None
        self.log: Callable[[str], None] = lambda line: None
        self.effects_left: int | None = None
        """It crashes when it has carried out so many more effects."""
        self.on_crash: Callable[[], None] = lambda: None
        self._failure: Exception | None = None
        self._waiting: list[tuple[Sequence[events.Effect], Box]] = []
        self._carrying = False
        self._carries_since_s = math.inf
        self._members: dict[str, Member | None] = {}
        self._state_changed = self._finished = False
        self._wakes_s: float | None = None
        self._ticking = False
        self._ticks_at: tuple[float, int] = (-1.0, 0)

    def take_over(self) -> None:
        """Load what is durable, hold the members' keys, lead."""
        saved = self.store.load(self.clock.now_s)
        if saved is not None:
            self.job = restored(
                self._spec,
                saved,
                limits=self._limits,
                digest_of=digest_of,
                now_s=self.clock.now_s,
            )
        self._members.update(self.job.members)
        self.process.start(self._begin())

    def _begin(self) -> Steps[None]:
        try:
            yield from self._flush(None)
        except Deposed:
            return
        self.leads = True
        self._plan()

    # --- calls ---

    def attend(self, stream: Connection, event: events.Attended) -> None:
        if not self.leads or self._failure is not None:
            stream.end(Unavailable("this coordinator does not lead"))
            return
        old = self.streams.get(stream.member_id)
        self.streams[stream.member_id], stream.leader = stream, self
        if old is not None:
            old.end(Unavailable("replaced by a newer stream"))
        if stream.broken:
            self.clock.soon(lambda: self.process.do(lambda: self.closed(stream)), 1.0)

        def admitted(error: Exception | None) -> None:
            if error is None:
                stream.admit()
            else:
                stream.end(error)
                self.closed(stream)

        self.submit(event, admitted)

    def submit(
        self, event: events.Event, reply: Callable[[Exception | None], None] = lambda error: None
    ) -> None:
        if not self.leads or self._failure is not None:
            reply(Unavailable("this coordinator does not lead"))
            return
        stranger = self._is_stranger(event)
        before = repr(self.job) if stranger else ""
        running = self.job.running
        error: Exception | None = None
        effects: Sequence[events.Effect] = ()
        try:
            effects = self.job.handle(event, self.clock.now_s)
        except events.Refused as refused:
            error = RefusedCall(refused.refusal)
            assert self.job.running is running, f"refused, and yet: {event}"
        if stranger:
            assert error is not None, f"a stranger was heard: {event}"
            assert repr(self.job) == before, f"a stranger changed the job: {event}"
        self.check()
        self._plan()

        def carried(failure: Exception | None) -> None:
            self.pending.pop(box, None)
            reply(failure or error)

        box = Box(lambda: carried(box.error))
        self.pending[box] = None
        self._carried(effects, box)

    def _is_stranger(self, event: events.Event) -> bool:
        member = self.job.members.get(event.member_id)
        known = member is not None and member.incarnation == event.incarnation
        return not known and not isinstance(event, events.Attended)

    def closed(self, stream: Connection) -> None:
        stream.ended = True
        if self.streams.get(stream.member_id) is stream and self.process.alive:
            del self.streams[stream.member_id]
            who = {"member_id": stream.member_id, "incarnation": stream.incarnation}
            self.submit(events.Disconnected(**who))

    def end(self) -> None:
        """Deposed, and aware of it; or dead."""
        self._failure = self._failure or Unavailable("this coordinator does not lead any more")
        self.leads = False
        self.process.die()
        for box in list(self.pending):
            box.set(self._failure)
        for stream in list(self.streams.values()):
            stream.end(self._failure)
        self.streams.clear()

    # --- time ---

    def _plan(self) -> None:
        deadline_s = self._next_deadline_s()
        if deadline_s is None or not self.leads:
            return
        if self._wakes_s is None or deadline_s < self._wakes_s:
            self._wakes_s = deadline_s
            delay_s = max(deadline_s - self.clock.now_s, 0.0)
            self.clock.later(delay_s, lambda: self.process.do(lambda: self._wake(deadline_s)))

    def _wake(self, planned_s: float) -> None:
        if self._wakes_s != planned_s:
            return
        self._wakes_s = None
        deadline_s, now_s = self._next_deadline_s(), self.clock.now_s
        if self._ticking or not self.leads:
            return
        if deadline_s is None or now_s < deadline_s:
            self._plan()
            return
        at_s, count = self._ticks_at
        self._ticks_at = (now_s, count + 1 if at_s == now_s else 1)
        reason = f"{self.job.phase}: {self.job.reason}"
        assert self._ticks_at[1] < MAX_TICKS_AT_ONCE, f"it ticks without end; {reason}"
        self._ticking = True
        effects = self.job.tick(now_s)
        self.check()

        def ticked() -> None:
            self._ticking = False
            self._plan()

        self._carried(effects, Box(ticked))

    @property
    def writes(self) -> bool:
        """Whether something that it decided is not durable yet."""
        return self._carrying

    def _next_deadline_s(self) -> float | None:
        stalled_s = self.clock.now_s - self._carries_since_s
        return None if stalled_s > self.job.limits.heartbeat_s else self.job.next_deadline_s()

    # --- effects ---

    def _carried(self, effects: Sequence[events.Effect], box: Box) -> None:
        durable = (events.Write, events.Admit, events.Expel, events.Save, events.Finish)
        if not self._carrying and not any(isinstance(e, durable) for e in effects):
            for effect in effects:
                if self._crashes():
                    return
                self._act(effect)
            box.set()
            return
        self._waiting.append((effects, box))
        if not self._carrying:
            self._carrying = True
            self.process.start(self._carry_on())

    def _carry_on(self) -> Steps[None]:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            self._carries_since_s = self.clock.now_s
            try:
                for effects, _ in batch:
                    for effect in effects:
                        if self._crashes():
                            return
                        yield from self._carry_out(effect)
                yield from self._flush(None)
            except Deposed:
                self._failure = Unavailable("this coordinator no longer leads")
                batch += self._waiting
                self._waiting = []
            waited_s = self.clock.now_s - self._carries_since_s
            if waited_s > self.job.limits.heartbeat_s:
                self.job.postpone(waited_s)
            for _, box in batch:
                box.set(self._failure)
            if self._failure is not None:
                self.end()
                return
        self._carrying, self._carries_since_s = False, math.inf
        self._plan()

    def _crashes(self) -> bool:
        if self.effects_left is not None:
            self.effects_left -= 1
            if self.effects_left < 0:
                self.effects_left = None
                self.on_crash()
        return not self.process.alive

    def _carry_out(self, effect: events.Effect) -> Steps[None]:
        match effect:
            case events.Write():
                yield from self._flush(effect.record)
            case events.Admit():
                member = self.job.members.get(effect.member_id)
                if member is not None and member.incarnation == effect.incarnation:
                    self._members[member.member_id] = member
                    self._state_changed = True
            case events.Expel():
                self._members[effect.member_id] = None
                stream = self.streams.get(effect.member_id)
                if stream is not None and stream.incarnation == effect.incarnation:
                    del self.streams[effect.member_id]
                    stream.end(Unavailable("expelled"))
            case events.Save():
                self._state_changed = True
                yield from self._flush(None)
            case events.Finish():
                self._finished = self._state_changed = True
                yield from self._flush(None)
            case _:
                self._act(effect)

    def _act(self, effect: events.Effect) -> None:
        if isinstance(effect, events.Log):
            self.log(f"{effect.kind}: {effect.reason}")
        elif isinstance(effect, events.Tell):
            stream = self.streams.get(effect.member_id)
            if stream is not None and stream.incarnation == effect.incarnation:
                stream.put(effect.notice)

    def _flush(self, record: Record | None) -> Steps[None]:
        members, self._members = self._members, {}
        changed, self._state_changed = self._state_changed or record is not None, False
        if not members and not changed:
            return
        reply = Box(self.process.changed)
        write = Write(
            members=members,
            last_generation=self.job.last_generation if changed else None,
            reason=self.job.reason,
            finished=self._finished,
            progress=replace(self.job.progress),
            lost=self.job.lost.seen if self.job.lost is not None else None,
            record=record,
        )
        self.store.transact(self, write, reply)
        yield Wait(lambda: reply.done)
        if reply.error is not None:
            raise reply.error
