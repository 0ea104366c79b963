"""A coordinator's term as the leader: the job's real driver, in virtual time."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from support.sim.errors import RefusedCall, Unavailable
from support.sim.etcd import SimEtcd, awaited
from support.sim.releases import JobsOfRelease, Release
from support.sim.virtual_time import Box, Clock, Process, Steps, Wait

from shoal_proto.errors import NotLeader
from shoal_server.coordinator.persistence import codec
from shoal_server.coordinator.persistence.stored_generations import StoredGenerations
from shoal_server.core.driver.actions import (
    Action,
    AnswerCall,
    CloseStream,
    ForgetMember,
    PersistWrite,
    PublishRecord,
    SendOnStream,
)
from shoal_server.core.driver.job_driver import JobDriver
from shoal_server.core.driver.job_write import JobWrite
from shoal_server.core.generations.roster import JobSpec
from shoal_server.core.job import pausing
from shoal_server.core.job.job import Job
from shoal_server.core.limits import Limits
from shoal_server.core.membership import events
from shoal_server.etcd.api import Keyspace
from shoal_server.etcd.leader_store import LeaderStore

MAX_TICKS_AT_ONCE = 5
MAY_BE_REFUSED = (events.MemberJoined, events.TrainingProposed, events.StepReported)

Handle = Callable[[events.MemberEvent, float], list[events.Effect]]


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
    """True once the member sees the stream as broken."""
    ended: bool = False
    """True once the leader sees the stream as ended."""
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

    def send_notice(self, notice: events.Notice) -> None:
        if self._admitted:
            self._send(notice)
        else:
            self._held.append(notice)

    def end(self, error: Exception) -> None:
        """Close the stream on the leader's side; notices in transit arrive first."""
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
        """Break the connection: notices in transit are lost, and each side notices at its own
        time."""
        if not self.broken:
            self.broken = True
            self.clock.soon(self.on_notice, 0.3)
        leader = self.leader
        if leader is not None:
            self.clock.soon(lambda: leader.process.do(lambda: leader.closed(self)), 1.0)


class Leader:
    """The edge around the driver. Writes, their fences and loading at a takeover are the real code;
    streams, calls and time are simulated."""

    def __init__(
        self,
        clock: Clock,
        etcd: SimEtcd,
        spec: JobSpec,
        limits: Limits,
        release: Release = Release.NOW,
    ) -> None:
        self.clock, self.etcd, self._spec, self._limits = clock, etcd, spec, limits
        self.process = Process(clock)
        self.release = release
        self.leads = False
        self._lead(None, StoredGenerations())
        self.connections: dict[Connection, None] = {}
        """Streams that the leader has not ended."""
        self.pending: dict[Box, None] = {}
        """Calls that are not answered yet."""
        self.check: Callable[[], None] = lambda: None
        self.log: Callable[[events.LogJobEvent], None] = lambda log: None
        self.on_event: Callable[[events.MemberEvent], None] = lambda event: None
        """Called with each event that the job accepted."""
        self.on_notice_sent: Callable[[events.Notice], None] = lambda notice: None
        """Called with each notice that the leader sends."""
        self.heartbeats: Callable[[], Iterable[tuple[events.HeartbeatReceived, int]]] = lambda: ()
        """Heartbeats of all members whose processes run, with their steps."""
        self.effects_left: int | None = None
        """Number of further actions before the leader crashes; None: it does not crash."""
        self.on_crash: Callable[[], None] = lambda: None
        self._actions: deque[Action[Connection, Box]] = deque()
        self._is_doing = False
        self._wakes_s = math.inf
        self._num_looked = 0
        self._ticks_at: tuple[float, int] = (-1.0, 0)

    def _lead(self, job: Job | None, generations: StoredGenerations) -> None:
        now_s = self.clock.now_s
        self._generations = generations
        self.job = job or Job(
            spec=self._spec, limits=self._limits, digest_of=codec.digest_of, phase_since_s=now_s
        )
        self.job.handle = self._watched(self.job.handle)  # type: ignore[method-assign]
        self.driver: JobDriver[Connection, Box] = JobDriver(self.job, now_s)

    def take_over(self) -> None:
        """Win the election, then load the durable state, and lead."""
        fence = self.etcd.elect(self)
        store = self.etcd.connected(self.process, self.release)
        # The leader store reads nothing from it.
        keyspace = cast(Keyspace, store)
        self._jobs = JobsOfRelease(LeaderStore(keyspace, lambda: fence, lambda reason: None))
        self._jobs.release = self.release
        self.process.start(self._begin())

    def _begin(self) -> Steps[None]:
        yield Wait(lambda: False, self.etcd.away_s())
        stored = self.etcd.load(self._spec)
        self._jobs.keep(self._spec.job, stored.state if stored is not None else None)
        if stored is None:
            self._lead(None, StoredGenerations())
        else:
            self._lead(stored.restored_job(self._limits, self.clock.now_s), stored.generations)
        self.leads = True
        self._plan()

    @property
    def writes(self) -> bool:
        """True if some decisions are not durable yet."""
        return self.driver.is_writing

    # --- calls ---

    def attend(self, stream: Connection, event: events.MemberJoined) -> None:
        if not self._serves:
            stream.end(Unavailable("this coordinator does not lead"))
            return
        stream.leader = self
        self.connections[stream] = None
        self._do(self.driver.open_stream(stream, self.clock.now_s))
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
        self,
        event: events.MemberEvent,
        reply: Callable[[Exception | None], None] = lambda error: None,
    ) -> None:
        if not self._serves:
            reply(Unavailable("this coordinator does not lead"))
            return

        def answered() -> None:
            self.pending.pop(box, None)
            error = box.error
            self._check_answer(event, error)
            reply(RefusedCall(error.refusal) if isinstance(error, events.EventRefused) else error)

        box = Box(answered)
        self.pending[box] = None
        actions = self.driver.submit(event, box, self.clock.now_s)
        self._do(actions)

    def closed(self, stream: Connection) -> None:
        stream.ended = True
        self.connections.pop(stream, None)
        if self.process.alive:
            self._do(self.driver.end_stream(stream, self.clock.now_s))

    def end(self) -> None:
        """End the leader, which is dead, or deposed and has noticed it."""
        self.leads = False
        self.process.die()
        self._actions.clear()
        error = Unavailable("this coordinator does not lead any more")
        self._do(self.driver.end(error))
        for box in list(self.pending):
            box.set(error)

    @property
    def _serves(self) -> bool:
        return self.leads and self.driver.failure is None

    # --- time ---

    def _plan(self) -> None:
        wakes_s = self.driver.wakes_s(self.clock.now_s)
        if not self.leads or wakes_s >= self._wakes_s:
            return
        self._wakes_s = wakes_s
        delay_s = max(wakes_s - self.clock.now_s, 0.0)
        self.clock.later(delay_s, lambda: self.process.do(lambda: self._wake(wakes_s)))

    def _wake(self, planned_s: float) -> None:
        if self._wakes_s != planned_s:
            return
        self._wakes_s, now_s = math.inf, self.clock.now_s
        if self._serves:
            at_s, count = self._ticks_at
            self._ticks_at = (now_s, count + 1 if at_s == now_s else 1)
            reason = f"{self.job.phase}: {self.job.reason}"
            assert self._ticks_at[1] < MAX_TICKS_AT_ONCE, f"it ticks without end; {reason}"
            for beat, step in self.heartbeats():
                self.driver.heartbeat(beat, step, now_s)
            actions = self.driver.wake(now_s)
            self.check()
            self._do(actions)
        else:
            self._plan()

    # --- the driver's actions ---

    def _do(self, actions: Sequence[Action[Connection, Box]]) -> None:
        self._actions.extend(actions)
        if self._is_doing:
            return
        self._is_doing = True
        while self._actions:
            if not self._crashes():
                self._act(self._actions.popleft())
        self._is_doing = False
        self._plan()

    def _crashes(self) -> bool:
        if self.effects_left is None:
            return False
        self.effects_left -= 1
        if self.effects_left >= 0:
            return False
        self.effects_left = None
        self.on_crash()
        return True

    def _act(self, action: Action[Connection, Box]) -> None:
        match action:
            case PersistWrite():
                self.process.start(self._persist(action.write))
            case SendOnStream():
                self._check_notice(action.notice)
                self.on_notice_sent(action.notice)
                action.stream.send_notice(action.notice)
            case CloseStream():
                self.connections.pop(action.stream, None)
                action.stream.end(Unavailable("the stream is over"))
            case AnswerCall():
                action.call.set(action.error)
            case events.LogJobEvent():
                self.log(action)
            case PublishRecord():
                assert action.record in self.etcd.written(action.record), "published too early"
            case ForgetMember():
                pass

    def _persist(self, write: JobWrite) -> Steps[None]:
        try:
            yield from awaited(self._jobs.persist(write, self._generations))
        except NotLeader:
            self.end()
        else:
            self._do(self.driver.written(self.clock.now_s))

    # --- invariants ---

    def _watched(self, handle: Handle) -> Handle:
        """Check that the job refuses events of processes that are not members, and that a refused
        event changes nothing."""

        def watched(event: events.MemberEvent, now_s: float) -> list[events.Effect]:
            stranger = self._is_stranger(event)
            self._num_looked += isinstance(event, MAY_BE_REFUSED)
            looks = stranger or (isinstance(event, MAY_BE_REFUSED) and not self._num_looked % 4)
            if looks:
                # Apply first what time alone changes.
                pausing.keep_limits(self.job, now_s)
            before = repr(self.job) if looks else ""
            try:
                effects = handle(event, now_s)
            except events.EventRefused:
                assert not looks or repr(self.job) == before, f"refused, and yet: {event}"
                raise
            assert not stranger, f"accepted from a process that is not a member: {event}"
            self.on_event(event)
            self.check()
            return effects

        return watched

    def _is_stranger(self, event: events.MemberEvent) -> bool:
        member = self.job.members.get(event.member_id)
        known = member is not None and member.incarnation == event.incarnation
        return not known and not isinstance(event, events.MemberJoined)

    def _check_answer(self, event: events.MemberEvent, error: Exception | None) -> None:
        """Check that an admission or a fence is durable before it is answered."""
        if self.etcd.leader is not self or self.job.loss_refusal is not None:
            return
        member = self.job.members.get(event.member_id)
        is_member = member is not None and member.incarnation == event.incarnation
        if error is None and isinstance(event, events.MemberJoined) and is_member:
            assert self._durable_key_of(event), f"{event.member_id} was admitted too early"
        fenced = events.RefusalKind.FENCED
        if (
            isinstance(error, events.EventRefused)
            and error.refusal.kind == fenced
            and not is_member
        ):
            assert not self._durable_key_of(event), f"{event.member_id} was fenced too early"

    def _durable_key_of(self, event: events.MemberEvent) -> bool:
        job = self._spec.job
        return self.etcd.incarnation_of(job, event.member_id) == event.incarnation

    def _check_notice(self, notice: events.Notice) -> None:
        if isinstance(notice, events.OutcomeNotice):
            assert notice.record in self.etcd.written(notice.record), (
                f"sent before it was durable: {notice}"
            )
