"""Runs one job's state machine: events in, one at a time; effects out, in order.

The state machine decides and this carries out: it writes to etcd before it tells, keeps the
members' streams, watches their heartbeats and wakes the machine at its deadlines.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass

import structlog

from shoal_proto.errors import (
    Fenced,
    GenerationBroken,
    NotLeader,
    ShoalError,
    Unavailable,
)
from shoal_proto.incarnation import public_id
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_server.coordinator.jobs.liveness import Liveness
from shoal_server.coordinator.jobs.streams import Encoder, Stream
from shoal_server.coordinator.persistence import codec, durable
from shoal_server.coordinator.persistence.records import Records
from shoal_server.coordinator.persistence.stored_jobs import StoredJobs
from shoal_server.core.clocks import Who
from shoal_server.core.generations.roster import Record, Step
from shoal_server.core.membership.events import (
    Admit,
    Beaten,
    Disconnected,
    Effect,
    Event,
    Expel,
    Finish,
    Log,
    Lost,
    Refused,
    Save,
    Tell,
    Write,
)
from shoal_server.core.membership.job import Job
from shoal_server.core.membership.phases import Phase
from shoal_server.status.board import StatusBoard
from shoal_server.status.from_core import LastSeen

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What all jobs of one coordinator share."""

    jobs: durable.DurableJobs
    stored: StoredJobs
    board: StatusBoard
    clock: Callable[[], float]
    on_lost_leadership: Callable[[str], None]
    on_failed: Callable[[str, Exception], ShoalError]
    """(job, why) of one that cannot go on, which concerns no other: what its callers are told."""
    on_member_lost: Callable[[str, str, str], None]
    """(job, member_id, incarnation), for each member that is gone."""
    on_change: Callable[[str], None]
    """(job), after each step of its state machine and before anybody is told of it."""


class JobActor:
    def __init__(
        self,
        job: Job,
        surroundings: Surroundings,
        records: Sequence[Record] = (),
        *,
        read_records: Callable[[], Awaitable[Sequence[Record]]] | None = None,
    ) -> None:
        """`read_records` gets records that are read when they are asked for."""
        self.job = job
        self.inherited_generation = job.last_generation
        """The newest that another leader formed; 0 if this one has seen the whole job."""
        self.records = Records(job.spec.job, records, read_records)
        self._around = surroundings
        self._liveness = Liveness(job.limits, job.members, surroundings.clock())
        self._streams: dict[str, Stream] = {}
        self._encoder = Encoder(job)
        self._writes = durable.JobWrites(job, surroundings.jobs)
        # What events led to while a write is under way; each of their callers waits for it.
        self._waiting: list[tuple[Sequence[Effect], asyncio.Future[None]]] = []
        self._callers: set[asyncio.Future[None]] = set()
        self._carrying = False
        self._carries_since_s = math.inf
        self._failure: Exception | None = None
        self._woken = asyncio.Event()
        self._wakes_s = -math.inf
        self._scanned_s = surroundings.clock()
        self._background: set[asyncio.Task[None]] = set()

    # --- from the services ---

    async def submit(self, event: Event) -> None:
        """Let the state machine take the event, and carry out what follows.

        Raises what it refuses with.
        """
        if self._failure is not None:
            raise self._failure
        try:
            effects = self.job.handle(event, self._around.clock())
        except Refused as refused:
            error = codec.refusal_to_error(refused.refusal, self.job.last_generation)
            # What it is refused for must be durable before it hears of it.
            await self._carried(())
            raise error from refused
        await self._follow(effects)

    async def _follow(self, effects: Sequence[Effect]) -> None:
        self._around.on_change(self.job.spec.job)
        deadline_s = self.job.next_deadline_s()
        if deadline_s is not None and deadline_s < self._wakes_s:
            self._woken.set()
        await self._carried(effects)

    def open(self, member_id: str, incarnation: str, *, keeps_prepare: bool = False) -> Stream:
        """A stream for the member's notices, in place of any it had."""
        stream = Stream(member_id=member_id, incarnation=incarnation, keeps_prepare=keeps_prepare)
        old = self._streams.get(member_id)
        self._streams[member_id] = stream
        self._liveness.attended(member_id, self._around.clock())
        if old is not None:
            old.end()
        return stream

    def closed(self, stream: Stream) -> None:
        """The stream's call is over. If the member did not open another, it is disconnected."""
        if self._streams.get(stream.member_id) is not stream:
            return
        del self._streams[stream.member_id]
        event = Disconnected(member_id=stream.member_id, incarnation=stream.incarnation)
        self._in_background(self._submit_if_member(event))

    def seen(self, member_id: str, incarnation: str, step: int) -> None:
        """A heartbeat."""
        self._liveness.beat(member_id, step, self._around.clock())
        self.job.heard_of_step(member_id, incarnation, Step(step))

    def told(self, event: Beaten) -> None:
        """What a heartbeat says of the member's trainer."""
        self.job.beaten(event, self._around.clock())

    @property
    def last_seen(self) -> Mapping[str, LastSeen]:
        """The newest sign of life of each member."""
        return {
            name: LastSeen(at_s=pulse.at_s, step=pulse.step)
            for name, pulse in self._liveness.pulses()
        }

    def trainers(self) -> list[Who]:
        """Who may be in a step at their own pace: the members of the newest rosters."""
        rosters = [r for r in (self.job.previous, self.job.running) if r and not r.synchronous]
        members = [m for roster in rosters for m in self.job.members_of(roster)]
        return [Who(m.member_id, m.incarnation) for m in members]

    def authorize(self, token: Token) -> None:
        """Raise Fenced unless the token's incarnation is a member now."""
        member = self.job.members.get(token.member_id)
        if member is None or member.incarnation != token.incarnation:
            if refusal := self.job.attendance.expelled.get(token.incarnation):
                raise codec.refusal_to_error(refusal, self.job.last_generation)
            replaced = {"replaced_by": public_id(member.incarnation)} if member else {}
            raise Fenced(
                f"{token.member_id} is not a member of job {token.job}",
                seen=f"process {public_id(token.incarnation)}",
                expected=f"process {public_id(member.incarnation)}"
                if member
                else "a member that attends",
                fix="It may have been declared lost: join again.",
                details={"generation": str(self.job.last_generation), **replaced},
            )

    def authorize_generation(self, token: Token) -> None:
        """Raise Fenced or GenerationBroken unless the token is of a generation in force."""
        self.authorize(token)
        in_force = self.generations_in_force()
        if token.generation not in in_force:
            raise GenerationBroken(
                f"generation {token.generation} of job {token.job} is not in force",
                seen=f"generation {token.generation}",
                expected=f"one of {in_force}" if in_force else "the next one to form",
                fix="Settle and wait for the next generation.",
                details={"generation": str(self.job.last_generation)},
            )

    def generations_in_force(self) -> list[int]:
        """The one that trains, and the one that is being brought up."""
        coming = self.job.attempt if self.job.phase is Phase.COMMITTED else None
        return [r.generation for r in (self.job.running, coming) if r is not None]

    async def record(self, generation: int, wait_s: float) -> pb.GenerationRecord:
        """The decided record of a generation (0: the newest), waiting up to `wait_s` for it."""
        return codec.record_to_pb(await self.records.get(generation, wait_s))

    async def carried_out(self, within_s: float) -> None:
        """Wait until all that is decided is durable. Raises Unavailable, or what writing raised."""
        try:
            async with asyncio.timeout(within_s):
                await self._carried(())
        except TimeoutError:
            raise Unavailable(
                f"what was decided for job {self.job.spec.job} is not in etcd yet",
                seen=f"nothing written within {within_s:g} s",
                expected="an etcd that answers",
            ) from None

    async def end(self, why: ShoalError | None = None) -> None:
        """Let go of every member, who then looks for the coordinator that leads.

        Who waits for a write waits no longer: while etcd is away its successor may give up a
        member that is still held here. And nothing is written any more: what outlived its term
        would be written in the next one, if that is this coordinator's too.
        """
        self._failure = why or NotLeader("this coordinator no longer leads")
        writing = list(self._background)
        for task in writing:
            task.cancel()
        await asyncio.gather(*writing, return_exceptions=True)
        for done in tuple(self._callers):
            if not done.done():
                _settle(done, self._failure)
        for stream in self._streams.values():
            stream.end()
        self._streams.clear()

    # --- time ---

    async def run(self) -> None:
        """Wake the state machine at its deadlines, and find members that fell silent.

        Returns once the job is finished: nobody is there any more, and nothing happens by itself.
        """
        clock, heartbeat_s = self._around.clock, self.job.limits.heartbeat_s
        while self.job.phase is not Phase.FINISHED:
            deadline_s, scan_s = self._next_deadline_s(), self._scanned_s + heartbeat_s
            self._wakes_s = scan_s if deadline_s is None else min(scan_s, deadline_s)
            try:
                async with asyncio.timeout(max(self._wakes_s - clock(), 0)):
                    await self._woken.wait()
            except TimeoutError:
                pass  # it is time
            self._woken.clear()
            if clock() >= scan_s:
                self._scan()
            deadline_s = self._next_deadline_s()
            if deadline_s is not None and clock() >= deadline_s:
                await self._follow(self.job.tick(clock()))

    def _next_deadline_s(self) -> float | None:
        """While etcd is away no time passes for the members: they cannot hear what to do."""
        stalled_s = self._around.clock() - self._carries_since_s
        return None if stalled_s > self.job.limits.heartbeat_s else self.job.next_deadline_s()

    def _scan(self) -> None:
        """Declare lost who was silent for longer than the unevenness of its heartbeats explains."""
        now_s, lease_s = self._around.clock(), self.job.limits.lease_s
        # Where it was this process that stood still, it cannot say who was silent. Nor where it was
        # etcd: a member beats only once its attendance is durable.
        paused = now_s - self._scanned_s > lease_s / 2 or self._carries_since_s < self._scanned_s
        self._scanned_s = now_s
        if paused:
            self._liveness.resume(now_s)
            return
        for name in self._liveness.late(now_s):
            member = self.job.members.get(name)
            if member is None:
                self._liveness.forget(name)
            elif member.disconnected_s is None and (reason := self._liveness.why_lost(name, now_s)):
                event = Lost(member_id=name, incarnation=member.incarnation, reason=reason)
                self._in_background(self._submit_if_member(event))

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _submit_if_member(self, event: Event) -> None:
        try:
            await self.submit(event)
        except Fenced:
            log.debug("event_of_a_former_member", member=event.member_id)
        except ShoalError as error:
            log.warning("event_not_taken", member=event.member_id, reason=str(error))

    # --- effects ---

    async def _carried(self, effects: Sequence[Effect]) -> None:
        """Return once these effects, and all that were to come before them, are carried out."""
        if self._failure is not None:
            raise self._failure
        if not self._carrying and not any(isinstance(effect, _DURABLE) for effect in effects):
            for effect in effects:
                self._act(effect)
            return
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((effects, done))
        self._callers.add(done)
        done.add_done_callback(self._callers.discard)
        if not self._carrying:
            self._carrying = True
            self._in_background(self._carry_on())
        await done

    async def _carry_on(self) -> None:
        """Carry out what waits, in order. What many events led to is written in one go."""
        while self._waiting:
            batch, self._waiting = self._waiting, []
            self._carries_since_s = self._around.clock()
            try:
                for effects, _ in batch:
                    await self._carry_out(effects)
                await self._writes.flush()
            except Exception as error:  # noqa: BLE001 - told to all who wait
                self._fail(error)
                batch += self._waiting
                self._waiting = []
            waited_s = self._around.clock() - self._carries_since_s
            if waited_s > self.job.limits.heartbeat_s:
                self.job.postpone(waited_s)
            for _, done in batch:
                # The call that waited may have been cancelled.
                if not done.done():
                    _settle(done, self._failure)
        self._carrying, self._carries_since_s = False, math.inf
        self._woken.set()

    def _fail(self, error: Exception) -> None:
        """Let nothing leave any more: the state is ahead of what is durable."""
        self._failure = error
        if isinstance(error, NotLeader):
            self._around.on_lost_leadership(str(error))
        else:
            log.error("effects_failed", job=self.job.spec.job, error=repr(error))
            self._failure = self._around.on_failed(self.job.spec.job, error)

    async def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Write():
                    # Durable before anybody is told.
                    await self._writes.flush(effect.record)
                    self.records.keep(effect.record)
                case Admit():
                    member = self.job.members.get(effect.member_id)
                    # It may be gone by now, or replaced.
                    if member is not None and member.incarnation == effect.incarnation:
                        self._writes.admit(member)
                case Expel():
                    self._writes.expel(effect.member_id)
                    self._expelled(effect)
                case Save():
                    self._writes.save()
                    await self._writes.flush()
                case Finish():
                    self._writes.finish()
                    await self._writes.flush()
                case _:
                    self._act(effect)

    def _act(self, effect: Effect) -> None:
        match effect:
            case Tell():
                self._tell(effect)
            case Log():
                self._note(effect)

    def _expelled(self, effect: Expel) -> None:
        stream = self._streams.get(effect.member_id)
        if stream is not None and stream.incarnation == effect.incarnation:
            del self._streams[effect.member_id]
            stream.end()
        self._liveness.forget(effect.member_id)
        self._around.on_member_lost(self.job.spec.job, effect.member_id, effect.incarnation)

    def _tell(self, effect: Tell) -> None:
        stream = self._streams.get(effect.member_id)
        # The stream may be a successor's already, which this notice is not for.
        if stream is not None and stream.incarnation == effect.incarnation:
            stream.put(effect.notice, self._encoder)

    def _note(self, effect: Log) -> None:
        job = self.job.spec.job
        log.info(
            effect.kind,
            job=job,
            member=effect.member_id,
            generation=effect.generation,
            reason=effect.reason,
        )
        self._around.board.event(
            job,
            effect.kind,
            effect.reason,
            member_id=effect.member_id,
            generation=effect.generation,
        )


_DURABLE = (Write, Admit, Expel, Save, Finish)


def _settle(done: asyncio.Future[None], failure: Exception | None) -> None:
    if failure is None:
        done.set_result(None)
    else:
        done.set_exception(failure)
