"""The line that describes a change of generations, made of reports of coordinator and members."""

from shoal_server.core.generations.roster import Generation, Step
from shoal_server.core.membership.changes import ChangeSummary, Departure
from shoal_server.status.board import StatusBoard
from shoal_server.status.history.change_reports import (
    REPORTED_WITHIN_S,
    ChangeReport,
    ChangeReports,
    seconds,
)

LOST = Departure(member_id="vm-2", cause="SIGKILL", lost=True)


def story(number: int = 4, **fields: object) -> ChangeSummary:
    known: dict[str, object] = {
        "generation": Generation(number),
        "cause": "lost vm-2 (SIGKILL); 3 go on",
        "lost": (LOST,),
        "left": (),
        "joined": (),
        "stayed": ("vm-0", "vm-1", "vm-3"),
        "synchronous": True,
        "start": Step(120),
        "steps_lost": 0,
        "down_s": 0.04,
    }
    return ChangeSummary(**{**known, **fields})  # type: ignore[arg-type]


def pause(member_id: str = "vm-0", paused_s: float = 0.06, **fields: int) -> ChangeReport:
    known = {"generation": 4, "steps_lost": 0}
    return ChangeReport(member_id=member_id, paused_s=paused_s, **{**known, **fields})


def test_a_change_is_described_once_a_member_has_reported_its_pause() -> None:
    stories = ChangeReports()
    assert stories.add_generation(story(), 100.0) == []
    (change,) = stories.paused(pause())
    assert change.line == "generation 4: lost vm-2 (SIGKILL); 3 go on; paused 0.06 s; 0 steps lost"
    assert stories.paused(pause("vm-1", 0.05)) == [], "it is described once"


def test_the_longest_pause_and_the_most_steps_count() -> None:
    """Reports after the line was logged are kept with the change."""
    stories = ChangeReports()
    stories.add_generation(story(), 100.0)
    stories.paused(pause())
    stories.paused(pause("vm-1", 0.25, steps_lost=3))
    (change,) = stories.changes
    assert (change.paused_s, change.steps_lost) == (0.25, 3)
    assert change.line.endswith("; paused 0.25 s; 3 steps lost")


def test_only_reports_of_members_that_trained_before_count() -> None:
    stories = ChangeReports()
    stories.add_generation(story(joined=("vm-9",)), 100.0)
    assert stories.paused(pause("vm-9")) == []
    assert stories.paused(pause(generation=3)) == [], "the report is of an earlier change"


def test_a_change_without_reports_is_described_after_a_time() -> None:
    stories = ChangeReports()
    stories.add_generation(story(), 100.0)
    assert stories.due_changes(100.0 + REPORTED_WITHIN_S - 0.1) == []
    (change,) = stories.due_changes(100.0 + REPORTED_WITHIN_S)
    assert change.line.endswith("3 go on; nobody trained for 0.04 s; 0 steps lost")
    assert stories.due_changes(1000.0) == []


def test_a_change_is_described_before_the_next_one() -> None:
    stories = ChangeReports()
    stories.add_generation(story(4), 100.0)
    changes = stories.add_generation(story(5, cause="vm-2 joined; 4 train", stayed=()), 101.0)
    assert [each.generation for each in changes] == [4, 5]


def test_a_change_of_an_asynchronous_job_has_no_pause() -> None:
    """The change is described at once."""
    (change,) = ChangeReports().add_generation(story(synchronous=False, down_s=0.0), 100.0)
    assert change.line == "generation 4: lost vm-2 (SIGKILL); 3 go on"


def test_pauses_beyond_the_time_without_a_generation_are_counted() -> None:
    """The coordinator counts the time without a generation itself."""
    stories = ChangeReports()
    stories.add_generation(story(down_s=0.05), 100.0)
    stories.paused(pause(paused_s=0.25))
    stories.paused(pause("vm-1", 0.3))
    assert abs(stories.extra_s - 0.25) < 1e-9


def test_the_line_is_an_event_and_other_events_are_details() -> None:
    board = StatusBoard(clock=lambda: 50.0)
    board.event("j", "phase_collect", "vm-2: its launcher saw it end (SIGKILL)")
    board.record_generation("j", story(stayed=()))
    board.event("j", "member_paused", "rank 0 is paused: evaluation")
    kinds = ["phase_collect", "generation_changed", "member_paused"]
    assert [each.kind for each in board.events("j")] == kinds
    (line,) = board.events("j", details=False)
    assert line.reason.startswith("generation 4: lost vm-2 (SIGKILL); 3 go on")


def test_times_have_two_digits_at_most() -> None:
    texts = [seconds(value) for value in (0.001, 0.064, 2.34, 54.4)]
    assert texts == ["0 s", "0.06 s", "2.3 s", "54 s"]
