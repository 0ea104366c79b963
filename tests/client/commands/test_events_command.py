"""`shoal events`, `shoal top` and `shoal status` against a status endpoint."""

import json
import time
from types import SimpleNamespace

import pytest
from support.clusters import status_world
from support.clusters.status_world import World

from shoal_client.cli import INTERRUPTED, main, parse
from shoal_client.commands import events, top
from shoal_server.core.generations.roster import Generation, Step
from shoal_server.core.membership.changes import ChangeSummary, Departure

LINE = "generation 4: lost vm-2 (SIGKILL); 3 go on; paused 0.06 s; 0 steps lost"


@pytest.fixture(autouse=True)
def narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def lose_a_member(world: World) -> None:
    """Put the event of a loss, and the summary of its change, on the board."""
    world.board.event("digits", "member_removed", "vm-2: its launcher saw it end (SIGKILL)")
    lost = (Departure(member_id="vm-2", cause="SIGKILL", lost=True),)
    world.board.record_generation(
        "digits",
        ChangeSummary(
            generation=Generation(4),
            cause="lost vm-2 (SIGKILL); 3 go on",
            lost=lost,
            left=(),
            joined=(),
            stayed=("w0", "w1", "w2"),
            synchronous=True,
            start=Step(9),
            steps_lost=0,
            down_s=0.04,
        ),
    )
    pause = {"generation": 4, "paused_s": 0.06, "lost_steps": 0}
    world.board.report("digits", "w1", status_world.health("w1", **pause))


@pytest.mark.long
def test_events_has_one_line_for_a_change_of_generations(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`-v` shows the other events as well."""
    lose_a_member(world)
    capsys.readouterr()  # discard log lines of the board
    assert parse(["events", "digits", "--http", url])() == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(f" {LINE}")
    assert parse(["events", "digits", "-v", "--http", url])() == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("member removed: vm-2: its launcher saw it end (SIGKILL)")
    assert second == line


@pytest.mark.long
def test_the_newest_events_can_be_shown_as_json(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(30):
        world.board.event("digits", "snapshot_taken", f"snapshot {number}")
    assert parse(["events", "digits", "-n", "2", "--json", "--http", url])() == 0
    shown = [json.loads(line)["reason"] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["snapshot 28", "snapshot 29"]


@pytest.mark.long
def test_new_events_are_followed(
    world: World, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Existing events are first, then each new one once. Ctrl-C ends the command."""
    pauses = iter((("the second", "the third"), ()))

    def meanwhile(seconds: float) -> None:
        try:
            new = next(pauses)
        except StopIteration:
            raise KeyboardInterrupt from None
        for reason in new:
            world.board.event("digits", "snapshot_taken", reason)

    world.board.event("digits", "snapshot_taken", "the first")
    capsys.readouterr()  # discard log lines of the board
    monkeypatch.setattr(events, "time", SimpleNamespace(sleep=meanwhile))
    assert main(["events", "digits", "-f", "--json", "--http", url]) == INTERRUPTED
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"]
    assert [each["reason"] for each in shown] == ["the first", "the second", "the third"]


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("command", ["events", "top"])
def test_an_unknown_job_is_refused(
    url: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "nojob", "--http", url]) == 1
    assert "there is no job nojob" in capsys.readouterr().err


@pytest.mark.long
def test_status_of_an_unknown_job_is_refused_with_the_known_ones(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--job", "nojob", "--http", url]) == 1
    errors = capsys.readouterr().err
    assert "there is no job nojob" in errors and "digits" in errors


@pytest.mark.long
def test_top_fits_a_narrow_terminal(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output is of all jobs, or of one with its members and newest changes."""
    lose_a_member(world)
    capsys.readouterr()  # discard log lines of the board
    world.put(status_world.job("x" * 60))
    assert parse(["top", "--once", "--http", url])() == 0
    of_all = capsys.readouterr().out
    assert "jobs that have not ended: 2" in of_all and "digits" in of_all
    assert of_all.count("running") == 2, "a long name hides no column"
    assert parse(["top", "digits", "--once", "--http", url])() == 0
    of_one = capsys.readouterr().out
    assert "w1" in of_one and "3 go on; paused 0.06 s" in of_one
    assert max(map(len, of_all.splitlines())) <= 80
    table = [line for line in of_one.splitlines() if line.startswith("w")]
    assert len(table) == 3 and max(map(len, table)) <= 80


def test_a_slow_member_is_found(world: World) -> None:
    """A member is slow if its steps take 1.5 times as long as the median member's. Of two members
    none counts as slow."""

    def entry(name: str, step_time_s: float) -> dict[str, object]:
        return {"member": {"member_id": name}, "health": {"step_time_s": step_time_s}}

    members = [entry("a", 0.1), entry("b", 0.11), entry("c", 0.2)]
    assert top.slowest(members) == {"c"}
    assert top.slowest(members[1:]) == set()


@pytest.mark.long
def test_status_counts_ended_jobs_and_shows_them_with_all(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most operators look for the jobs that run."""
    times = {"begun_unix_s": 1.0, "ended_unix_s": 2.0}
    world.put(status_world.job("old", phase="finished", state="finished", members=(), **times))
    assert parse(["status", "--http", url])() == 0
    shown = capsys.readouterr().out
    assert "digits" in shown and "old" not in shown
    assert "1 more job has ended: --all shows it, `shoal jobs` lists it" in shown
    assert parse(["status", "--all", "--http", url])() == 0
    assert "old" in capsys.readouterr().out


@pytest.mark.long
def test_status_shows_the_job_that_ended_last_if_all_have_ended(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user who looks after the end of a run sees its outcome."""
    world.by_name.clear()
    for name, ended_unix_s in (("b", 2.0), ("c", 9.0), ("a", 3.0)):
        times = {"begun_unix_s": 1.0, "ended_unix_s": ended_unix_s}
        world.put(status_world.job(name, phase="finished", state="finished", members=(), **times))
    assert parse(["status", "--http", url])() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if "finished" in line] == [["c", "finished"]]
    assert lines[-1] == "2 more jobs have ended: --all shows them, `shoal jobs` lists them"
