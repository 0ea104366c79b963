"""Pauses of members, and bring-ups that make progress, in virtual time."""

import pytest
from support.members.job_world import SimMember, World, digest_of, training

from shoal_server.core.generations.roster import Generation, JobSpec, MemberInfo
from shoal_server.core.job.job import Job
from shoal_server.core.limits import Limits
from shoal_server.core.membership import events
from shoal_server.core.membership.phases import Phase

LIMITS = Limits()


def pause(w: World, name: str, limit_s: float = 1800.0, elapsed_s: float = 0.0) -> None:
    event = events.MemberPaused(
        **World.process_of(w.members[name]),
        reason="validation",
        limit_s=limit_s,
        elapsed_s=elapsed_s,
    )
    w.send(w.members[name], event)


def resume(w: World, name: str) -> None:
    w.send(w.members[name], events.MemberResumed(**World.process_of(w.members[name])))


def test_a_joiner_waits_for_the_end_of_a_pause_beyond_the_join_limit() -> None:
    w = training("a", "b")
    pause(w, "a")
    w.run(2.0)
    w.join("c")
    w.run(2.0 + 5 * LIMITS.join_s)
    assert w.job.running is not None
    assert w.job.running.generation == 1
    why = w.job.why_paused(w.now_s)
    assert why == f"rank 0 (a) is paused: validation, for {w.now_s - 1.0:.0f} s of 1800 s"
    resume(w, "a")
    w.run(w.now_s + 5.0)
    assert w.job.running.member_ids == ("a", "b", "c")
    assert not w.job.why_paused()


def test_an_evaluation_of_many_members_notifies_each_of_them_a_few_times() -> None:
    """Each member pauses, then each resumes; a notice about each of these to each member would
    overflow their streams. Up to three paused members are always named."""
    names = [f"m{number:03}" for number in range(200)]
    job = Job(spec=JobSpec(job="j", max_members=200), limits=LIMITS, digest_of=digest_of)
    for name in names:
        joined = events.MemberJoined(
            member_id=name, incarnation=name, spec=job.spec, info=MemberInfo(host="h")
        )
        job.handle(joined, 0.0)
    notices: list[tuple[str, ...]] = []

    def note(event: events.MemberEvent) -> None:
        for effect in job.handle(event, 1.0):
            if isinstance(effect, events.SendNotice) and effect.member_id == "m000":
                assert isinstance(effect.notice, events.PausesNotice)
                notices.append(effect.notice.member_ids)

    for name in names:
        paused = events.MemberPaused(
            member_id=name, incarnation=name, reason="evaluation", limit_s=1800.0
        )
        note(paused)
    num_paused = len(notices)
    for name in names:
        note(events.MemberResumed(member_id=name, incarnation=name))
    assert notices[:3] == [("m000",), ("m000", "m001"), ("m000", "m001", "m002")]
    assert notices[-4:] == [("m197", "m198", "m199"), ("m198", "m199"), ("m199",), ()]
    assert max(len(each) for each in notices) == 3
    assert num_paused <= 8
    assert len(notices) <= 16


def test_a_late_report_of_an_earlier_pause_changes_nothing() -> None:
    """A report may arrive after the end of its pause, or during the next one. A member must not be
    removed for a pause that is over."""
    w = training("a", "b")
    process = World.process_of(w.members["a"])

    def pause_begins(number: int) -> events.MemberPaused:
        return events.MemberPaused(**process, reason="validation", limit_s=5.0, number=number)

    for event in (pause_begins(1), events.MemberResumed(**process, number=1), pause_begins(1)):
        w.job.handle(event, w.now_s)
    assert not w.job.why_paused()
    w.job.handle(pause_begins(2), w.now_s)
    for late in (pause_begins(1), events.MemberResumed(**process, number=1)):
        w.job.handle(late, w.now_s)
        assert "is paused" in w.job.why_paused()
    w.job.handle(events.MemberResumed(**process, number=2), w.now_s)
    assert not w.job.why_paused()
    w.run(w.now_s + 10.0)
    assert w.roster() == ["a", "b"]


def test_a_first_generation_waits_for_a_paused_member_beyond_the_last_call() -> None:
    w = World(JobSpec(job="j", desired_members=2))
    w.join("b")
    late = w.members["b"]
    w.job.handle(
        events.MemberJoined(
            member_id="a", incarnation="1", spec=w.job.spec, info=MemberInfo(host="h")
        ),
        w.now_s,
    )
    process = {"member_id": "a", "incarnation": "1"}
    w.job.handle(events.MemberPaused(**process, reason="download", limit_s=1000.0), w.now_s)
    w.run(2 * LIMITS.join_s)
    assert w.job.phase is Phase.COLLECT
    assert late.refused is None
    w.job.handle(events.MemberResumed(**process), w.now_s)
    w.run(w.now_s + LIMITS.last_call_s + 1.0)
    assert w.job.phase is Phase.RUNNING
    assert w.roster() == ["b"]


def test_a_member_whose_pause_exceeds_its_limit_is_removed() -> None:
    w = training("a", "b")
    paused = w.members["a"]
    pause(w, "a", limit_s=40.0)
    w.run(40.0)
    assert not paused.refused
    w.run(45.0)
    assert paused.refused is not None
    assert "rank 0 (a) is paused: validation, for 40 s of 40 s" in paused.refused.what
    assert w.job.running is not None
    assert w.job.running.member_ids == ("b",)


def test_a_pause_reported_to_a_new_leader_keeps_its_limit() -> None:
    """The report has the seconds that have passed: 30 of 40."""
    w = training("a", "b")
    paused = w.members["a"]
    pause(w, "a", limit_s=40.0, elapsed_s=30.0)
    w.run(10.5)
    assert not paused.refused
    w.run(13.0)
    assert paused.refused is not None


def test_a_member_killed_during_a_pause_is_lost_at_once() -> None:
    """The other members form the next generation once the pause is over."""
    w = training("a", "b", "c")
    pause(w, "a")
    w.run(2.0)
    w.kill("c", seen_by_launcher=True)
    w.run(2.5)
    assert w.job.running is None or w.job.running.generation > 1
    assert "c" not in w.job.members
    resume(w, "a")
    w.run(5.0)
    assert w.job.running is not None
    assert w.job.running.member_ids == ("a", "b")


def test_a_paused_joiner_does_not_extend_a_bring_up() -> None:
    """A member that does not become ready is removed as without the pause."""
    w = Slow(JobSpec(job="j", desired_members=2), slow="a")
    for name in "ab":
        w.join(name)
    w.run(1.0)
    attended = events.MemberJoined(
        member_id="c", incarnation="1", spec=w.job.spec, info=MemberInfo(host="h")
    )
    w.job.handle(attended, w.now_s)
    w.job.handle(
        events.MemberPaused(member_id="c", incarnation="1", reason="load", limit_s=1000.0), w.now_s
    )
    w.run(1.0 + LIMITS.bring_up_s)
    assert w.gone
    assert not w.job.why_paused()


class Slow(World):
    """World in which the bring-up of the named members never ends."""

    def __init__(self, spec: JobSpec, slow: str) -> None:
        super().__init__(spec)
        self.slow = slow

    def bring_up(self, member: SimMember, generation: Generation) -> None:
        if member.name not in self.slow:
            super().bring_up(member, generation)

    def beat(self, name: str, **figures: int | bool | float) -> None:
        """Send a heartbeat with these figures of the member's trainer."""
        member = self.members[name]
        self.job.heartbeat(
            events.HeartbeatReceived(**World.process_of(member), **figures), self.now_s
        )  # type: ignore[arg-type]


def _joining(slow: str = "abc") -> Slow:
    """Return a job in which a and b have trained, and c joins with a long bring-up."""
    w = Slow(JobSpec(job="j", desired_members=2), slow="")
    w.join("a")
    w.join("b")
    w.run(1.0)
    w.train(7)
    w.slow = slow
    w.join("c")
    w.run(2.0)
    assert w.job.phase is Phase.COMMITTED
    return w


def test_a_bring_up_that_makes_progress_is_never_late() -> None:
    """A bring-up may take ten times the limit: the limit counts only time in which no member makes
    progress."""
    w = _joining()
    until_s = w.now_s + 10 * LIMITS.bring_up_s
    moved = 0
    while w.now_s < until_s:
        w.run(w.now_s + LIMITS.bring_up_s / 3)
        moved += 1
        w.beat("a", moved=1, waits=True)
        w.beat("b", moved=moved, waits=True)
        assert w.job.phase is Phase.COMMITTED, w.job.reason
    for name in "abc":
        ready = events.ReadinessReported(
            **World.process_of(w.members[name]), generation=w.job.last_generation
        )
        w.send(w.members[name], ready)
    w.run(w.now_s + 1.0)
    assert w.roster() == ["a", "b", "c"]


def test_a_bring_up_with_endless_progress_fails_at_a_limit() -> None:
    """The joiner that never becomes ready is refused, and the other members train on."""
    w = _joining()
    newcomer, moved, w.slow = w.members["c"], 0, ""
    until_s = w.now_s + LIMITS.collective_s + LIMITS.longest_bring_up_s + LIMITS.bring_up_s
    while w.now_s < until_s and newcomer.refused is None:
        w.run(w.now_s + LIMITS.bring_up_s / 2)
        moved += 1
        for name in "ab":
            w.beat(name, moved=1, waits=True)
        if newcomer.refused is None:
            w.beat("c", moved=moved)
    assert w.now_s > LIMITS.longest_bring_up_s
    assert newcomer.refused is not None
    assert "c did not bring the generation up" in newcomer.refused.what
    w.run(w.now_s + 10.0)
    assert w.roster() == ["a", "b"]


def test_the_member_that_makes_no_progress_is_refused_and_not_those_that_wait() -> None:
    """The joiner may compile its model; a and b have the state, and wait."""
    w = _joining()
    newcomer = w.members["c"]
    for name in "ab":
        w.beat(name, moved=1, waits=True)
    w.beat("c", moved=1, own_code_s=1.0)
    w.slow = ""
    w.run(w.now_s + LIMITS.collective_s + 2 * LIMITS.bring_up_s + 1.0)
    assert newcomer.refused is not None
    assert "c did not bring the generation up" in newcomer.refused.what
    assert w.roster() == ["a", "b"]


def test_if_all_members_wait_for_each_other_the_bring_up_is_repeated() -> None:
    w = _joining()
    for name in "abc":
        w.beat(name, moved=1, waits=True)
    w.slow = ""
    w.run(w.now_s + LIMITS.collective_s + 2 * LIMITS.bring_up_s + 10.0)
    assert w.roster() == ["a", "b", "c"]
    assert any("wait for each other" in line for line in w.log)


@pytest.mark.parametrize(
    ("loads", "where"), [(False, "in your code"), (True, "waiting for a batch to be loaded")]
)
def test_a_failed_collective_names_the_slow_member_with_its_time_and_a_remedy(
    loads: bool, where: str
) -> None:
    w = training("a", "b")
    away = w.members["a"]
    w.run(40.0)
    w.job.heartbeat(
        events.HeartbeatReceived(**World.process_of(away), own_code_s=31.0, loads=loads), w.now_s
    )
    w.send(
        w.members["b"],
        events.BreakReported(**World.process_of(w.members["b"]), generation=1, error="hung"),
    )
    w.run(45.0)
    failure = next(line for line in w.log if "collective_failed" in line)
    assert f"rank 0 (a) has been {where} for 31 s" in failure
    assert "session.pause" in failure
