"""Series of a job's figures: bounded, and the same after a change of leaders."""

import math

from pydantic import TypeAdapter

from shoal_server.status.history.records import SeriesView
from shoal_server.status.history.series import MAX_POINTS, MAX_RANKS, Reading, Series

VIEW = TypeAdapter(SeriesView)


def reading(step: int, **fields: object) -> Reading:
    known: dict[str, object] = {
        "generation": 1 + step // 1000,
        "step": step,
        "losses": (1.0 / (1 + step),),
        "samples_per_s": (100.0, 50.0),
        "step_s": {0: 0.01, 1: 0.03},
    }
    return Reading(**{**known, **fields})  # type: ignore[arg-type]


def filled(seconds: int) -> Series:
    series = Series()
    for second in range(seconds):
        series.add(reading(second), 1_000_000.0 + second)
    return series


def test_a_reading_is_kept_by_the_second_at_first() -> None:
    view = filled(3).view()
    assert view.interval_s == 1.0
    assert view.step == (0, 1, 2)
    assert view.loss == (1.0, 0.5, 0.33333)
    assert view.samples_per_s == (150.0,) * 3
    assert (view.step_s[0], view.slowest_step_s[0]) == (0.02, 0.03)
    assert view.step_s_by_rank == ((0.01,) * 3, (0.03,) * 3)


def test_a_job_of_a_day_takes_no_more_room_than_one_of_minutes() -> None:
    """Means stay means, and the whole time is covered."""
    view = filled(86_400 // 8).view()
    assert len(view.unix_s) <= MAX_POINTS
    assert view.interval_s * len(view.unix_s) >= 86_400 // 8
    assert view.samples_per_s[0] == 150.0
    assert view.generation[-1] == 1 + (86_400 // 8 - 1) // 1000
    starts = [later - earlier for earlier, later in zip(view.unix_s, view.unix_s[1:], strict=False)]
    assert set(starts) == {view.interval_s}


def test_what_is_not_said_is_a_gap_and_not_a_zero() -> None:
    series = Series()
    series.add(reading(1, losses=(), samples_per_s=(), step_s={}), 10.0)
    series.add(reading(2, losses=(math.nan,), staleness=(2.0, 4.0)), 11.0)
    view = series.view()
    assert view.loss == (None, None)
    assert view.samples_per_s == (None, 150.0)
    assert view.staleness == (None, 3.0)


def test_of_a_thousand_members_the_first_ranks_have_lines_of_their_own() -> None:
    series = Series()
    times = dict.fromkeys(range(1000), 0.01) | {777: 0.5}
    series.add(reading(1, step_s=times), 10.0)
    view = series.view()
    assert len(view.step_s_by_rank) == MAX_RANKS
    assert (view.step_s[0], view.slowest_step_s[0]) == (0.01, 0.5)


def test_another_leader_goes_on_from_what_was_kept() -> None:
    """The series is restored from JSON, as stored in etcd; newer readings come after it."""
    kept = VIEW.dump_json(filled(500).view())
    series = Series()
    series.add(reading(600), 1_000_600.0)
    series.restore(VIEW.validate_json(kept))
    view = series.view()
    assert view.step[-1] == 600
    assert view.step[-2] == 499
    assert view.loss[0] == filled(500).view().loss[0]
    assert len(view.unix_s) <= MAX_POINTS


def test_a_clock_that_was_set_back_loses_nothing() -> None:
    series = Series()
    series.add(reading(1), 100.0)
    series.add(reading(2), 40.0)
    assert series.view().step == (2,)
