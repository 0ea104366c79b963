"""Warnings for a loss that does not fall. A loss that falls, or that cannot be judged yet, gives
none."""

import math
from collections.abc import Sequence

import pytest
import torch
from structlog.testing import capture_logs

from shoal.strategies.asynchronous.loss_watch import PATIENCE_UPDATES, LossMonitor, LossWatch
from shoal_proto.errors import TrainingFailed

A_WINDOW = 30
"""Updates by all members in one window of this member."""


def warnings_of(losses: Sequence[float]) -> list[bool]:
    """Return True for each window whose loss gave a warning."""
    watch = LossWatch()
    return [watch.judge_loss(loss, 1 + i * A_WINDOW) is not None for i, loss in enumerate(losses)]


@pytest.mark.parametrize(
    "losses",
    [
        [2.303] * 20,
        [2.4, *[2.35] * 19],
        [2.3, 1.0, 0.5, *[2.31] * 17],
        [-1.0, *[-1.0] * 19],
    ],
    ids=["flat", "hardly", "fell and came back", "below zero"],
)
def test_a_loss_that_does_not_fall_is_warned_of(losses: Sequence[float]) -> None:
    """The warning comes once the job has had its number of updates, and not before."""
    warnings = warnings_of(losses)
    assert warnings[-1]
    assert not any(warnings[: PATIENCE_UPDATES // A_WINDOW])


@pytest.mark.parametrize(
    "losses",
    [
        [2.3 * 0.98**i for i in range(20)],
        [2.3, *[1.5, 2.2, 1.8] * 6],
        [-1.0 - 0.1 * i for i in range(20)],
    ],
    ids=["slowly", "noisy", "below zero"],
)
def test_a_loss_that_falls_gives_no_warning(losses: Sequence[float]) -> None:
    """Holds for a slow fall and for noisy batches."""
    assert not any(warnings_of(losses))


def test_a_loss_that_blew_up_at_once_is_warned_of() -> None:
    """Far too high rates ruin the first ten steps already: later losses are lower than these, but
    no lower than the very first one. A noisy first window is not mistaken for that."""
    ruined, noisy = LossWatch(), LossWatch()
    assert ruined.judge_loss(5000.0, 1, first_loss=2.3) is None
    assert noisy.judge_loss(2.3, 1, first_loss=0.9) is None
    warnings = [ruined.judge_loss(2.3, 1 + i * 100) for i in range(1, 6)]
    assert "2.3 at first" in str(warnings[-1])
    assert [noisy.judge_loss(1.5, 1 + i * 100) for i in range(1, 6)] == [None] * 5


def test_the_warning_has_both_losses_and_the_number_of_updates() -> None:
    """The warning has the first loss, the recent one, and the number of updates."""
    watch = LossWatch()
    warnings = [watch.judge_loss(2.3, 1 + i * 100) for i in range(6)]
    assert str(warnings[-1]) == "the loss has not fallen: 2.3 at first, 2.3 after 500 updates"


def test_the_warning_ends_once_the_loss_falls() -> None:
    """The warning ends once the loss falls after all."""
    warnings = warnings_of([*[2.3] * 10, *[0.5] * 5])
    assert warnings[9]
    assert not warnings[-1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_warned_of_at_once(bad: float) -> None:
    """The number of updates does not matter."""
    watch = LossWatch()
    assert watch.judge_loss(2.3, 1) is None
    warning = watch.judge_loss(bad, 4)
    assert warning is not None
    assert warning.event == "loss_not_finite"
    assert str(warning).startswith("the loss is not finite: 2.3 at first")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("first_loss", [2.3, math.nan])
def test_a_first_window_that_is_not_finite_is_warned_of(bad: float, first_loss: float) -> None:
    """Later windows are compared with the first loss, or with the first window that is finite."""
    watch = LossWatch()
    warning = watch.judge_loss(bad, 1, first_loss)
    assert warning is not None
    assert warning.event == "loss_not_finite"
    later = [watch.judge_loss(2.3 * 0.9**i, 1 + i * 100) for i in range(1, 6)]
    assert later == [None] * 5


def test_a_loss_that_rises_has_a_warning_of_its_own() -> None:
    watch = LossWatch()
    warning = [watch.judge_loss(2.3 + 0.2 * i, 1 + i * 100) for i in range(6)][-1]
    assert warning is not None
    assert warning.event == "loss_rising"
    assert "has risen: 2.3 at first, 3.1 after" in str(warning)


def monitored(losses: Sequence[float]) -> LossMonitor:
    """Return a member's monitor after these windows."""
    monitor = LossMonitor("staleness='damp'")
    for i, loss in enumerate(losses):
        monitor.add(torch.tensor(loss))
        monitor.judge_window(1 + i * 100)
    return monitor


def test_the_warning_keeps_its_text_while_nothing_changes() -> None:
    """The log has one line, and the page shows the same text. Another fault is reported again."""
    with capture_logs() as logs:
        assert monitored([2.3] * 9).warning == (
            "the loss has not fallen: 2.3 at first, 2.3 after 300 updates"
        )
    assert [line["event"] for line in logs] == ["loss_not_falling"]
    with capture_logs() as logs:
        assert monitored([*[2.3] * 6, *[4.0] * 6, *[0.1] * 4]).warning == ""
    assert [line["event"] for line in logs] == ["loss_not_falling", "loss_rising", "loss_falls"]


@pytest.mark.parametrize(
    ("losses", "must_fall", "fails"),
    [
        ([2.3, 1.0, 0.5, 0.2], True, False),
        ([2.3] * 9, False, False),
        ([2.3] * 9, True, True),
        ([2.3, 1.0, math.nan], False, True),
        ([2.3, math.nan, 1.0, 0.5, 0.2], False, False),
        ([math.nan, 2.3, 1.0, 0.5, 0.2], True, False),
        ([2.3], True, False),
    ],
    ids=[
        "falls",
        "flat",
        "flat, but must not",
        "ends as NaN",
        "was NaN",
        "began as NaN",
        "too early",
    ],
)
def test_a_job_fails_if_its_loss_is_not_finite_or_must_fall_and_has_not(
    losses: Sequence[float], must_fall: bool, fails: bool
) -> None:
    """A loss that is not finite at the end is a failure. A loss that has not fallen is a failure
    only if the script says so; otherwise it is the last line of the log."""
    monitor = monitored(losses)
    if fails:
        with pytest.raises(TrainingFailed, match="the loss "):
            monitor.check(must_fall=must_fall)
        return
    with capture_logs() as logs:
        monitor.check(must_fall=must_fall)
    assert [line["event"] for line in logs] == (["loss_not_falling"] if losses == [2.3] * 9 else [])
    assert not monitor.warning or "after 800 updates" in monitor.warning
