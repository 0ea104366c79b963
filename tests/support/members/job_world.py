"""A job, and members that behave as the real client does, in virtual time."""

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal_proto.incarnation import new_incarnation
from shoal_server.core.generations.roster import (
    Generation,
    JobSpec,
    MemberInfo,
    Proposal,
    Record,
    Roster,
    Step,
    Verdict,
)
from shoal_server.core.job.job import Job
from shoal_server.core.limits import Limits
from shoal_server.core.membership import events
from shoal_server.core.membership.phases import Phase

FIELDS = {"strategy": "ddp", "schema": "s1"}


def digest_of(roster: Roster) -> str:
    return hashlib.sha256(repr(roster).encode()).hexdigest()


@dataclass(kw_only=True)
class SimMember:
    """One worker process: answers, brings up, trains, settles."""

    name: str
    incarnation: str
    proposal: Proposal
    alive: bool = True
    paused: bool = False
    refused: events.Refusal | None = None
    generation: int = 0
    """The generation it trains or brings up."""
    broken: set[int] = field(default_factory=set)
    begun: int = -1
    next_generation: int = 0
    checkpoints: tuple[int, ...] = ()
    """Steps of the complete checkpoints that it sees."""
    has_state: bool = False
    """Has been in a generation that ran: from then on it holds what all hold."""
    drained: bool = False
    """Was let go: nothing is left for it to do."""
    records: dict[int, list[Record]] = field(default_factory=dict)


class World:
    """Delivers events and notices after random delays; runs the job's clock."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        limits: Limits | None = None,
        seed: int = 0,
        max_delay_s: float = 0.0,
    ) -> None:
        self.random = random.Random(seed)
        self.max_delay_s = max_delay_s
        self.now_s = 0.0
        self.job = Job(spec=spec, limits=limits or Limits(), digest_of=digest_of)
        self.members: dict[str, SimMember] = {}
        self.gone: list[SimMember] = []
        self.written: dict[int, list[Record]] = {}
        self.log: list[str] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._starts = 0
        self._last_to: dict[str, float] = {}
        self.check: Callable[[], None] = lambda: None
        self.cut: set[tuple[str, str]] = set()
        """Pairs (from, to) of members of which the first cannot reach the second."""

    def _next_start(self) -> int:
        self._starts += 1
        return self._starts

    # --- faults and arrivals ---

    def join(
        self,
        name: str,
        fields: dict[str, str] | None = None,
        step: int = 0,
        info: MemberInfo | None = None,
        checkpoints: tuple[int, ...] = (),
    ) -> SimMember:
        proposal = Proposal(
            fields=dict(fields or FIELDS), step=Step(step), has_state=step > 0, synchronous=True
        )
        member = SimMember(
            name=name,
            incarnation=new_incarnation(self._next_start()),
            proposal=proposal,
            checkpoints=checkpoints,
        )
        if name in self.members:
            old = self.members[name]
            old.alive = False
            self.gone.append(old)
            self.later(lambda: self._handle(events.Disconnected(**self._who(old))))
        self.members[name] = member
        info = info or MemberInfo(host="h")
        self.send(member, events.Attended(**self._who(member), spec=self.job.spec, info=info))
        self.send(member, events.Proposed(**self._who(member), proposal=proposal))
        return member

    def kill(self, name: str, *, seen_by_launcher: bool = False) -> None:
        """SIGKILL. The coordinator learns of the broken stream, or from the launcher."""
        member = self.members.pop(name)
        member.alive = False
        self.gone.append(member)
        who = self._who(member)
        event = (
            events.Lost(**who, reason="its launcher saw it exit")
            if seen_by_launcher
            else events.Disconnected(**who)
        )
        self.later(lambda: self._handle(event))
        if member.generation and not seen_by_launcher:
            for other in self.members.values():
                if other.generation == member.generation:
                    self._report_broken(other)

    def drain(self, name: str) -> None:
        """An operator asks that the member leave."""
        event = events.DrainAsked(**self._who(self.members[name]), reason="spot notice")
        self.later(lambda: self._handle(event))

    def halt(self, name: str) -> None:
        """SIGSTOP, seen by the launcher; the process takes nothing in until `go_on`."""
        member = self.members[name]
        member.paused = True
        self.send(member, events.Halted(**self._who(member)))

    def go_on(self, name: str) -> None:
        """SIGCONT, seen by the launcher."""
        member = self.members[name]
        member.paused = False
        self.send(member, events.Continued(**self._who(member)))

    def complete(self, name: str) -> None:
        """The process has done all its work and ends."""
        member = self.members.pop(name)
        self.gone.append(member)
        self.send(member, events.Left(**self._who(member), completed=True, reason="done"))

    def _report_broken(self, member: SimMember) -> None:
        generation = Generation(member.generation)
        self.send(
            member,
            events.Broke(**self._who(member), generation=generation, error="connection reset"),
        )

    # --- time ---

    def later(self, act: Callable[[], None], delay_s: float | None = None) -> None:
        if delay_s is None:
            delay_s = self.random.uniform(0, self.max_delay_s)
        self._count += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._count, act))

    def run(self, until_s: float) -> None:
        """Deliver all that is due up to `until_s`; deadlines of the job included."""
        for _ in range(200_000):
            deadline_s = self.job.next_deadline_s()
            queued_s = self._queue[0][0] if self._queue else float("inf")
            next_s = min(queued_s, deadline_s if deadline_s is not None else float("inf"))
            if next_s > until_s:
                self.now_s = until_s
                return
            self.now_s = max(self.now_s, next_s)
            if queued_s <= next_s:
                heapq.heappop(self._queue)[2]()
            else:
                self._effects(self.job.tick(self.now_s))
            self.check()
        raise AssertionError(f"the job does not come to rest: {self.job.reason}")

    # --- between member and job ---

    @staticmethod
    def _who(member: SimMember) -> dict[str, str]:
        return {"member_id": member.name, "incarnation": member.incarnation}

    def send(self, member: SimMember, event: events.Event) -> None:
        """A call: calls of one member arrive in the order in which they were made."""
        self._in_order(f"from {member.incarnation}", lambda: self._handle(event, member))

    def _in_order(self, line: str, act: Callable[[], None]) -> None:
        arrival_s = self.now_s + self.random.uniform(0, self.max_delay_s)
        arrival_s = max(arrival_s, self._last_to.get(line, 0.0))
        self._last_to[line] = arrival_s
        self.later(act, arrival_s - self.now_s)

    def _handle(self, event: events.Event, sender: SimMember | None = None) -> None:
        try:
            self._effects(self.job.handle(event, self.now_s))
        except events.Refused as refused:
            if sender is not None and sender.alive:
                sender.refused = refused.refusal
                self._drop(sender)

    def _drop(self, member: SimMember) -> None:
        """The refused process raises and ends."""
        member.alive = False
        if self.members.get(member.name) is member:
            del self.members[member.name]
        self.gone.append(member)
        self.later(lambda: self._handle(events.Disconnected(**self._who(member))))

    def _effects(self, effects: list[events.Effect]) -> None:
        for effect in effects:
            match effect:
                case events.Write():
                    self.written.setdefault(effect.record.roster.generation, []).append(
                        effect.record
                    )
                case events.Tell():
                    self._tell(effect)
                case events.Log():
                    self.log.append(f"{self.now_s:.3f} {effect.kind}: {effect.reason}")
                case _:
                    pass

    def _tell(self, tell: events.Tell) -> None:
        member = self.members.get(tell.member_id)
        if member is not None and member.incarnation == tell.incarnation:
            self._in_order(f"to {member.incarnation}", lambda: self._take(member, tell.notice))

    def _take(self, member: SimMember, notice: events.Notice) -> None:
        if not member.alive or member.paused:
            return
        who = self._who(member)
        match notice:
            case events.PrepareNotice():
                generation = notice.roster.generation
                names = notice.roster.member_ids
                failed = tuple((n, "refused") for n in names if (member.name, n) in self.cut)
                answer = events.Answered(
                    **who,
                    generation=generation,
                    digest=notice.digest,
                    unreachable=failed,
                    checkpoint_steps=tuple(map(Step, member.checkpoints)),
                )
                self.send(member, answer)
            case events.OutcomeNotice():
                self._take_outcome(member, notice.record)
            case events.StopAtNotice():
                leaves = notice.generation not in member.records
                if member.next_generation == notice.generation and not leaves:
                    member.proposal = Proposal(
                        fields=member.proposal.fields, step=notice.step, has_state=True
                    )
                    self._bring_up(member, notice.generation)
            case events.BreakNotice():
                self._take_break(member, notice.generation)
            case events.RunningNotice():
                member.has_state = True
            case events.DrainNotice() if notice.now:
                self._leave_drained(member)
            case events.RefusedNotice():
                member.refused = notice.refusal
                self._drop(member)
            case _:
                pass

    def _leave_drained(self, member: SimMember) -> None:
        member.drained = True
        self.send(member, events.Left(**self._who(member), completed=False, reason="drained"))
        self._drop(member)

    def _take_outcome(self, member: SimMember, record: Record) -> None:
        generation = record.roster.generation
        if record.roster.holds(member.name, member.incarnation):
            member.records.setdefault(generation, []).append(record)
        if record.verdict is Verdict.COMMITTED:
            if (
                record.roster.planned
                and member.generation
                and member.generation not in member.broken
            ):
                member.next_generation = generation
                offer = events.Offered(
                    **self._who(member), generation=generation, next_step=Step(member.begun + 1)
                )
                self.send(member, offer)
            else:
                self._bring_up(member, generation)
        elif member.generation == generation:
            self._take_break(member, generation)
        elif member.next_generation == generation:
            member.next_generation = 0

    def _bring_up(self, member: SimMember, generation: Generation) -> None:
        member.generation, member.next_generation = generation, 0
        self.send(member, events.BecameReady(**self._who(member), generation=generation))

    def _take_break(self, member: SimMember, generation: int) -> None:
        if generation in member.broken:
            return
        member.broken.add(generation)
        if member.generation == generation or member.next_generation:
            member.next_generation = 0
            step = Step(max(member.begun, 0))
            self.send(
                member,
                events.Settled(
                    **self._who(member),
                    step=step,
                    has_state=member.has_state or member.begun > 0,
                    left=Generation(member.generation),
                ),
            )

    # --- what tests ask ---

    def train(self, step: int) -> None:
        """All members of the running generation have begun this step."""
        for member in self.members.values():
            member.begun = step

    def beat(self, name: str, step: int) -> None:
        """A heartbeat of the member, which has so many steps behind it."""
        self.job.heard_of_step(name, self.members[name].incarnation, Step(step))

    def roster(self) -> list[str]:
        assert self.job.running is not None, f"{self.job.phase}: {self.job.reason}"
        return [e.member_id for e in sorted(self.job.running.entries, key=lambda e: e.rank)]

    def is_running(self) -> bool:
        return self.job.phase is Phase.RUNNING
