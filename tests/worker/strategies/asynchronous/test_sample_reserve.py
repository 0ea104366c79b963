"""Samples that a member holds in advance, and those that it returns."""

import pytest

from shoal.strategies.asynchronous.sample_reserve import AHEAD_S, Pace, SampleReserve
from shoal_client.progress.ranges import SampleRange, joined, subtract_ranges

STEP, NUM_SAMPLES = 10, 10**9


def paced(samples_per_s: float, *, share: int = NUM_SAMPLES) -> SampleReserve:
    """Return the reserve of a member with this pace."""
    reserve = SampleReserve(STEP, NUM_SAMPLES)
    reserve.pace.record_trained(int(10 * samples_per_s), 10.0)
    reserve.beyond_share(share, 0)
    return reserve


def test_a_reserve_lasts_for_a_long_outage() -> None:
    """The reserve has whole steps, and two of them while the pace is unknown."""
    assert SampleReserve(STEP, NUM_SAMPLES).lacking == 2 * STEP
    assert paced(100.0).lacking == 100.0 * AHEAD_S


def test_more_samples_are_requested_once_a_quarter_is_used() -> None:
    """Samples are held in few ranges this way."""
    reserve = paced(1.0)
    reserve.add(SampleRange(0, 0, int(AHEAD_S)))
    while reserve.lacking == 0:
        reserve.take(STEP)
    assert reserve.num_ready == pytest.approx(0.75 * AHEAD_S, abs=STEP)
    assert reserve.lacking + reserve.num_ready == AHEAD_S


def test_without_a_known_share_two_steps_are_requested() -> None:
    assert paced(100.0, share=0).lacking == 2 * STEP


def test_batches_are_cut_from_what_is_held_in_order() -> None:
    """Adjacent ranges are joined, so a batch is short only at the end of an epoch."""
    reserve = SampleReserve(STEP, NUM_SAMPLES)
    for span in (SampleRange(0, 5, 12), SampleRange(0, 12, 18), SampleRange(1, 0, 4)):
        reserve.add(span)
    taken = []
    while (span := reserve.take(STEP)) is not None:
        taken.append((span.epoch, span.start, span.stop))
    assert taken == [(0, 5, 15), (0, 15, 18), (1, 0, 4)]


def test_samples_beyond_the_share_are_returned_from_the_end() -> None:
    """Whole steps are returned, and nothing that has begun."""
    reserve = paced(1.0)
    reserve.add(SampleRange(0, 0, 100))
    reserve.take(STEP)
    assert reserve.beyond_share(55, 100) == [SampleRange(0, 60, 100)]
    assert reserve.num_ready == 50
    assert reserve.beyond_share(1, 60) == [SampleRange(0, 10, 60)]
    assert reserve.beyond_share(1, 10) == []


def test_lost_samples_are_not_begun() -> None:
    reserve = SampleReserve(STEP, NUM_SAMPLES)
    reserve.add(SampleRange(0, 0, 30))
    reserve.remove([SampleRange(0, 5, 20), SampleRange(1, 0, 30)])
    assert reserve.take(STEP) == SampleRange(0, 0, 5)
    assert reserve.take(STEP) == SampleRange(0, 20, 30)


def test_the_pace_follows_the_newest_half_minute() -> None:
    pace = Pace()
    assert pace.samples_per_s == 0.0
    pace.record_trained(1000, 1.0)
    for _ in range(100):
        pace.record_trained(10, 1.0)
    assert pace.samples_per_s == pytest.approx(10.0, rel=0.2)


def test_ranges_are_joined_and_taken_apart() -> None:
    """The samples are the same either way."""
    parts = [SampleRange(0, 4, 8), SampleRange(1, 0, 4), SampleRange(0, 0, 4)]
    assert joined(parts) == [SampleRange(0, 0, 8), SampleRange(1, 0, 4)]
    assert subtract_ranges(joined(parts), [SampleRange(0, 2, 6), SampleRange(1, 3, 9)]) == [
        SampleRange(0, 0, 2),
        SampleRange(0, 6, 8),
        SampleRange(1, 0, 3),
    ]
