"""Runs one job's state machine: events in, one at a time; effects out, in order.

The state machine decides and this carries out: it writes to etcd before it tells, keeps the
members' streams, watches their heartbeats and wakes the machine at its deadlines.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

import structlog

from shoal_proto.errors import (
    Fenced,
    GenerationBroken,
    NotLeader,
    RetryError,
    ShoalError,
    UnknownGeneration,
)
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_server.coordinator import codec, durable
from shoal_server.coordinator.leases import HostLeases
from shoal_server.core.events import (
    Admit,
    Disconnected,
    Effect,
    Event,
    Expel,
    Finish,
    Log,
    Lost,
    Refused,
    Tell,
    Write,
)
from shoal_server.core.job import Job
from shoal_server.core.member import Member
from shoal_server.core.phases import Phase
from shoal_server.core.roster import Record
from shoal_server.etcd import keys
from shoal_server.etcd.api import Operation, Put
from shoal_server.status.board import StatusBoard
from shoal_server.status.from_core import LastSeen

log = structlog.get_logger(__name__)

MAX_NOTICES = 1000
MAX_RECORDS = 100
ETCD_RETRY_S = 0.2
MAX_TRANSACTION = 100  # etcd takes 128 operations by default


@dataclass(kw_only=True)
class Stream:
    """The notices on their way to one member. None ends it."""

    member_id: str
    incarnation: str
    notices: asyncio.Queue[pb.Notice | None] = field(
        default_factory=lambda: asyncio.Queue(MAX_NOTICES)
    )
    ended: bool = False

    def put(self, notice: pb.Notice) -> None:
        if self.ended:
            return
        try:
            self.notices.put_nowait(notice)
        except asyncio.QueueFull:
            # It attends again and is told the state as it is then.
            log.warning("stream_overflowed", member=self.member_id)
            self.end()

    def end(self) -> None:
        """Let the reader take what is queued, then stop."""
        if not self.ended:
            self.ended = True
            if self.notices.full():
                self.notices.get_nowait()
            self.notices.put_nowait(None)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What all jobs of one coordinator share."""

    jobs: durable.DurableJobs
    leases: HostLeases
    board: StatusBoard
    clock: Callable[[], float]
    on_lost_leadership: Callable[[str], None]
    on_member_lost: Callable[[str, str, str], None]
    """(job, member_id, incarnation), for each member that is gone."""
    on_change: Callable[[str], None]
    """(job), after each step of its state machine and before anybody is told of it."""


class JobActor:
    def __init__(
        self, job: Job, surroundings: Surroundings, records: Sequence[Record] = ()
    ) -> None:
        self.job = job
        self.records: OrderedDict[int, Record] = OrderedDict(
            (r.roster.generation, r) for r in records[-MAX_RECORDS:]
        )
        self.last_seen: dict[str, LastSeen] = {}
        self._around = surroundings
        self._streams: dict[str, Stream] = {}
        self._turn = asyncio.Lock()
        self._woken = asyncio.Event()
        self._recorded = asyncio.Condition()
        self._scanned_s = surroundings.clock()
        self._background: set[asyncio.Task[None]] = set()

    # --- from the services ---

    async def submit(self, event: Event) -> None:
        """Let the state machine take the event, and carry out what follows.

        Raises what it refuses with.
        """
        async with self._turn:
            try:
                effects = self.job.handle(event, self._around.clock())
            except Refused as refused:
                raise codec.refusal_to_error(refused.refusal, self.job.last_generation) from refused
            await self._carry_out(effects)
        self._woken.set()

    def open(self, member_id: str, incarnation: str) -> Stream:
        """A stream for the member's notices, in place of any it had."""
        stream = Stream(member_id=member_id, incarnation=incarnation)
        old = self._streams.get(member_id)
        self._streams[member_id] = stream
        self.seen(member_id, 0)
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

    def seen(self, member_id: str, step: int) -> None:
        """A sign of life."""
        before = self.last_seen.get(member_id)
        step = max(step, before.step if before else 0)
        self.last_seen[member_id] = LastSeen(at_s=self._around.clock(), step=step)
        member = self.job.members.get(member_id)
        if member is not None:
            self._around.leases.heard_of(member.info.host)

    def authorize(self, token: Token) -> None:
        """Raise Fenced unless the token's incarnation is a member now."""
        member = self.job.members.get(token.member_id)
        if member is None or member.incarnation != token.incarnation:
            raise Fenced(
                f"{token.member_id} is not a member of job {token.job}",
                seen=f"incarnation {token.incarnation}",
                expected=f"incarnation {member.incarnation}" if member else "a member that attends",
                fix="It may have been declared lost: join again.",
                details={"generation": str(self.job.last_generation)},
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

        def found() -> Record | None:
            if generation:
                return self.records.get(generation)
            return next(reversed(self.records.values()), None)

        async with self._recorded:
            if found() is None and wait_s > 0:
                try:
                    await asyncio.wait_for(self._recorded.wait_for(found), wait_s)
                except TimeoutError:
                    log.info("record_awaited_in_vain", job=self.job.spec.job)
        record = found()
        if record is None:
            raise UnknownGeneration(
                f"job {self.job.spec.job} has no record of generation {generation}",
                seen=str(generation),
                expected=f"1 to {self.job.last_generation}, of which the newest {MAX_RECORDS}"
                " are kept at hand",
            )
        return codec.record_to_pb(record)

    async def hold_members(self) -> None:
        """Put the members' keys under leases of this coordinator: its predecessor's run out.

        Parameter servers refuse a member whose key is gone.
        """
        await self._apply([await self._member_put(each) for each in self.job.members.values()])

    def end_streams(self) -> None:
        """Let go of every member, who then looks for the coordinator that leads."""
        for stream in self._streams.values():
            stream.end()
        self._streams.clear()

    # --- time ---

    async def run(self) -> None:
        """Wake the state machine at its deadlines, and find members that fell silent."""
        heartbeat_s = self.job.limits.heartbeat_s
        while True:
            deadline_s = self.job.next_deadline_s()
            now_s = self._around.clock()
            wait_s = heartbeat_s if deadline_s is None else min(heartbeat_s, deadline_s - now_s)
            try:
                await asyncio.wait_for(self._woken.wait(), max(wait_s, 0))
            except TimeoutError:
                self._scan()
            self._woken.clear()
            deadline_s = self.job.next_deadline_s()
            if deadline_s is not None and self._around.clock() >= deadline_s:
                async with self._turn:
                    await self._carry_out(self.job.tick(self._around.clock()))

    def _scan(self) -> None:
        """Declare lost who was not heard of for the time of a lease."""
        now_s, lease_s = self._around.clock(), self.job.limits.lease_s
        paused, self._scanned_s = now_s - self._scanned_s > lease_s / 2, now_s
        if paused:
            # It was this process that stood still, so it cannot say who was silent.
            self.last_seen = {
                m: LastSeen(at_s=now_s, step=seen.step) for m, seen in self.last_seen.items()
            }
            return
        for member in list(self.job.members.values()):
            seen = self.last_seen.get(member.member_id)
            if seen is None:
                self.seen(member.member_id, 0)
            elif now_s - seen.at_s > lease_s and member.disconnected_s is None:
                reason = f"no heartbeat for {lease_s:g} s"
                event = Lost(
                    member_id=member.member_id, incarnation=member.incarnation, reason=reason
                )
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

    async def _carry_out(self, effects: Sequence[Effect]) -> None:
        self._around.on_change(self.job.spec.job)
        pending: list[Operation] = []
        for effect in effects:
            match effect:
                case Write():
                    pending.append(durable.state_put(self.job, finished=False))
                    pending.append(durable.record_put(effect.record))
                    # Durable before anybody is told.
                    await self._apply(pending)
                    pending = []
                    await self._keep(effect.record)
                case Admit():
                    pending += await self._admission(effect)
                case Expel():
                    pending.append(durable.member_delete(self.job.spec.job, effect.member_id))
                    self._expelled(effect)
                case Finish():
                    pending.append(durable.state_put(self.job, finished=True))
                case Tell():
                    self._tell(effect)
                case Log():
                    self._note(effect)
        if pending:
            await self._apply(pending)

    async def _apply(self, operations: Sequence[Operation]) -> None:
        """Write, for as long as it takes: while etcd is away, changes wait and training goes on."""
        # A transaction may name a key once; of several writes the last is the one that counts.
        last = list({operation.key: operation for operation in operations}.values())
        # The record stands last and so is written only once all before it are.
        for start in range(0, len(last), MAX_TRANSACTION):
            await self._apply_once(last[start : start + MAX_TRANSACTION])

    async def _apply_once(self, operations: Sequence[Operation]) -> None:
        while True:
            try:
                await self._around.jobs.apply(operations)
                return
            except NotLeader as error:
                self._around.on_lost_leadership(str(error))
                raise
            except RetryError as error:
                log.warning("etcd_away", job=self.job.spec.job, reason=str(error))
                await asyncio.sleep(ETCD_RETRY_S)

    async def _admission(self, effect: Admit) -> list[Operation]:
        member = self.job.members.get(effect.member_id)
        if member is None:
            return []
        return [durable.state_put(self.job, finished=False), await self._member_put(member)]

    async def _member_put(self, member: Member) -> Put:
        lease = await self._around.leases.of(member.info.host)
        value = codec.member_to_json(member.incarnation, member.info)
        return Put(keys.member(self.job.spec.job, member.member_id), value, lease)

    def _expelled(self, effect: Expel) -> None:
        stream = self._streams.get(effect.member_id)
        if stream is not None and stream.incarnation == effect.incarnation:
            del self._streams[effect.member_id]
            stream.end()
        self.last_seen.pop(effect.member_id, None)
        self._around.on_member_lost(self.job.spec.job, effect.member_id, effect.incarnation)

    def _tell(self, effect: Tell) -> None:
        stream = self._streams.get(effect.member_id)
        # The stream may be a successor's already, which this notice is not for.
        if stream is not None and stream.incarnation == effect.incarnation:
            stream.put(codec.notice_to_pb(effect.notice, self.job.last_generation))

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

    async def _keep(self, record: Record) -> None:
        async with self._recorded:
            self.records[record.roster.generation] = record
            while len(self.records) > MAX_RECORDS:
                self.records.popitem(last=False)
            self._recorded.notify_all()
