"""A job, and members that behave as the real client does, in virtual time."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from shoal_client.membership import member_events as ev
from shoal_client.membership.identity import Identity
from shoal_client.membership.member_core import MemberCore
from shoal_proto.incarnation import new_incarnation, public_id
from shoal_proto.v1 import membership_pb2 as pb
from shoal_server.coordinator.jobs.requests import event_of
from shoal_server.coordinator.persistence import codec
from shoal_server.coordinator.persistence.codec import digest_of
from shoal_server.core.generations.roster import (
    Generation,
    GenerationRecord,
    JobSpec,
    MemberInfo,
    Proposal,
    Step,
    Verdict,
)
from shoal_server.core.job.job import Job
from shoal_server.core.job.restore import SavedJob, restored
from shoal_server.core.limits import Limits
from shoal_server.core.membership import events
from shoal_server.core.membership.member import MemberState
from shoal_server.core.membership.phases import OVER, Phase

REJECTION = pb.Rejection(field="scratch", seen="3 GiB free", expected="10 GiB free")
FIELDS = {"strategy": "ddp", "schema": "s1"}


@dataclass(kw_only=True)
class SimMember:
    """A worker process: the real core decides, and its trainer acts at once."""

    name: str
    incarnation: str
    proposal: Proposal
    core: MemberCore
    alive: bool = True
    paused: bool = False
    refused: events.Refusal | None = None
    generation: int = 0
    """The generation that the member trains in or brings up."""
    checkpoints: tuple[int, ...] = ()
    """Steps of the complete checkpoints that the member sees."""
    has_state: bool = False
    """True once the member was in a generation that ran: it then holds the common state."""
    enough_for_call: int = 0
    """Number of members needed for the shared call that the script is in; 0: it is in none."""
    finished: bool = False
    """True if the member's work is done, and it stays."""
    drained: bool = False
    """True if the member was drained."""
    records: dict[int, list[GenerationRecord]] = field(default_factory=dict)
    _begun: int = -1
    _settled: int = 0

    @property
    def begun(self) -> int:
        """The last step that the member has begun."""
        return self._begun

    @begun.setter
    def begun(self, step: int) -> None:
        if isinstance(self.core.begin_step(step, 0.0), ev.StepBegun):
            self._begun = step

    @property
    def broken(self) -> set[int]:
        """The generations that the member knows to be over."""
        return {number for number in self.records if self.core.track.is_broken(number)}

    def has_to_stop(self) -> bool:
        """True, once, if the generation is over and the member has not reported its step yet."""
        over = self.core.track.is_broken(self.generation) and self._settled < self.generation
        self._settled = self.generation if over else self._settled
        return over


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
        self.written: dict[int, list[GenerationRecord]] = {}
        self.log: list[str] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.next_start = 1
        """Time at which the next process starts, by its host's clock."""
        self._last_to: dict[str, float] = {}
        self.check: Callable[[], None] = lambda: None
        self.cut: set[tuple[str, str]] = set()
        """Pairs (from, to) of members; the first cannot reach the second."""
        self.rejecting: set[str] = set()
        """Members whose validators reject every roster."""

    # --- faults and arrivals ---

    def join(
        self,
        name: str,
        fields: dict[str, str] | None = None,
        step: int = 0,
        info: MemberInfo | None = None,
        checkpoints: tuple[int, ...] = (),
        *,
        optional_fields: dict[str, str] | None = None,
        stateless: bool = False,
        synchronous: bool = True,
    ) -> SimMember:
        proposal = Proposal(
            fields=dict(fields or FIELDS),
            step=Step(step),
            has_state=step > 0,
            synchronous=synchronous,
            optional_fields=dict(optional_fields or {}),
        )
        incarnation = new_incarnation(self.next_start)
        self.next_start += 1
        member = SimMember(
            name=name,
            incarnation=incarnation,
            proposal=proposal,
            core=MemberCore(self._identity(name, incarnation)),
            checkpoints=checkpoints,
        )
        if name in self.members:
            old = self.members[name]
            old.alive = False
            self.gone.append(old)
            self.later(lambda: self.deliver(events.StreamDisconnected(**self.process_of(old))))
        self.members[name] = member
        info = info or MemberInfo(host="h")
        self.send(
            member, events.MemberJoined(**self.process_of(member), spec=self.job.spec, info=info)
        )
        admitted = pb.Admitted(limits=codec.limits_to_pb(self.job.limits))
        self._step(member, ev.NoticeReceived(notice=pb.Notice(admitted=admitted)))
        message = pb.Proposal(
            fields=proposal.fields,
            step=step,
            has_state=step > 0,
            synchronous=synchronous,
            optional_fields=proposal.optional_fields,
            stateless=stateless,
        )
        self._step(member, ev.ProposalMade(proposal=message))
        return member

    def _identity(self, name: str, incarnation: str) -> Identity:
        return Identity(
            spec=pb.JobSpec(job=self.job.spec.job),
            member_id=name,
            incarnation=incarnation,
            public_id=public_id(incarnation),
            info=pb.MemberInfo(),
        )

    def attend_again(self, name: str) -> None:
        """Connect the member to a new leader."""
        member = self.members[name]
        spec, info = self.job.spec, MemberInfo(host="h")
        generation = Generation(member.generation)
        joined = events.MemberJoined(
            **self.process_of(member), spec=spec, info=info, generation=generation
        )
        self.send(member, joined)
        admitted = pb.Admitted(limits=codec.limits_to_pb(self.job.limits))
        self._step(member, ev.NoticeReceived(notice=pb.Notice(admitted=admitted)))

    def change_leader(self) -> None:
        """Restore the job from its durable state; the living members attend the new leader."""
        old = self.job
        newest = [records[-1] for _, records in sorted(self.written.items())]
        committed = [None, None, *(r for r in newest if r.verdict is Verdict.COMMITTED)]
        members = tuple(
            MemberState(
                member_id=each.member_id,
                incarnation=each.incarnation,
                info=each.info,
                joined_s=each.joined_s,
            )
            for each in old.members.values()
        )
        saved = SavedJob(
            last_generation=old.last_generation,
            record=committed[-1],
            before=committed[-2],
            members=members,
            finished=False,
            reason=old.reason,
            progress=old.progress,
            tally=replace(old.tally),
            stopping=old.stop_reason,
            done=tuple(old.table.finished),
            completing=old.is_completing and old.phase not in OVER,
        )
        self.job = restored(
            old.spec, saved, limits=old.limits, digest_of=digest_of, now_s=self.now_s
        )
        for name in self.members:
            self.attend_again(name)

    def kill(self, name: str, *, seen_by_launcher: bool = False) -> None:
        """Kill the member. The coordinator sees the broken stream, or the launcher reports it."""
        member = self.members.pop(name)
        member.alive = False
        self.gone.append(member)
        who = self.process_of(member)
        event = (
            events.MemberLost(**who, reason="its launcher saw it exit")
            if seen_by_launcher
            else events.StreamDisconnected(**who)
        )
        self.later(lambda: self.deliver(event))
        if member.generation and not seen_by_launcher:
            for other in self.members.values():
                if other.generation == member.generation:
                    self.report_broken(other)

    def drain(self, name: str) -> None:
        """Drain the member, as an operator does."""
        event = events.DrainRequested(**self.process_of(self.members[name]), reason="spot notice")
        self.later(lambda: self.deliver(event))

    def stop(self, reason: str) -> None:
        self.apply(self.job.stop(reason, self.now_s))

    def abandon(self, reason: str) -> None:
        self.apply(self.job.abandon(reason, self.now_s))

    def retry(self, *, from_scratch: bool = False) -> None:
        self.apply(self.job.retry("asked to", self.now_s, from_scratch=from_scratch))

    def halt(self, name: str) -> None:
        """Halt the process, as the launcher reports; it receives nothing until `go_on`."""
        member = self.members[name]
        member.paused = True
        self.send(member, events.ProcessHalted(**self.process_of(member)))

    def go_on(self, name: str) -> None:
        """Continue the process, as the launcher reports."""
        member = self.members[name]
        member.paused = False
        self.send(member, events.ProcessContinued(**self.process_of(member)))

    def finish(self, name: str, *, closes: bool = False) -> None:
        """Report that a torchrun node's work is done and it stays, or that it closes the job."""
        self.members[name].finished = not closes
        done = ev.WorkDone(reason="its workers are done", finished=not closes, closes=closes)
        self._step(self.members[name], done)

    def fail(self, name: str) -> None:
        """Report that the workers of a torchrun node have failed."""
        self.report_broken(self.members[name])

    def complete(self, name: str) -> None:
        """End a process whose work is done."""
        member = self.members.pop(name)
        self.gone.append(member)
        self.send(
            member, events.MemberLeft(**self.process_of(member), completed=True, reason="done")
        )

    def report_broken(self, member: SimMember) -> None:
        self._step(member, ev.CollectiveFailed(error="connection reset"))

    # --- time ---

    def later(self, act: Callable[[], None], delay_s: float | None = None) -> None:
        if delay_s is None:
            delay_s = self.random.uniform(0, self.max_delay_s)
        self._count += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._count, act))

    def run(self, until_s: float) -> None:
        """Deliver everything that is due up to `until_s`, including deadlines of the job."""
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
                self.apply(self.job.tick(self.now_s))
            self.check()
        raise AssertionError(f"the job does not come to rest: {self.job.reason}")

    # --- between member and job ---

    @staticmethod
    def process_of(member: SimMember) -> dict[str, str]:
        """Fields that name the member's process in an event."""
        return {"member_id": member.name, "incarnation": member.incarnation}

    def send(self, member: SimMember, event: events.MemberEvent) -> None:
        """Make a call. Calls of one member arrive in the order in which they were made."""
        self._in_order(f"from {member.incarnation}", lambda: self.deliver(event, member))

    def _in_order(self, line: str, act: Callable[[], None]) -> None:
        arrival_s = self.now_s + self.random.uniform(0, self.max_delay_s)
        arrival_s = max(arrival_s, self._last_to.get(line, 0.0))
        self._last_to[line] = arrival_s
        self.later(act, arrival_s - self.now_s)

    def deliver(self, event: events.MemberEvent, sender: SimMember | None = None) -> None:
        try:
            self.apply(self.job.handle(event, self.now_s))
        except events.EventRefused as refused:
            if sender is not None and sender.alive:
                sender.refused = refused.refusal
                self._drop(sender)

    def _drop(self, member: SimMember) -> None:
        """End a process that was refused."""
        member.alive = False
        if self.members.get(member.name) is member:
            del self.members[member.name]
        self.gone.append(member)
        self.later(lambda: self.deliver(events.StreamDisconnected(**self.process_of(member))))

    def apply(self, effects: list[events.Effect]) -> None:
        for effect in effects:
            match effect:
                case events.WriteGeneration():
                    self.written.setdefault(effect.record.roster.generation, []).append(
                        effect.record
                    )
                case events.SendNotice():
                    self._send_notice(effect)
                case events.LogJobEvent():
                    self.log.append(f"{self.now_s:.3f} {effect.kind}: {effect.reason}")
                case _:
                    pass

    def _send_notice(self, effect: events.SendNotice) -> None:
        member = self.members.get(effect.member_id)
        if member is not None and member.incarnation == effect.incarnation:
            self._in_order(f"to {member.incarnation}", lambda: self.receive(member, effect.notice))

    def receive(self, member: SimMember, notice: events.Notice) -> None:
        if not member.alive or member.paused:
            return
        match notice:
            case events.OutcomeNotice() if notice.record.roster.holds(
                member.name, member.incarnation
            ):
                record = notice.record
                member.records.setdefault(record.roster.generation, []).append(record)
            case events.RunningNotice():
                member.has_state = True
            case events.DrainNotice() if notice.now:
                self._leave_drained(member)
                return
            case events.RefusedNotice():
                member.refused = notice.refusal
                self._drop(member)
                return
        message = codec.notice_to_pb(notice, self.job.last_generation)
        self._step(member, ev.NoticeReceived(notice=message))
        self._train_on(member)

    def _step(self, member: SimMember, event: ev.Event) -> None:
        """Step the member's core; every call arrives."""
        for effect in member.core.step(event, self.now_s):
            if isinstance(effect, ev.CallLeader):
                request = effect.request
                assert not isinstance(request, pb.DrainRequest | pb.HeartbeatRequest)
                self.send(member, event_of(request))
            elif isinstance(effect, ev.ValidateRoster):
                names = [entry.member_id for entry in effect.prepare.roster.entries]
                judged = ev.RosterValidated(
                    generation=effect.prepare.roster.generation,
                    digest=effect.digest,
                    rejections=[REJECTION] if member.name in self.rejecting else [],
                    unreachable={n: "refused" for n in names if (member.name, n) in self.cut},
                    checkpoint_steps=member.checkpoints,
                )
                self._step(member, judged)

    def _train_on(self, member: SimMember) -> None:
        """Act as a trainer without a step in progress, which stops at the agreed step."""
        if member.finished:
            return
        core, change = member.core, member.core.track.change
        decision: object
        if change is not None and change.stop_at is not None:
            decision, step = core.begin_step(change.stop_at, self.now_s), change.stop_at
        else:
            decision = core.next_generation(member.generation, self.now_s, self.now_s)
            step = 0
        if isinstance(decision, ev.BringUpGeneration):
            roster = decision.record.roster
            core.progress(max(roster.step, step))
            member.generation = roster.generation
            if roster.synchronous:
                self.bring_up(member, Generation(roster.generation))
        elif member.has_to_stop():
            step, has_state = max(member.begun, 0), member.has_state or member.begun > 0
            enough = member.enough_for_call
            stood = ev.TrainerStopped(step=step, has_state=has_state, enough_for_call=enough)
            self._step(member, stood)
            self._train_on(member)

    def _leave_drained(self, member: SimMember) -> None:
        member.drained = True
        self.send(
            member, events.MemberLeft(**self.process_of(member), completed=False, reason="drained")
        )
        self._drop(member)

    def bring_up(self, member: SimMember, generation: Generation) -> None:
        roster = pb.Roster(generation=generation, synchronous=True)
        self._step(member, ev.GenerationBroughtUp(record=pb.GenerationRecord(roster=roster)))

    # --- queries and steps of tests ---

    def train(self, step: int) -> None:
        """Begin this step on all members of the running generation."""
        for member in self.members.values():
            member.begun = step

    def beat(self, name: str, step: int) -> None:
        """Send a heartbeat of the member with this committed step."""
        self.job.note_step(name, self.members[name].incarnation, Step(step))

    def roster(self) -> list[str]:
        assert self.job.running is not None, f"{self.job.phase}: {self.job.reason}"
        return [e.member_id for e in sorted(self.job.running.entries, key=lambda e: e.rank)]

    def is_running(self) -> bool:
        return self.job.phase is Phase.RUNNING


def training(
    *names: str,
    low: int = 1,
    high: int = 8,
    step: int = 0,
    stateless: bool = False,
    max_delay_s: float = 0.0,
) -> World:
    """Return a world in which the named members train in generation 1, and have begun `step`
    unless it is 0."""
    spec = JobSpec(job="j", min_members=low, max_members=high, desired_members=len(names))
    w = World(spec, max_delay_s=max_delay_s)
    for name in names:
        w.join(name, stateless=stateless)
    w.run(1.0)
    assert w.roster() == list(names), w.job.reason
    if step:
        w.train(step)
    return w
