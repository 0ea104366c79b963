"""Series of a job's figures: their number of points is bounded, and a new leader continues them."""

import math

import pytest
from pydantic import TypeAdapter

from shoal_server.status.history.logged import LoggedSeries
from shoal_server.status.history.records import SeriesView
from shoal_server.status.history.series import MAX_RANKS, Reading, Series
from shoal_server.status.history.thinned import LEVEL_POINTS, MAX_POINTS

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


def test_at_first_each_second_has_a_point() -> None:
    view = filled(3).view()
    assert view.interval_s == 1.0
    assert view.step == (0, 1, 2)
    assert view.loss == (1.0, 0.5, 0.33333)
    assert view.samples_per_s == (150.0,) * 3
    assert (view.step_s[0], view.slowest_step_s[0]) == (0.02, 0.03)
    assert view.step_s_by_rank == ((0.01,) * 3, (0.03,) * 3)


def test_a_long_job_has_a_bounded_number_of_points() -> None:
    """Each point is the mean of its interval, and the whole time is covered."""
    view = filled(86_400 // 8).view()
    assert len(view.unix_s) <= MAX_POINTS
    assert view.interval_s * len(view.unix_s) >= 86_400 // 8
    assert view.samples_per_s[0] == 150.0
    assert view.generation[-1] == 1 + (86_400 // 8 - 1) // 1000
    starts = [later - earlier for earlier, later in zip(view.unix_s, view.unix_s[1:], strict=False)]
    assert set(starts) == {view.interval_s}


def test_the_newest_part_has_as_many_intervals_as_the_whole() -> None:
    """The last 15 minutes of three hours alone have a hundred. The number of points that are kept
    grows with the logarithm of the job's age."""
    seconds = 86_400 // 8
    series = filled(seconds)
    view = series.view(900.0)
    assert view.interval_s == 8.0
    assert 900 / 8 <= len(view.unix_s) <= 900 / 8 + 1
    assert view.step[-1] == seconds - 1
    assert view.unix_s[0] <= 1_000_000 + seconds - 900 < view.unix_s[1]
    assert view.samples_per_s == (150.0,) * len(view.unix_s)
    assert seconds - 1100 < series.step_before(900.0) < seconds - 900
    assert series.step_before(0.0) == 0
    num_kept = sum(1 for _ in series._curve.points())
    assert num_kept <= LEVEL_POINTS * (2 + math.log2(seconds / LEVEL_POINTS))
    assert series.steps_per_s() == pytest.approx(1.0)


def test_points_of_rare_readings_are_bounded() -> None:
    """The number of points stays bounded although no two of the first readings are in one
    interval."""
    series = Series()
    for second in range(0, 86_400, 20):
        series.add(reading(second), 1_000_000.0 + second)
    assert all(len(series.view(last_s).unix_s) <= MAX_POINTS for last_s in (0.0, 900.0, 21_600.0))
    assert len(series.view(900.0).unix_s) == 45


def test_logged_values_are_dense_in_their_newest_part() -> None:
    """Values are means of intervals, also after a new leader has continued the series."""
    series = LoggedSeries()
    for step in range(10_000):
        series.add(step, float(step))
    whole, newest = series.view("x"), series.view("x", 9900)
    assert (whole.interval_steps, newest.interval_steps) == (64, 2)
    assert whole.values[0] == sum(range(64)) / 64
    assert (newest.steps[0], newest.values[0]) == (9900, 9900.5)
    again = LoggedSeries.from_view(whole)
    again.add(9999, 1.0)
    again.add(10_000, 7.0)
    assert again.view("x").values[0] == sum(range(128)) / 128
    assert (again.view("x").newest_step, again.view("x").newest) == (10_000, 7.0)


def test_missing_figures_are_gaps_and_not_zeros() -> None:
    series = Series()
    series.add(reading(1, losses=(), samples_per_s=(), step_s={}), 10.0)
    series.add(reading(2, losses=(math.nan,), staleness=(2.0, 4.0)), 11.0)
    view = series.view()
    assert view.loss == (None, None)
    assert view.samples_per_s == (None, 150.0)
    assert view.staleness == (None, 3.0)


def test_only_the_first_ranks_have_their_own_step_times() -> None:
    series = Series()
    times = dict.fromkeys(range(1000), 0.01) | {777: 0.5}
    series.add(reading(1, step_s=times), 10.0)
    view = series.view()
    assert len(view.step_s_by_rank) == MAX_RANKS
    assert (view.step_s[0], view.slowest_step_s[0]) == (0.01, 0.5)


def test_a_new_leader_continues_the_series() -> None:
    """The series is restored from JSON, as stored in etcd; newer readings follow."""
    kept = VIEW.dump_json(filled(500).view())
    series = Series()
    series.add(reading(600), 1_000_600.0)
    series.restore(VIEW.validate_json(kept))
    view = series.view()
    assert view.step[-1] == 600
    assert view.step[-2] == 499
    assert view.loss[0] == filled(500).view().loss[0]
    assert len(view.unix_s) <= MAX_POINTS


def test_a_reading_of_a_clock_that_was_set_back_is_kept() -> None:
    series = Series()
    series.add(reading(1), 100.0)
    series.add(reading(2), 40.0)
    assert series.view().step == (2,)


@pytest.mark.parametrize("is_restored", [False, True])
def test_readings_of_a_clock_that_was_ahead_for_a_moment_are_dropped(is_restored: bool) -> None:
    """The chart goes on, and does not wait until that time has come."""
    series = filled(500)
    for second in (1, 2):
        series.add(reading(500), 1_003_600.0 + second)
    if is_restored:
        series, kept = Series(), series.view()
        series.restore(kept)
    for second in range(500, 700):
        series.add(reading(second), 1_000_000.0 + second)
    view = series.view()
    assert view.unix_s[-1] + view.interval_s == 1_000_700.0
    assert set(view.step) >= {499, 699}
    assert series.view(60.0).step[-1] == 699


def test_readings_of_a_clock_that_is_far_behind_cost_no_points() -> None:
    """The coordinator may have begun with a clock that is not set yet."""
    series = filled(500)
    before = series.view()
    series.add(reading(500), 0.0)
    view = series.view()
    assert (view.unix_s, view.step[:-1]) == (before.unix_s, before.step[:-1])
