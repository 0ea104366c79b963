"""A loss that does not fall is told; one that does, or of which it is too early to tell, is not."""

import math
from collections.abc import Sequence

import pytest

from shoal.strategies.asynchronous.loss_watch import PATIENCE_UPDATES, LossWatch

A_WINDOW = 30
"""Updates of all members in one window of this one."""


def said(losses: Sequence[float]) -> list[bool]:
    """Of each window's loss, whether something was said of it."""
    watch = LossWatch()
    return [watch.see(loss, 1 + i * A_WINDOW) is not None for i, loss in enumerate(losses)]


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
def test_a_loss_that_does_not_fall_is_told(losses: Sequence[float]) -> None:
    """Once the job has had its number of updates, and not before."""
    told = said(losses)
    assert told[-1]
    assert not any(told[: PATIENCE_UPDATES // A_WINDOW])


@pytest.mark.parametrize(
    "losses",
    [
        [2.3 * 0.98**i for i in range(20)],
        [2.3, *[1.5, 2.2, 1.8] * 6],
        [-1.0 - 0.1 * i for i in range(20)],
    ],
    ids=["slowly", "noisy", "below zero"],
)
def test_a_loss_that_falls_is_not(losses: Sequence[float]) -> None:
    """However slowly, and however the batches differ."""
    assert not any(said(losses))


def test_it_says_what_it_saw() -> None:
    """The first loss, the recent one, and after how many updates."""
    watch = LossWatch()
    told = [watch.see(2.3, 1 + i * 100) for i in range(6)]
    assert str(told[-1]) == "the loss has not fallen: 2.3 at first, 2.3 after 500 updates"


def test_it_takes_back_what_it_said() -> None:
    """Once the loss falls after all."""
    told = said([*[2.3] * 10, *[0.5] * 5])
    assert told[9]
    assert not told[-1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_told_at_once(bad: float) -> None:
    """However few updates there were."""
    watch = LossWatch()
    assert watch.see(2.3, 1) is None
    told = watch.see(bad, 4)
    assert told is not None
    assert told.event == "loss_not_finite"
    assert str(told).startswith("the loss is not finite: 2.3 at first")


def test_a_loss_that_rises_is_told_by_that_name() -> None:
    watch = LossWatch()
    told = [watch.see(2.3 + 0.2 * i, 1 + i * 100) for i in range(6)][-1]
    assert told is not None
    assert told.event == "loss_rising"
    assert "has risen: 2.3 at first, 3.1 after" in str(told)
