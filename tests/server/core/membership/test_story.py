"""Summaries of changes from one generation to the next."""

import pytest
from support.members.job_world import World

from shoal_server.core.generations.roster import JobSpec
from shoal_server.core.membership import events
from shoal_server.core.membership.changes import ChangeSummary


def world(*names: str, low: int = 1) -> tuple[World, list[ChangeSummary]]:
    """Return a world in which these members train in generation 1, and its summaries."""
    spec = JobSpec(job="j", min_members=low, max_members=8, desired_members=len(names))
    w = World(spec)
    stories: list[ChangeSummary] = []
    note = w.job.emit

    def do(effect: events.Effect) -> None:
        if isinstance(effect, events.LogJobEvent) and effect.summary is not None:
            stories.append(effect.summary)
        note(effect)

    w.job.emit = do  # type: ignore[method-assign]
    for name in names:
        w.join(name)
    w.run(1.0)
    return w, stories


def lose(w: World, name: str, cause: str) -> None:
    """Report, as the launcher, that the member's process ended."""
    member = w.members.pop(name)
    member.alive = False
    w.gone.append(member)
    who = {"member_id": name, "incarnation": member.incarnation}
    event = events.MemberLost(**who, reason=f"its launcher saw it end ({cause})", cause=cause)
    w.later(lambda: w.deliver(event))


def test_the_summary_of_a_first_generation_has_its_number_of_members() -> None:
    """The summary has no lost steps and no time without training."""
    w, (first,) = world("a", "b", "c")
    assert first.cause == "3 begin"
    assert w.job.reason == "generation 1: 3 begin"
    assert (first.stayed, first.down_s, first.steps_lost) == ((), 0.0, 0)


def test_the_summary_of_a_loss_has_the_cause_that_its_launcher_reported() -> None:
    """The same text is the reason in the generation record."""
    w, stories = world("a", "b", "c", "d")
    lose(w, "c", "SIGKILL")
    w.run(5.0)
    story = stories[-1]
    assert story.cause == "lost c (SIGKILL); 3 go on"
    assert w.job.reason == f"generation {story.generation}: {story.cause}"
    assert w.written[story.generation][0].reason == story.cause
    assert story.stayed == ("a", "b", "d")
    assert story.down_s >= 0.0


def test_members_with_the_same_cause_are_named_together() -> None:
    w, stories = world("a", "b", "c", "d")
    lose(w, "a", "exit code 1")
    lose(w, "b", "SIGKILL")
    lose(w, "c", "SIGKILL")
    w.run(3.0)
    w.join("e")
    w.run(6.0)
    causes = " | ".join(each.cause for each in stories[1:])
    assert "b, c (SIGKILL)" in causes
    assert "a (exit code 1)" in causes
    assert stories[-1].cause == "e joined; 2 train"
    assert stories[-1].down_s == 0.0, "the generation before trained on meanwhile"


def test_a_drained_member_is_among_those_that_left() -> None:
    w, stories = world("a", "b")
    w.drain("b")
    w.run(5.0)
    assert stories[-1].cause == "b (drained: spot notice) left; 1 goes on"
    assert [each.member_id for each in stories[-1].left] == ["b"]
    assert stories[-1].lost == ()


def test_a_collective_that_failed_without_a_loss_is_the_cause() -> None:
    w, stories = world("a", "b")
    for name in ("a", "b"):
        who = w.process_of(w.members[name])
        w.deliver(
            events.BreakReported(**who, generation=w.job.last_generation, error="out of memory")
        )
    w.run(5.0)
    assert stories[-1].cause.startswith("a collective failed under b: out of memory")
    assert stories[-1].cause.endswith("; 2 go on")


def test_time_without_a_generation_counts_as_idle_time() -> None:
    """Idle time grows by the time from a break to the next generation."""
    w, stories = world("a", "b", low=2)
    begun_s = w.job.tally.idle_s
    lose(w, "b", "SIGKILL")
    w.run(11.0)
    assert not w.is_running()
    w.join("b")
    w.run(12.0)
    assert w.is_running()
    assert stories[-1].lost[0].cause == "SIGKILL"
    assert w.job.tally.idle_s - begun_s == pytest.approx(stories[-1].down_s)
    assert stories[-1].down_s > 9.0
