"""Changes of machines that bench/trace.py replays."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

TRACE = """0,add,node1
0,add,node2
60000,add,node3
60000,add,node4
120000,remove,node1
180000,remove,node3
240000,add,node5
300000,add,node6
"""


@pytest.fixture
def changes() -> Any:
    from training import changes  # noqa: PLC0415 - bench/ is on the path of a test only

    return changes


def levels_of(levels: Any) -> list[tuple[float, int]]:
    return [(level.at_s, level.machines) for level in levels]


def test_a_trace_is_read_as_numbers_of_machines_at_the_asked_speed(changes: Any) -> None:
    read = changes.read_trace(TRACE.splitlines(), 60.0)
    assert levels_of(read) == [(0, 2), (1, 4), (2, 3), (3, 2), (4, 3), (5, 4)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["0,add,a", "5,drain,a"], "line 2: '5,drain,a', expected milliseconds"),
        (["time,event,node", "0,add,a"], "line 1: 'time,event,node', expected milliseconds"),
        (["0,add,a,b"], "line 1: '0,add,a,b', expected milliseconds"),
        (["0,add,a", "5,add,a"], "line 2: a is present already"),
        (["0,add,a", "5,remove,b"], "line 2: b is not present"),
        (["", "\n"], "the trace is empty"),
    ],
)
def test_a_trace_of_another_form_is_refused(changes: Any, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changes.read_trace(lines, 1.0)


def test_a_trace_may_be_unsorted_and_have_line_ends_of_another_system(changes: Any) -> None:
    """Lines of one time keep their order: `a` is replaced by a node of the same name."""
    lines = ["2000,remove,a\r\n", "2000,add,a\r\n", "\r\n", "0,add,a\r\n", "1000,add,b\r\n"]
    assert levels_of(changes.read_trace(lines, 1.0)) == [(0, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize(
    "arguments",
    [
        "--mtbf 0",
        "--mtbf nan",
        "--mtbf 10 --speed 0",
        "--mtbf 10 --max 0",
        "--mtbf 10 --seconds 0",
        "--mtbf 10 --notice -1",
        "--trace {empty}",
        "--trace {empty}-of-another-name",
    ],
)
def test_an_option_without_meaning_is_refused_with_its_name(
    changes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str
) -> None:
    (tmp_path / "empty").touch()
    asked = arguments.format(empty=tmp_path / "empty").split()
    parser = ArgumentParser()
    changes.add_arguments(parser)
    with pytest.raises(SystemExit):
        changes.changes_asked(parser, parser.parse_args(asked))
    assert f"{asked[-2]}" in capsys.readouterr().err.splitlines()[-1]


def test_each_number_of_machines_has_an_equal_share_of_the_scaled_time(changes: Any) -> None:
    """Quantiles of 32 nodes, present equally long, leave a quarter of the time to each of four."""
    level = changes.Level
    course = [level(at_s=10.0 * at, machines=at + 1) for at in range(33)]
    scaled = changes.scaled([*course[:32], level(at_s=320.0, machines=32)], 4)
    assert levels_of(scaled) == [(0.0, 1), (80.0, 2), (160.0, 3), (240.0, 4)]


def test_a_trace_of_no_more_machines_than_are_asked_for_keeps_their_numbers(changes: Any) -> None:
    """A night of four machines of which one is lost is not replayed as one of larger losses."""
    lines = ["0,add,a", "0,add,b", "0,add,c", "0,add,d", "90,remove,a", "100,add,e", "200,add,f"]
    levels = changes.read_trace(lines[:-1], 1.0)
    assert levels_of(changes.scaled(levels, 4)) == [(0.0, 4), (0.09, 3), (0.1, 4)]
    larger = changes.read_trace(lines, 1.0)
    assert {level.machines for level in changes.scaled(larger, 4)} != {3, 4}


def test_a_scaled_trace_begins_with_its_first_machine_and_never_has_none(changes: Any) -> None:
    lines = [
        "5000,add,a",
        "6000,add,b",
        "7000,remove,a",
        "8000,remove,b",
        "9000,add,c",
        "9500,add,d",
    ]
    scaled = changes.scaled(changes.read_trace(lines, 1.0), 2)
    assert scaled[0].at_s == 0.0
    assert {level.machines for level in scaled} <= {1, 2}


def test_a_trace_and_a_seed_give_the_same_changes(changes: Any) -> None:
    levels = changes.read_trace(TRACE.splitlines(), 1.0)
    assert changes.changes_of(levels, 3) == changes.changes_of(levels, 3)
    others = [changes.changes_of(levels, seed) for seed in range(8)]
    assert any(each != others[0] for each in others)


def test_machines_of_the_start_are_settled(changes: Any) -> None:
    """Machines of the start count as training when the clock starts: either of two may be lost at
    once, and then the other stays."""
    levels = [changes.Level(at_s=at, machines=n) for at, n in ((0.0, 2), (1.0, 1), (2.0, 2))]
    found = changes.changes_of([*levels, changes.Level(at_s=3.0, machines=1)], 1)
    assert [(change.at_s, change.joins) for change in found[2:]] == [
        (1.0, False),
        (2.0, True),
        (3.0, False),
    ]
    assert found[-1].machine == found[-2].machine


@pytest.mark.parametrize("seed", range(20))
def test_the_last_settled_machine_is_never_lost(changes: Any, seed: int) -> None:
    """Machines of the start are settled: they train when the clock starts."""
    found = changes.poisson(
        seed=seed, mtbf_s=4.0, replaced_after_s=6.0, num_machines=4, length_s=300.0
    )
    since: dict[str, float] = {}
    assert sum(not change.joins for change in found) > 20
    for change in found:
        if change.joins:
            settled = -changes.SETTLED_S if change.at_s == 0.0 else change.at_s
            since[change.machine] = settled
        else:
            del since[change.machine]
        assert any(change.at_s - at_s >= changes.SETTLED_S for at_s in since.values()), change
        assert len(since) <= 4


def test_losses_come_as_often_as_asked_and_each_is_replaced(changes: Any) -> None:
    found = changes.poisson(
        seed=1, mtbf_s=20.0, replaced_after_s=1.0, num_machines=4, length_s=20_000.0
    )
    losses = [change for change in found if not change.joins]
    joins = [change for change in found if change.joins and change.at_s > 0]
    assert len(losses) == pytest.approx(1000, rel=0.1)
    assert len(losses) - len(joins) in (0, 1)
    assert [change.at_s for change in found] == sorted(change.at_s for change in found)


def test_machines_of_the_start_are_separated_from_those_that_join(changes: Any) -> None:
    first, later = changes.starting(
        changes.poisson(seed=1, mtbf_s=5.0, replaced_after_s=2.0, num_machines=3, length_s=60.0)
    )
    assert first == ["machine-0", "machine-1", "machine-2"]
    assert all(change.at_s > 0 for change in later)
    assert changes.interruption_s(later, 60.0) == 60.0 / len(later)


def test_a_trace_without_a_name_is_an_error(
    changes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--trace "$TRACE"` of an unset variable ends with a message."""
    parser = ArgumentParser()
    changes.add_arguments(parser)
    with pytest.raises(SystemExit):
        changes.changes_asked(parser, parser.parse_args(["--trace", ""]))
    assert "--trace" in capsys.readouterr().err
