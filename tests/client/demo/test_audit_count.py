"""The demo's count of samples, from the lines that workers wrote."""

from pathlib import Path

import pytest

from shoal_client.demo.audit import (
    AuditLine,
    WorkerAudit,
    count_asynchronous,
    count_synchronous,
    generation_at,
    pause_s,
    read_account,
    recovery_s,
)

EXPECTED = [(0, position) for position in range(4)]


def begin(generation: int, step: int, *positions: int, at_s: float = 0.0) -> AuditLine:
    samples = tuple((0, position) for position in positions)
    return AuditLine(event="begin", at_s=at_s, generation=generation, step=step, samples=samples)


def commit(generation: int, step: int, at_s: float = 0.0) -> AuditLine:
    return AuditLine(event="commit", at_s=at_s, generation=generation, step=step)


def account(*lines: AuditLine, name: str = "a") -> WorkerAudit:
    return WorkerAudit(name=name, lines=lines)


def test_a_step_counts_if_a_member_committed_it() -> None:
    """The dead worker's share of the step counts as well."""
    dead = account(begin(1, 0, 0, 1))
    survivor = account(begin(1, 0, 2, 3), commit(1, 0))
    count = count_synchronous([dead, survivor], EXPECTED)
    assert (count.lost, count.repeated, count.steps) == (0, 0, 1)


def test_a_step_that_no_member_committed_counts_only_when_repeated() -> None:
    """Samples of such a step do not count as repeated."""
    dead = account(begin(1, 0, 0, 1))
    survivor = account(begin(1, 0, 2, 3), begin(2, 0, 0, 1, 2, 3), commit(2, 0))
    count = count_synchronous([dead, survivor], EXPECTED)
    assert (count.lost, count.repeated, count.steps) == (0, 0, 1)


def test_a_commit_of_the_dead_worker_alone_does_not_count() -> None:
    """The survivors take the step again, and it counts once."""
    dead = account(begin(1, 0, 0, 1), commit(1, 0))
    survivor = account(begin(1, 0, 2, 3), begin(2, 0, 0, 1, 2, 3), commit(2, 0))
    count = count_synchronous([dead, survivor], EXPECTED)
    assert (count.lost, count.repeated, count.steps) == (0, 0, 1)


def test_lost_and_repeated_samples_are_counted() -> None:
    """A survivor that continues after a step that no worker committed loses that step's samples."""
    worker = account(begin(1, 0, 0, 1), begin(2, 1, 2), commit(2, 1), begin(2, 2, 2), commit(2, 2))
    count = count_synchronous([worker], EXPECTED)
    assert (count.lost, count.repeated, count.steps, count.samples) == (3, 1, 2, 2)


def test_an_unanswered_push_counts_if_the_servers_applied_it() -> None:
    """The servers' number of applied pushes decides if the killed worker's last push, which got no
    answer, counts as a step."""
    dead = account(begin(1, 0, 0, 1), commit(1, 0), begin(1, 1, 2, 3))
    heir = account(begin(2, 0, 2, 3), commit(2, 0), name="b")
    applied = count_asynchronous([dead, heir], EXPECTED, pushes_applied=3)
    assert (applied.lost, applied.repeated, applied.steps) == (0, 2, 3)
    refused = count_asynchronous([dead, heir], EXPECTED, pushes_applied=2)
    assert (refused.lost, refused.repeated, refused.steps) == (0, 0, 2)
    unknown = count_asynchronous([dead, heir], EXPECTED, pushes_applied=None)
    assert (unknown.lost, unknown.repeated) == (0, 2)


def test_recovery_is_the_next_step_of_the_next_generation() -> None:
    """A step of the generation before does not count as a recovery."""
    survivor = account(commit(1, 0, 10.0), commit(1, 1, 10.6), commit(2, 2, 11.5))
    assert generation_at([survivor], 10.5) == 1
    assert recovery_s([survivor], 10.5, after_generation=1) == pytest.approx(1.0)
    assert recovery_s([survivor], 10.5) == pytest.approx(0.1)
    assert recovery_s([survivor], 12.0) is None


def test_a_pause_is_the_longest_gap_beyond_the_usual_step_time() -> None:
    """A gap of 0.5 s is a pause of 0.4 s if steps took 0.1 s before."""
    steady = [commit(1, index, 10.0 + index / 10) for index in range(11)]
    later = [commit(1, 11, 11.1), commit(1, 12, 11.6), commit(1, 13, 11.7)]
    assert pause_s([account(*steady, *later)], 11.0) == pytest.approx(0.4)
    assert pause_s([account(*steady, commit(1, 11, 11.1))], 11.0) == pytest.approx(0.0)


def test_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    """A file that ends within a line is read up to the line before."""
    path = tmp_path / "w-0.17.jsonl"
    whole = '{"event":"begin","at_s":1.5,"generation":1,"step":0,"epoch":2,"positions":[7,8]}\n'
    path.write_text(whole + '{"event":"com')
    read = read_account(path)
    assert read.name == "w-0.17"
    assert read.lines == (
        AuditLine(event="begin", at_s=1.5, generation=1, step=0, samples=((2, 7), (2, 8))),
    )
