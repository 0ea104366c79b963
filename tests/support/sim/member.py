"""A worker process: the member's real core, and a trainer that acts as the elastic controller.

The trainer's part models `worker/shoal/session/elastic_controller.py`: it forms a generation,
brings it up, trains, and recovers after a failed collective.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from support.sim.errors import CollectiveFailed
from support.sim.leader import Connection
from support.sim.session import Network, SimSession
from support.sim.virtual_time import Box, Process, Steps, Wait, sleep

from shoal_client.connection.admission import ADMISSION_S
from shoal_client.membership import member_events as ev
from shoal_client.membership.identity import Identity
from shoal_proto.errors import DeadlineExceeded, GenerationBroken, MemberDrained, ShoalError
from shoal_proto.incarnation import public_id
from shoal_proto.v1 import membership_pb2 as pb
from shoal_server.core.generations.roster import (
    GenerationRecord,
    GenerationRoster,
    JobSpec,
    MemberInfo,
)
from shoal_server.core.membership import events

LEAVE_S = 3.0


class Surroundings(Network, Protocol):
    """Network of a member: the way to the leader and to its peers."""

    spec: JobSpec
    checkpoints: list[int]
    """Steps of the complete checkpoints, which are the same for every member."""

    def arrive(self, member: "SimMember", generation: int, key: str, box: Box) -> None: ...
    def part(self, member: "SimMember", generation: int) -> None: ...
    def begins(self, member: "SimMember", step: int) -> None: ...
    def committed(self, member: "SimMember") -> None: ...
    def crosses(self, member: "SimMember", old: int, step: int) -> None: ...
    def source_step(self, generation: int) -> int: ...
    def entered(self, member: "SimMember", generation: int) -> None: ...
    def resumed(self, member: "SimMember") -> None: ...
    def ended(self, member: "SimMember") -> None: ...


@dataclass(frozen=True, kw_only=True)
class OwnCode:
    """Code of a script between two steps, other than training."""

    for_s: float
    limit_s: float | None = None
    """Announced limit of the pause; None: the script does not announce one."""


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
        self._fields = fields
        self.step, self.has_state = step, step > 0
        self.num_failures = num_failures
        """Number of bring-ups that fail by this member's fault, such as lack of memory."""
        self.is_clumsy = num_failures > 0
        self.end: Exception | str | None = None
        """Result of the process, once it has ended."""
        self.records: dict[int, list[GenerationRecord]] = {}
        self.prepared: dict[int, tuple[float, Connection]] = {}
        self.crossed_at: int | None = None
        """Step at which the member entered its generation by a planned change."""
        self.own_code: list[OwnCode] = []
        """Code that the script runs before its next steps."""
        self.pause: OwnCode | None = None
        """The announced pause in progress."""
        self.pause_begun_s = 0.0
        self._stands = False
        self._seen = 0
        self.session = SimSession(
            self.process,
            around,
            self._identity(info or MemberInfo(host="h")),
            judge=self._judge,
            on_break=lambda generation: around.part(self, generation),
            on_record=self._note,
        )
        self.core = self.session.core
        self.process.start(self.session.listen())
        self.process.start(self._train())
        self.process.start(self.session.pass_drains())

    def _identity(self, info: MemberInfo) -> Identity:
        spec = self.around.spec
        return Identity(
            spec=pb.JobSpec(
                job=spec.job,
                min_members=spec.min_members,
                max_members=spec.max_members,
                desired_members=spec.desired_members,
                last_call_s=spec.last_call_s,
            ),
            member_id=self.name,
            incarnation=self.incarnation,
            public_id=public_id(self.incarnation),
            info=pb.MemberInfo(host=info.host, pid=info.pid, address=info.address),
        )

    # --- state for the world's checks ---

    @property
    def living(self) -> bool:
        return self.process.alive and self.end is None

    @property
    def all_own_code(self) -> list[OwnCode]:
        """The announced pause in progress, and code that is still to run."""
        return [*self.own_code, *([self.pause] if self.pause is not None else [])]

    @property
    def failed(self) -> bool:
        """True if the member ended with an error, and not by a drain."""
        return isinstance(self.end, Exception) and not isinstance(self.end, MemberDrained)

    @property
    def failure(self) -> ShoalError | None:
        return self.core.failure

    @property
    def generation(self) -> int:
        return self.core.track.generation

    @property
    def stream(self) -> Connection | None:
        return self.session.stream

    @property
    def is_standby(self) -> bool:
        return self.core.is_standby

    @property
    def to_leave(self) -> bool:
        return self.session.to_leave

    @property
    def who(self) -> dict[str, str]:
        return {"member_id": self.name, "incarnation": self.incarnation}

    def is_in(self, roster: GenerationRoster | None) -> bool:
        return roster is not None and roster.holds(self.name, self.incarnation)

    def is_broken(self, generation: int) -> bool:
        return self.core.track.is_broken(generation)

    def drain(self, reason: str) -> None:
        self.session.drain(reason)

    # --- callbacks of the session ---

    def _note(self, notice: events.OutcomeNotice) -> None:
        record = notice.record
        if self.is_in(record.roster):
            self.records.setdefault(record.roster.generation, []).append(record)

    def _judge(self, judge: ev.ValidateRoster) -> Steps[ev.RosterValidated]:
        roster, stream = judge.prepare.roster, self.stream
        assert stream is not None
        self.prepared.setdefault(roster.generation, (self.around.clock.now_s, stream))
        names = [entry.member_id for entry in roster.entries]
        failed = [name for name in names if name != self.name and self.cannot_reach(name)]
        if failed:
            yield sleep(self.around.limits.probe_s)
        rejection = pb.Rejection(field="custom", seen="1", expected="2")
        return ev.RosterValidated(
            generation=roster.generation,
            digest=judge.digest,
            rejections=[rejection] if self.rejects else (),
            unreachable={} if self.rejects else dict.fromkeys(failed, "refused"),
            checkpoint_steps=self.around.checkpoints if judge.from_checkpoint else (),
        )

    # --- the trainer's thread ---

    def _train(self) -> Steps[None]:
        core = self.core
        try:
            yield Wait(lambda: core.admitted or core.failure is not None, ADMISSION_S)
            if core.failure is not None or not core.admitted:
                raise core.failure or DeadlineExceeded("no coordinator admitted it")
            proposal = pb.Proposal(
                fields=self._fields, synchronous=True, step=self.step, has_state=self.has_state
            )
            yield from self.session.do(ev.ProposalMade(proposal=proposal))
            while self.total_steps is None or self.step < self.total_steps:
                yield from self._do_own_code()
                yield from self._stand()
                yield from self._train_step()
            yield from self._leave("completed")
        except (ShoalError, CollectiveFailed) as error:
            yield from self._leave(error)

    def _do_own_code(self) -> Steps[None]:
        while self.own_code:
            code = self.own_code.pop(0)
            if code.limit_s is None:
                yield sleep(code.for_s)
                continue
            self.pause, self.pause_begun_s = code, self.around.clock.now_s
            yield from self.session.do(ev.PauseBegun(reason="validation", limit_s=code.limit_s))
            yield sleep(code.for_s)
            self.pause = None
            self.around.resumed(self)
            yield from self.session.do(ev.PauseEnded())

    def _stand(self) -> Steps[None]:
        """Enter a running generation, and begin the next step in it."""
        while True:
            while not self._stands:
                yield from self._bring_up((yield from self._await_generation()))
            old, step = self.generation, self.step
            decision = yield from self.session.decided(
                lambda now_s, step=step: self.core.begin_step(step, now_s)
            )
            if isinstance(decision, ev.BringUpGeneration):
                self.around.crosses(self, old, step)
                self.crossed_at = step
                self.around.part(self, self._seen)
                self._stands = False
                yield from self._bring_up(decision.record)
            elif self.is_broken(self.generation):
                yield from self._recover(None)
            else:
                self.around.begins(self, step)
                return

    def _await_generation(self) -> Steps[pb.GenerationRecord]:
        since_s, above = self.around.clock.now_s, self._seen
        decision = yield from self.session.decided(
            lambda now_s: self.core.next_generation(above, since_s, now_s)
        )
        assert isinstance(decision, ev.BringUpGeneration)
        self.crossed_at = None
        return decision.record

    def _train_step(self) -> Steps[None]:
        # The member's computation, then the collective of all members of the generation.
        yield sleep(self.around.clock.random.uniform(0.05, 0.3))
        try:
            yield from self._collective(f"step {self.step}")
        except CollectiveFailed as error:
            yield from self._recover(error)
        else:
            self.step += 1
            self.core.progress(self.step)
            self.around.committed(self)

    def _collective(self, key: str) -> Steps[None]:
        box, clock = Box(self.process.changed), self.around.clock
        since_s, limit_s = clock.now_s, self.around.limits.collective_s
        self.around.arrive(self, self._seen, key, box)
        # As in HangWatch, time in which a member was paused does not count.
        while (left_s := self._held_until_s(since_s) + limit_s - clock.now_s) > 0:
            if (yield Wait(lambda: box.done, left_s)):
                break
        else:
            raise CollectiveFailed("timed out")
        if box.error is not None:
            raise box.error

    def _held_until_s(self, since_s: float) -> float:
        return max(since_s, self.core.clock.held_until_s(self.around.clock.now_s))

    def _bring_up(self, record: pb.GenerationRecord) -> Steps[None]:
        self._seen = record.roster.generation
        try:
            yield sleep(self.around.clock.random.uniform(0.0, 0.2))
            if self.num_failures:
                self.num_failures -= 1
                yield from self.session.do(ev.CollectiveFailed(error="no memory", own=True))
                raise CollectiveFailed("no memory")
            yield from self._collective("bring up")
        except CollectiveFailed as error:
            yield from self._recover(error)
            return
        entry = next(e for e in record.roster.entries if e.member_id == self.name)
        if entry.state == pb.STATE_ACTION_CHECKPOINT:
            self.step = max(self.around.checkpoints)
        elif entry.state != pb.STATE_ACTION_KEEP:
            self.step = self.around.source_step(self._seen)
        self.has_state = True
        self.around.entered(self, self._seen)
        self._stands = True
        self.core.progress(self.step)
        yield from self.session.do(ev.GenerationBroughtUp(record=record))

    def _recover(self, error: CollectiveFailed | None) -> Steps[None]:
        """Leave the broken generation, and report the step once it is over for all members."""
        number, limits, since_s = self._seen, self.around.limits, self.around.clock.now_s
        self._stands = False
        self.around.part(self, number)
        if not self.is_broken(number) and error is not None:
            yield from self.session.do(ev.CollectiveFailed(error="connection reset"))
            since_s = self.around.clock.now_s
        seen = yield from self.session.decided(
            lambda now_s: self.core.judge_break(number, since_s, limits.collective_s, now_s)
        )
        if not (isinstance(seen, ev.GenerationOver) and seen.over):
            raise error or GenerationBroken("no word of the break")
        yield from self.session.do(ev.TrainerStopped(step=self.step, has_state=self.has_state))

    def _leave(self, end: Exception | str) -> Steps[None]:
        completed = end == "completed"
        leave = ev.LeaveWanted(completed=completed, reason=str(end), timeout_s=LEAVE_S)
        yield from self.session.do(leave)
        yield from self.session.do(ev.SessionClosed())
        self.end = end
        self.around.ended(self)
        self.process.die()


__all__ = ["OwnCode", "SimMember", "Surroundings"]
