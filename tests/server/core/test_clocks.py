"""Clocks of a job: by example, and with random members that join, rest, die and repeat calls."""

from copy import deepcopy
from cProfile import Profile
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.oracles.plain_clocks import PlainClocks

from shoal_server.core.clocks import ClockReport, Clocks, ClockStatus, NoClock
from shoal_server.core.positions import ClockPosition
from shoal_server.core.processes import MemberProcess

A, B, C = (MemberProcess(name, "1") for name in "abc")


def request_step(
    clocks: Clocks, who: MemberProcess, clock: int, bound: int, *, now_s: float = 0.0
) -> ClockStatus:
    """Request a step of round `clock` as this member; with 0, the member enters."""
    report = ClockReport(position=ClockPosition(clock), bound=bound, enters=clock == 0)
    return clocks.advance(who, report, now_s)


def test_a_member_may_be_ahead_by_the_bound_and_no_more() -> None:
    """The answer names the member that it waits for, whose next step ends the wait."""
    clocks = Clocks()
    assert request_step(clocks, A, 0, 2).allowed
    assert request_step(clocks, B, 0, 2).allowed
    assert request_step(clocks, A, 1, 2).allowed
    assert request_step(clocks, A, 2, 2).allowed
    refused = request_step(clocks, A, 3, 2, now_s=5.0)
    assert (refused.allowed, refused.slowest) == (False, 0)
    assert refused.reason == "b in round 0: the waiting member's next round is 3, the bound 2"
    assert list(clocks.waiting()) == [("a", refused.reason, 5.0)]
    assert request_step(clocks, C, 0, 2) == ClockStatus(clock=2, allowed=True, slowest=0), (
        "it need not wait"
    )
    request_step(clocks, B, 1, 2)
    request_step(clocks, C, 3, 2)
    assert clocks.decide_clock(A, 6.0).allowed
    assert list(clocks.waiting()) == []


def test_a_slow_member_continues_in_the_newest_round() -> None:
    """A slow member is in the newest round after one step of its own: it need not take the steps
    that it missed."""
    clocks = Clocks()
    for who in (A, B):
        request_step(clocks, who, 0, 3)
    for clock in (1, 2, 3, 4):
        request_step(clocks, A, clock, 3)
    assert request_step(clocks, B, 1, 3) == ClockStatus(clock=4, allowed=True, slowest=4)


@pytest.mark.parametrize("end", ["lost", "rests"])
def test_no_member_waits_for_one_that_is_lost_or_rests(end: str) -> None:
    """A joiner begins in a round in which it need not wait."""
    clocks = Clocks()
    for who in (A, B):
        request_step(clocks, who, 0, 0)
    assert not request_step(clocks, A, 1, 0).allowed
    if end == "lost":
        clocks.remove(B)
        with pytest.raises(NoClock):
            clocks.decide_clock(B, 0.0)
    else:
        clocks.rest(B, 0)
    assert clocks.decide_clock(A, 0.0).allowed
    assert request_step(clocks, C, 0, 0) == ClockStatus(clock=1, allowed=True, slowest=1)
    clocks.remove(A)
    clocks.remove(C)
    assert request_step(clocks, B, 0, 0).clock == 1, "rounds do not begin again at 0"


def test_the_loss_of_an_earlier_process_keeps_the_clock_of_its_successor() -> None:
    """A restarted member may have a clock before its old process is declared lost."""
    clocks = Clocks()
    request_step(clocks, A, 0, 1)
    request_step(clocks, MemberProcess("a", "2"), 0, 1)
    clocks.remove(A)
    assert clocks.clocks == {"a": 0}


def test_a_new_leader_allows_no_step_before_it_knows_all_clocks() -> None:
    """A joiner waits as well. Members that rest need not report."""
    clocks = Clocks([A, B, C])
    assert not request_step(clocks, A, 57, 2).allowed
    joiner = MemberProcess("d", "1")
    refused = request_step(clocks, joiner, 0, 2)
    assert refused.reason == "b, c to report their clocks to the new leader"
    clocks.rest(B, 55)
    request_step(clocks, C, 56, 2)
    assert clocks.decide_clock(A, 0.0) == ClockStatus(clock=57, allowed=True, slowest=57)
    assert clocks.decide_clock(joiner, 0.0).clock == 57


def test_in_bulk_no_member_pushes_before_all_have_their_values() -> None:
    """A joiner takes part from the first round in which no member has pushed yet."""
    clocks = Clocks()
    for who in (A, B):
        request_step(clocks, who, 0, 0)
    pushes = ClockReport(position=ClockPosition(0, pulled=True), bound=0)
    refused = clocks.advance(A, pushes, 0.0)
    assert refused.reason == (
        "b in round 0: the waiting member pushes in round 0"
        " once all members have that round's values"
    )
    assert request_step(clocks, C, 0, 0).clock == 1
    assert clocks.advance(B, pushes, 0.0).allowed
    assert clocks.decide_clock(A, 0.0).allowed
    assert not request_step(clocks, A, 1, 0).allowed
    assert request_step(clocks, B, 1, 0).allowed
    assert clocks.decide_clock(C, 0.0).allowed


def test_a_member_that_others_wait_for_too_long_is_overdue() -> None:
    """Members that wait themselves are not. Under a new leader, a silent member may be overdue."""
    clocks = Clocks()
    for who in (A, B, C):
        request_step(clocks, who, 0, 0)
    request_step(clocks, A, 1, 0, now_s=1.0)
    request_step(clocks, B, 1, 0, now_s=8.0)
    assert clocks.overdue(10.0, 10.5) == []
    ((who, reason),) = clocks.overdue(10.0, 11.5)
    assert who == C
    assert "for more than 10 s" in reason
    inherited = Clocks([A, B], now_s=0.0)
    request_step(inherited, A, 5, 0, now_s=1.0)
    assert [who for who, _ in inherited.overdue(10.0, 11.5)] == [B]


NAMES = st.sampled_from("abcde")
REPORTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("reports"),
            st.builds(MemberProcess, NAMES, st.sampled_from("12")),
            # A member that enters is in no step.
            st.one_of(
                st.builds(
                    ClockReport,
                    position=st.builds(ClockPosition, st.integers(0, 6), st.booleans()),
                    bound=st.integers(0, 3),
                    begins=st.booleans(),
                ),
                st.builds(
                    ClockReport,
                    position=st.just(ClockPosition(0)),
                    bound=st.integers(0, 3),
                    enters=st.just(value=True),
                ),
            ),
        ),
        st.tuples(
            st.just("goes"), st.builds(MemberProcess, NAMES, st.sampled_from("12")), st.none()
        ),
    ),
    max_size=40,
)


@pytest.mark.long
@given(reports=REPORTS)
@settings(max_examples=400, deadline=None)
def test_answers_equal_those_of_the_plain_definition(
    reports: list[tuple[str, MemberProcess, ClockReport]],
) -> None:
    """Horizon and thresholds agree with the members that the plain definition waits for."""
    clocks, plain = Clocks(), PlainClocks()
    for kind, who, report in reports:
        if kind == "goes":
            clocks.remove(who)
            plain.remove(who)
        else:
            status, expected = clocks.advance(who, report, 0.0), plain.advance(who, report)
            assert (status.clock, status.allowed) == (expected.clock, expected.allowed)
        assert clocks.slowest == plain.slowest
        at = {name: m.position.clock for name, m in plain.members.items() if m.position}
        assert clocks.clocks == at
        assert clocks.horizon is not None
        for name, member in plain.members.items():
            threshold = clocks.threshold(MemberProcess(name, member.incarnation))
            assert (clocks.horizon >= threshold) == (not plain.behind(name))
        waited_for = {other for name in plain.members for other in plain.behind(name)}
        idle = {name for name, _, _ in clocks.waiting()}
        assert {who.member_id for who, _ in clocks.overdue(-1.0, 0.0)} <= waited_for - idle


def test_a_request_costs_as_much_among_thousands_as_among_hundreds() -> None:
    """The cost is the number of function calls; all members but one have to wait for it."""

    def num_calls(num_members: int) -> float:
        clocks = Clocks()
        members = [MemberProcess(f"m{number:05}", "1") for number in range(num_members)]
        for who in members:
            request_step(clocks, who, 0, 0)
        profile = Profile()
        profile.enable()
        for who in members[1:]:
            assert not request_step(clocks, who, 1, 0).allowed
        profile.disable()
        stats: Any = profile.getstats()
        return float(sum(entry.callcount for entry in stats)) / num_members

    assert num_calls(4_000) < 1.1 * num_calls(400)


@dataclass
class Member:
    """State of a client, and of the step that it is in."""

    who: MemberProcess
    round: int = 0
    slowest: int = 0
    enters: bool = True
    begun: bool = False
    """True if the member is in a step of its round."""
    pulled: bool = False
    """True if the member may push (bulk only)."""
    steps: int = 0


class Drift(RuleBasedStateMachine):
    """Members with one bound, whose answers may be lost, and new leaders without their clocks."""

    bulk = False

    @initialize(bound=st.integers(0, 3))
    def start(self, bound: int) -> None:
        self.bound = 0 if self.bulk else bound
        self.clocks = Clocks()
        self.members: list[Member] = []
        self.born = 0
        self.slowest = 0

    def _advance(
        self, member: Member, *, pulled: bool = False, begins: bool = False
    ) -> ClockStatus:
        report = ClockReport(
            position=ClockPosition(member.round, pulled),
            bound=self.bound,
            enters=member.enters,
            begins=begins,
        )
        return self.clocks.advance(member.who, report, 0.0)

    def _pick(self, data: st.DataObject, *, begun: bool) -> Member | None:
        them = [m for m in self.members if m.begun == begun]
        return data.draw(st.sampled_from(them)) if them else None

    def _begins(self, member: Member) -> None:
        """Begin a step, and check that each other step in progress is within the bound."""
        member.begun, member.pulled = True, False
        for other in self.members:
            if other.begun:
                assert abs(member.round - other.round) <= self.bound
                assert not (self.bulk and other.pulled), "it pulls while others push"

    @precondition(lambda self: len(self.members) < 5)
    @rule()
    def join(self) -> None:
        self.born += 1
        self.members.append(Member(MemberProcess(f"m{self.born}", "1")))

    @rule(data=st.data(), lost=st.booleans())
    def request(self, data: st.DataObject, lost: bool) -> None:
        """Request permission to begin a step; the answer may be lost."""
        member = self._pick(data, begun=False)
        if member is None or not self._needs_permission(member):
            return
        standing = self._advance(member)
        if not lost and standing.allowed:
            member.slowest = max(standing.slowest, 0 if member.enters else member.slowest)
            member.enters, member.round = False, standing.clock
            self._begins(member)

    @rule(data=st.data(), arrive=st.integers(0, 2), answered=st.integers(0, 2))
    def begin(self, data: st.DataObject, arrive: int, answered: int) -> None:
        """Begin a step that the member's own clock allows. `arrive` reports of it arrive, and are
        answered if `answered` is not 0."""
        member = self._pick(data, begun=False)
        if member is None or self._needs_permission(member):
            return
        if arrive > 0:
            standing = self._advance(member, begins=True)
            if answered > 0:
                member.slowest = max(member.slowest, standing.slowest)
                if standing.clock > member.round:
                    member.round = standing.clock
                    if arrive > 1:
                        self._advance(member, begins=True)
        self._begins(member)

    def _needs_permission(self, member: Member) -> bool:
        return member.enters or member.slowest < member.round - self.bound

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        member = self._pick(data, begun=True)
        if member is None:
            return
        if self.bulk and not member.pulled:
            standing = self._advance(member, pulled=True)
            member.slowest = max(member.slowest, standing.slowest)
            if not standing.allowed:
                return
            member.pulled = True
            for other in self.members:
                assert other.round >= member.round or not other.begun
            return
        member.begun = member.pulled = False
        member.round += 1
        member.steps += 1

    @rule(data=st.data())
    def rest(self, data: st.DataObject) -> None:
        member = self._pick(data, begun=False)
        if member is not None:
            self.clocks.rest(member.who, member.round)
            member.enters = True

    @rule(data=st.data(), begun=st.booleans())
    def die(self, data: st.DataObject, begun: bool) -> None:
        member = self._pick(data, begun=begun)
        if member is not None:
            self.members.remove(member)
            self.clocks.remove(member.who)

    @rule()
    def fail_over(self) -> None:
        """A new leader knows the members from the roster, but not their clocks."""
        self.clocks = Clocks([m.who for m in self.members])
        for member in self.members:
            if member.enters:
                self.clocks.rest(member.who, member.round)
        self.slowest = 0

    @invariant()
    def the_lowest_clock_never_falls(self) -> None:
        if hasattr(self, "clocks") and self.clocks.horizon is not None:
            assert self.clocks.slowest >= self.slowest
            self.slowest = self.clocks.slowest

    @invariant()
    def some_member_may_always_go_on(self) -> None:
        """The rules allow no deadlock: if no member can end or begin a step on its own, one request
        is allowed."""
        if not hasattr(self, "members") or not self.members:
            return
        if any(m.begun and not (self.bulk and not m.pulled) for m in self.members):
            return
        if any(not m.begun and not self._needs_permission(m) for m in self.members):
            return
        before = deepcopy(self.clocks)
        for member in self.members:
            self._advance(member, pulled=member.begun)
        for _ in range(2):  # again after other members have moved on
            standings = [self.clocks.decide_clock(m.who, 0.0) for m in self.members]
        assert any(standing.allowed for standing in standings)
        self.clocks = before


class BulkDrift(Drift):
    bulk = True


TestDrift = Drift.TestCase
TestDrift.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBulkDrift = BulkDrift.TestCase
TestBulkDrift.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
