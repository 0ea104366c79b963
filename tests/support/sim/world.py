"""A job under faults of every kind, in virtual time, and the invariants that must hold."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from support.sim.errors import CollectiveFailed, Unavailable
from support.sim.etcd import SimEtcd
from support.sim.leader import Connection, Leader
from support.sim.member import OwnCode, SimMember
from support.sim.releases import Release, uniform
from support.sim.virtual_time import Box, Clock

from shoal_proto.errors import BringUpFailed, DeadlineExceeded, ShoalError
from shoal_proto.incarnation import new_incarnation
from shoal_server.core.generations.roster import (
    GenerationRecord,
    JobSpec,
    MemberInfo,
    StateAction,
    Step,
    Verdict,
)
from shoal_server.core.limits import Limits
from shoal_server.core.membership import events
from shoal_server.core.membership.phases import Phase

FIELDS = {"strategy": "ddp", "schema": "s1"}
LIMITS = Limits(heartbeat_s=0.2, join_s=20.0)
LEADER_LEASE_S = 1.5
CHECK_EVERY_S = 0.25
KNOWN_WITHIN_S = 5.0
"""Time after which every member knows of a pause, even if messages are lost."""


@dataclass
class Group:
    """The process group of one generation."""

    record: GenerationRecord
    arrived: dict[str, dict[str, Box]] = field(default_factory=dict)
    parted: set[str] = field(default_factory=set)
    highest_begun: int = -1
    crossed_at: int | None = None
    """Step at which members left the group by a planned change."""
    source_step: int = 0
    up: bool = False


class SimWorld:
    """Members, successive leaders, one store, and a network between them."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        seed: int,
        total_steps: int | None = None,
        release_of: Callable[[], Release] = uniform,
    ) -> None:
        """`release_of` returns the release of the next process that is started."""
        self.clock, self.spec, self.limits = Clock(seed), spec, LIMITS
        self.random = self.clock.random
        self.total_steps = total_steps
        self.release_of = release_of
        self.faulty = True
        self.story: list[str] = []
        self.store = SimEtcd(self.clock)
        self.store.on_write = self._written
        self.members: dict[str, SimMember] = {}
        """The newest process of each name."""
        self.everybody: list[SimMember] = []
        self.groups: dict[int, Group] = {}
        self._accepted: set[tuple[int, str, str]] = set()
        """(generation, incarnation, digest) of each roster that a member accepted."""
        self.has_committed = False
        self.checkpoints: list[int] = []
        self.checkpoint_every = 0
        """Interval in steps; 0: no checkpoints are written."""
        self.leaderless_times_s = [0.05, 0.5, 2.0]
        """Possible times without a leader after a crash."""
        self.cut: set[tuple[str, str]] = set()
        self.troubled_s = 0.0
        """Time at which the leader or the store was last unavailable."""
        self.leaderless_s = 0.0
        """Time at which no leader was last available."""
        self.ready_reply_s = 0.0
        """Time that the answer to a ready report is in transit."""
        self.paused_s = 0.0
        """Time at which a member was paused last."""
        self._starts = 0
        self.leader = self._elect()

    # --- arrivals and faults ---

    def join(
        self,
        name: str,
        fields: dict[str, str] | None = None,
        *,
        rejects: bool = False,
        step: int = 0,
        num_failures: int = 0,
    ) -> SimMember:
        self._starts += 1
        self.note(f"{name} starts{' at step ' + str(step) if step else ''}")
        if name in self.members and self.members[name].living:
            self.kill(name)
        member = SimMember(
            self,
            name,
            new_incarnation(self._starts),
            dict(fields or FIELDS),
            total_steps=self.total_steps,
            rejects=rejects,
            cannot_reach=lambda peer: (name, peer) in self.cut,
            info=MemberInfo(host="h", pid=self._starts),
            step=step,
            num_failures=num_failures,
        )
        self.members[name] = member
        self.everybody.append(member)
        return member

    def kill(self, name: str, *, seen_by_launcher: bool = False) -> None:
        member = self.members[name]
        self.note(f"{name} is killed")
        member.end = "killed"
        member.process.die()
        if member.stream is not None:
            member.stream.break_off()
        self.ended(member)
        if seen_by_launcher:
            self._report(events.MemberLost(**member.who, reason="its launcher saw it exit"))

    def halt(self, name: str, for_s: float, *, seen_by_launcher: bool) -> None:
        member = self.members[name]
        self.note(f"{name} is halted for {for_s:.2f} s")
        member.process.halt()
        if seen_by_launcher:
            self._report(events.ProcessHalted(**member.who))

        def wake() -> None:
            if member.process.halted:
                self.note(f"{name} goes on")
                member.process.go_on()
                if seen_by_launcher:
                    self._report(events.ProcessContinued(**member.who))

        self.clock.later(for_s, wake)

    def pause(self, name: str, for_s: float, limit_s: float) -> None:
        """Make the member's script announce a pause before its next step."""
        self.note(f"{name} is to pause for {for_s:.2f} s, of {limit_s:.2f} s")
        self.members[name].own_code.append(OwnCode(for_s=for_s, limit_s=limit_s))

    def dawdle(self, for_s: float) -> None:
        """Make all scripts run code before their next step, without announcing a pause."""
        self.note(f"all scripts do something else for up to {for_s:.2f} s")
        for member in self.members.values():
            member.own_code.append(OwnCode(for_s=for_s * self.random.uniform(0.5, 1.0)))

    def resumed(self, member: SimMember) -> None:
        self.note(f"{member.name} resumes")
        self.paused_s = self.clock.now_s

    def drain(self, name: str, *, by_operator: bool) -> None:
        member = self.members[name]
        self.note(f"{name} is to drain")
        if by_operator:
            self._report(events.DrainRequested(**member.who, reason="spot notice"))
        else:
            member.drain("SIGTERM")

    def cut_off(self, name: str, newcomer: str, *, back: bool) -> None:
        """Join `newcomer`, which cannot reach member `name`; with `back`, `name` cannot reach
        it."""
        self.cut.add((name, newcomer) if back else (newcomer, name))
        self.join(newcomer)

    def crash_leader(self, *, after_effects: int = 0) -> None:
        leader = self.leader
        if leader.process.alive:
            leader.on_crash = lambda: self._crashed(leader)
            leader.effects_left = after_effects

    def kill_leader(self) -> None:
        """Kill the leader at once."""
        if self.leader.process.alive:
            self._crashed(self.leader)

    def halt_leader(self, for_s: float) -> None:
        leader = self.leader
        if not leader.process.alive or leader.process.halted:
            return
        self.note(f"the leader is halted for {for_s:.2f} s")
        self.leaderless_s = max(self.leaderless_s, self.clock.now_s + for_s)
        self.troubled_s = max(self.troubled_s, self.leaderless_s)
        leader.process.halt()
        for box in list(leader.pending):
            self._time_out(leader, box)
        for stream in list(leader.connections):
            self.clock.later(
                self.random.uniform(1.0, 3.0),
                lambda stream=stream: stream.break_off() if leader.process.halted else None,
            )
        if for_s > LEADER_LEASE_S:
            self.clock.later(LEADER_LEASE_S, lambda: self._depose(leader))
        self.clock.later(for_s, lambda: self._wake_leader(leader))

    def stop_etcd(self, for_s: float) -> None:
        self.note(f"etcd is away for {for_s:.2f} s")
        self.store.back_s = max(self.store.back_s, self.clock.now_s + for_s)
        self.troubled_s = max(self.troubled_s, self.store.back_s)

    def calm(self) -> None:
        """Stop all faults; an outage of etcd continues to its end."""
        self.note("all faults stop")
        self.faulty = self.store.loses_answers = False
        self.cut.clear()
        for member in self.members.values():
            member.own_code.clear()
        self.leader.effects_left = None
        self._wake_leader(self.leader)
        for member in self.members.values():
            if member.process.halted:
                member.process.go_on()
                self._report(events.ProcessContinued(**member.who))

    def _report(self, event: events.MemberEvent) -> None:
        """Send a report about a member, as a launcher or an operator does, until a leader receives
        it."""
        tries = 0

        def say() -> None:
            leader = self.find_leader()

            def on_answer(error: Exception | None) -> None:
                nonlocal tries
                tries += 1
                if isinstance(error, Unavailable) and tries < 20:
                    self.clock.later(0.3, say)

            if leader is None:
                on_answer(Unavailable())
            elif not leader.process.halted:
                leader.submit(event, on_answer)
            else:
                leader.process.do(lambda: leader.submit(event))

        self.clock.soon(say, 0.1)

    def _note_event(self, event: events.MemberEvent) -> None:
        if isinstance(event, events.RosterAnswered) and not event.rejections:
            self._accepted.add((event.generation, event.incarnation, event.digest))

    def _heartbeats(self) -> Iterator[tuple[events.HeartbeatReceived, int]]:
        """Heartbeats of every member that was admitted and whose process runs."""
        for member in self.members.values():
            beats = member.core.admitted and member.process.alive and not member.process.halted
            if beats and not self.lose():
                yield events.HeartbeatReceived(**member.who), member.step

    # --- successive leaders ---

    def _elect(self) -> Leader:
        release = self.release_of()
        leader = Leader(self.clock, self.store, self.spec, self.limits, release)
        leader.check = lambda: self._check_job(leader)
        leader.log = self._logged
        leader.heartbeats = self._heartbeats
        leader.on_event = self._note_event
        leader.on_notice_sent = lambda notice: self._check_boundary(leader, notice)
        leader.take_over()
        return leader

    def _depose(self, leader: Leader) -> None:
        if leader.process.halted and self.store.leader is leader:
            self._succeed()

    def _succeed(self) -> None:
        self.leader = self._elect()
        self.note("another leader took over")
        self.troubled_s = max(self.troubled_s, self.clock.now_s)
        self.leaderless_s = max(self.leaderless_s, self.clock.now_s)

    def _crashed(self, leader: Leader) -> None:
        self.note("the leader crashes")
        for stream in list(leader.connections):
            stream.break_off()
        leader.end()
        away_s = self.random.choice(self.leaderless_times_s)
        self.troubled_s = max(self.troubled_s, self.clock.now_s + away_s)
        self.leaderless_s = max(self.leaderless_s, self.clock.now_s + away_s)
        if self.store.leader is leader:
            self.store.depose()
            self.clock.later(away_s, self._succeed)

    def _wake_leader(self, leader: Leader) -> None:
        if not leader.process.halted:
            return
        if self.store.leader is leader or self.random.random() < 0.5:
            leader.process.go_on()  # It may be deposed, and does not know yet.
            if self.store.leader is not leader:
                self.clock.later(0.1, leader.end)
        else:
            leader.end()

    def find_leader(self) -> Leader | None:
        return self.leader if self.leader.leads and self.leader.process.alive else None

    # --- the network ---

    def lose(self) -> bool:
        return self.faulty and self.random.random() < 0.01

    def open(self, leader: Leader | None, stream: Connection, event: events.MemberJoined) -> None:
        def arrive() -> None:
            if leader is None or not leader.process.alive or self.lose():
                stream.end(Unavailable("nobody answers"))
            else:
                leader.process.do(lambda: leader.attend(stream, event))

        self.clock.soon(arrive, 0.02)
        if leader is not None:

            def give_up() -> None:
                if leader.process.halted or not leader.process.alive:
                    stream.break_off()

            self.clock.later(3.0, give_up)

    def request(self, leader: Leader | None, event: events.MemberEvent, box: Box) -> None:
        def fail(within_s: float) -> None:
            self.clock.soon(lambda: box.set(Unavailable("the connection broke")), within_s)

        if leader is None or self.lose():
            fail(0.5)
            return

        def reply(error: Exception | None) -> None:
            if self.lose():
                fail(0.5)
            else:
                is_ready = isinstance(event, events.ReadinessReported)
                self.clock.later(
                    self.ready_reply_s if is_ready else 0.0,
                    lambda: self.clock.soon(lambda: box.set(error), 0.02),
                )

        def arrive() -> None:
            if leader.process.alive:
                leader.process.do(lambda: leader.submit(event, reply))
            else:
                fail(0.02)

        slow = self.faulty and self.random.random() < 0.05
        self.clock.soon(arrive, 0.5 if slow else 0.02)
        if self.faulty and self.random.random() < 0.02:
            # The call is sent again over another connection, and the first one arrives late.
            self.clock.soon(lambda: leader.process.do(lambda: leader.submit(event)), within_s=2.0)
        self._time_out(leader, box)

    def _time_out(self, leader: Leader, box: Box) -> None:
        def look() -> None:
            if leader.process.halted or not leader.process.alive:
                box.set(Unavailable("no answer to a ping"))
            elif not box.done:
                self.clock.later(3.0, look)

        self.clock.later(self.random.uniform(1.0, 3.0), look)

    # --- training ---

    def arrive(self, member: SimMember, generation: int, key: str, box: Box) -> None:
        group = self.groups[generation]
        if group.parted or member.name in group.parted:
            self.clock.soon(lambda: box.set(CollectiveFailed()), 0.1)
            return
        boxes = group.arrived.setdefault(key, {})
        boxes[member.name] = box
        if len(boxes) == len(group.record.roster.entries):
            if key == "bring up":
                self._brought_up(group)
            for each in boxes.values():
                self.clock.soon(each.set, 0.02)

    def part(self, member: SimMember, generation: int) -> None:
        group = self.groups.get(generation)
        if group is None or member.name in group.parted:
            return
        if not member.is_in(group.record.roster):
            return
        group.parted.add(member.name)
        for boxes in group.arrived.values():
            for name, box in boxes.items():
                if not box.done:
                    within_s = 0.001 if name == member.name else 0.05
                    self.clock.soon(lambda box=box: box.set(CollectiveFailed()), within_s)

    def begins(self, member: SimMember, step: int) -> None:
        group = self.groups[member.generation]
        assert group.crossed_at is None or step < group.crossed_at, (
            f"{member.name} begins step {step} in {member.generation},"
            f" which others left at {group.crossed_at}"
        )
        group.highest_begun = max(group.highest_begun, step)

    def committed(self, member: SimMember) -> None:
        """Record a committed step: the job's state is no longer its initial values."""
        self.has_committed = True
        if self.checkpoint_every and member.step % self.checkpoint_every == 0:
            self.checkpoints.append(member.step)
        leader = self.find_leader()
        if leader is not None and not leader.process.halted and self.random.random() < 0.1:
            leader.job.note_step(member.name, member.incarnation, Step(member.step))

    def _check_boundary(self, leader: Leader, notice: events.Notice) -> None:
        """Check that the old generation stops at the first step that no member has begun."""
        running = leader.job.running
        if isinstance(notice, events.StopAtNotice) and running is not None:
            group = self.groups[running.generation]
            begun = max(group.highest_begun, group.source_step - 1)
            assert not group.up or notice.step == begun + 1, (
                f"{running.generation} stops at {notice.step}, and {begun} has begun"
            )

    def crosses(self, member: SimMember, old: int, step: int) -> None:
        group = self.groups[old]
        who = f"{member.name} leaves {old} at {step}"
        assert group.highest_begun < step, f"{who}; {group.highest_begun} has begun"
        assert member.step == step, f"{who}, with {member.step} steps"
        assert group.crossed_at in (None, step), f"{who}; others at {group.crossed_at}"
        group.crossed_at = step

    def _brought_up(self, group: Group) -> None:
        """Check the source of the state once every member is in the first collective."""
        group.up = True
        roster = group.record.roster
        here = [self.members[name] for name in roster.member_ids]
        source = self.members[roster.source_member_id]
        group.source_step = source.step
        # A member that joins may start from a checkpoint, even one of a later step.
        trained = [m for m in here if not roster.planned or m.crossed_at is not None]
        holders = [m for m in trained if m.has_state]
        number = roster.generation
        initial = any(entry.state is StateAction.INITIAL for entry in roster.entries)
        assert not (initial and self.has_committed), f"{number} starts from initial values again"
        if holders:
            highest = max(m.step for m in holders)
            assert source.has_state, f"{number}: the source {source.name} has no state"
            assert source.step == highest, (
                f"{number}: the source {source.name} is at {source.step}, others at {highest}"
            )
        for entry in roster.entries:
            member = self.members[entry.member_id]
            if entry.state.value == "keep":
                assert member.step == source.step, (
                    f"{number}: {member.name} keeps step {member.step}, {source.name} {source.step}"
                )

    def source_step(self, generation: int) -> int:
        return self.groups[generation].source_step

    def entered(self, member: SimMember, generation: int) -> None:
        assert self.groups[generation].up

    def ended(self, member: SimMember) -> None:
        self.note(f"{member.name} ends: {member.end!r}")
        # A member that answers finishes each task long before a time limit, even if the store is
        # away meanwhile.
        untroubled = self.clock.now_s - self.leaderless_s > self.limits.collective_s + 1.0
        self._check_patience(member)
        if untroubled and not member.is_clumsy:
            assert not isinstance(member.end, BringUpFailed), member.end
        if untroubled and not member.process.was_halted and isinstance(member.end, ShoalError):
            for task in ("did not stop", "accept or reject", "bring the generation up"):
                assert task not in str(member.end), member.end
        for number, group in self.groups.items():
            if member.is_in(group.record.roster):
                self.part(member, number)

    def _check_patience(self, member: SimMember) -> None:
        """Check that no wait times out while another member is paused, except that of a pause."""
        waited = isinstance(member.end, DeadlineExceeded)
        # Without a coordinator no member learns of a pause.
        waited = waited and "no coordinator admitted" not in str(member.end)
        known = [each for each in self.members.values() if each.living and not each.failure]
        paused = [each for each in known if each.pause]
        if not waited or not paused or "is paused" in str(member.end):
            return
        begun_s = min(each.pause_begun_s for each in paused)
        assert max(begun_s, self.leaderless_s) > self.clock.now_s - KNOWN_WITHIN_S, (
            f"{member.name} does not wait for {', '.join(each.name for each in paused)}"
        )

    # --- invariants ---

    def note(self, line: str) -> None:
        self.story.append(f"{self.clock.now_s:8.3f} {line}")

    def _logged(self, log: events.LogJobEvent) -> None:
        self.note(f"{log.kind}: {log.reason}")
        if log.kind == "member_removed" and "no heartbeat for" in log.reason:
            # Of two processes with one name, the older is silent.
            named = [each for each in self.everybody if each.name == log.member_id]
            runs = [each for each in named if each.living and not each.process.was_halted]
            assert runs != named, f"{log.member_id} is called silent, and beats"

    def _written(self, record: GenerationRecord) -> None:
        roster = record.roster
        all_written = self.store.records[roster.generation]
        verdicts = [r.verdict for r in all_written]
        assert len({r.digest for r in all_written}) == 1, f"{roster.generation}: two rosters"
        assert verdicts in (
            [Verdict.COMMITTED],
            [Verdict.ABORTED],
            [Verdict.COMMITTED, Verdict.ABORTED],
        ), f"generation {roster.generation}: {verdicts}"
        self.note(f"{roster.generation} {record.verdict.value} {','.join(roster.member_ids)}")
        if record.verdict is Verdict.COMMITTED:
            for entry in roster.entries:
                answer = (roster.generation, entry.incarnation, record.digest)
                assert answer in self._accepted, f"{entry.member_id} never accepted it"
            self.groups[roster.generation] = Group(record)

    def _check_job(self, leader: Leader) -> None:
        job = leader.job
        for roster in (job.running, job.attempt):
            if roster is None:
                continue
            assert [e.rank for e in roster.entries] == list(range(len(roster.entries)))
            assert len(roster.entries) <= job.spec.max_members
            # In a job that completes, members leave one by one.
            here = job.is_completing or len(job.members_of(roster)) == len(roster.entries)
            assert here, "a lost member is in it"

    def check_members(self) -> None:
        """Check that members received only written records, and that each PREPARE ends in time."""
        for member in self.everybody:
            for number, records in member.records.items():
                for record in records:
                    assert record in self.store.records[record.roster.generation], number
            if not member.living or member.process.was_halted or member.failure is not None:
                continue
            for number, (since_s, stream) in list(member.prepared.items()):
                if number in member.records or stream is not member.stream or stream.broken:
                    del member.prepared[number]
                    continue
                quiet_s = self.clock.now_s - max(since_s, self.troubled_s, self.paused_s)
                assert quiet_s < self.limits.prepare_s + 2.5, (
                    f"{member.name} never received the outcome of generation {number}"
                )

    def run(self, for_s: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Run for this time, or until `until` returns True; return its result."""
        end_s = self.clock.now_s + for_s
        while self.clock.now_s < end_s:
            self.clock.run(min(self.clock.now_s + CHECK_EVERY_S, end_s))
            if any(member.living and member.pause for member in self.members.values()):
                self.paused_s = self.clock.now_s
            self.check_members()
            if until():
                return True
        return until()

    # --- the end ---

    def at_rest(self) -> bool:
        """True if all living members train in one generation or are on standby, or the job is
        finished."""
        leader, living = self.leader, [m for m in self.members.values() if m.living]
        job = leader.job
        if not leader.leads or leader.writes or any(m.to_leave for m in living):
            return False
        if job.phase in (Phase.FINISHED, Phase.LOST):
            return not living
        if not living:
            return not job.members
        if job.phase is not Phase.RUNNING or job.running is None:
            return False
        training = [m for m in living if m.is_in(job.running)]
        surplus = [m for m in living if not m.is_in(job.running)]
        number = job.running.generation
        together = len(training) == len(job.running.entries)
        return (
            together
            and all(m.generation == number and not m.is_broken(number) for m in training)
            and all(m.is_standby for m in surplus)
            and (not surplus or len(training) == job.spec.max_members)
        )
