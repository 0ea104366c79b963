"""Effective time at scale, as bench/goodput_model.py computes it."""

import json
from math import log
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[2] / "docs" / "benchmarks" / "results"


@pytest.fixture
def model() -> Any:
    import goodput_model  # noqa: PLC0415 - bench/ is on the path of a test only

    return goodput_model


def test_the_published_points_of_one_paper_agree_with_the_model(model: Any) -> None:
    """A pause of 10 minutes at 44 % and one of 3 minutes at 80 % imply about the same time between
    failures."""
    slow, fast = model.PUBLISHED[0].pause_s / -log(0.44), model.PUBLISHED[1].pause_s / -log(0.80)
    assert slow == pytest.approx(fast, rel=0.15)


def test_more_machines_are_less_effective(model: Any) -> None:
    in_place = model.System(name="a", kind="measured", source="", pause_s=1.0)
    restarts = model.System(name="b", kind="measured", source="", pause_s=10.0, checkpoint_s=1.0)
    for system in (in_place, restarts):
        shares = [system.effective(1e6 / machines) for machines in model.MACHINES]
        assert shares == sorted(shares, reverse=True)
        assert 0 <= shares[-1] < shares[0] <= 1
    assert in_place.effective(100.0) > restarts.effective(100.0)


def test_a_restart_that_takes_longer_than_the_time_between_failures_never_ends(model: Any) -> None:
    assert model.restarted(1.0, 1e6, 10.0) == 0.0


def test_the_pause_of_a_kill_is_what_stalls_exceed_those_of_a_run_without_kills(model: Any) -> None:
    """Steps that were slower than the median are not a pause. Those that were trained again are,
    unless the system restarts from a checkpoint: the model computes their number."""
    own = {"system": "shoal-ddp", "kills": 10, "steps": 1000, "step_s": 0.1, "seconds": 120.0}
    own |= {"steps_twice": 30, "stalled_s": 6.0, "stalled_without_s": 1.0, "checkpoint_s": None}
    theirs = {**own, "system": "torchrun", "stalled_s": 61.0, "steps_twice": 100}
    theirs["checkpoint_s"] = 0.5
    alone = {**own, "system": "one-process", "kills": 0}
    found = model.measured([own, theirs, alone])
    assert [(each.name, each.pause_s, each.checkpoint_s) for each in found] == [
        ("shoal-ddp", pytest.approx(0.5), None),
        ("torchrun", pytest.approx(5.0), 0.5),
    ]


def test_computed_figures_are_marked_apart_from_published_ones(model: Any) -> None:
    kinds = {entry["what"] for entry in [*model.curves(model.PUBLISHED), *model.points()]}
    assert kinds == {"computed", "published"}
    assert all(entry["source"] for entry in [*model.curves(model.PUBLISHED), *model.points()])


def test_the_figures_of_record_are_those_of_the_constants_of_record(model: Any) -> None:
    path = RESULTS / "goodput_model.json"
    if not path.exists():
        pytest.skip("not computed yet")
    computed = [e for e in json.loads(path.read_text()) if e["what"] == "computed"]
    expected = model.curves([*model.measured(model.results("long_run")), *model.PUBLISHED])
    assert [
        {key: entry[key] for key in own} for entry, own in zip(computed, expected, strict=True)
    ] == expected
