"""Detection of a loss that does not fall, as when members undo each other's steps."""

import math
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from shoal_proto.errors import TrainingFailed

log = structlog.get_logger(__name__)

WINDOW_STEPS = 10
NUM_RECENT = 3
EXPECTED_SHARE = 0.97
RISE_SHARE = 0.1
FIX = (
    "Lower the learning rate or the momentum, or train with fewer members:"
    " docs/parameter-server.md, Staleness."
)
BLOW_UP = 4.0
"""Ratio of the first window's mean to its first loss, above which the first loss is the
baseline.
"""
PATIENCE_UPDATES = 200
"""Number of updates since the first window before which a finite loss is not reported."""
_IN_WORDS = {
    "loss_not_finite": "is not finite",
    "loss_rising": "has risen",
    "loss_not_falling": "has not fallen",
}


@dataclass(frozen=True, kw_only=True)
class Stagnation:
    """A loss that has not fallen, has risen, or is not finite."""

    first: float
    """Mean loss of the first window, or its first loss (see BLOW_UP)."""
    recent: float
    num_updates: int
    counted: str = "updates"

    @property
    def event(self) -> str:
        if not math.isfinite(self.recent):
            return "loss_not_finite"
        is_higher = self.recent > self.first + RISE_SHARE * abs(self.first)
        return "loss_rising" if is_higher else "loss_not_falling"

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.recent)

    def __str__(self) -> str:
        return (
            f"the loss {_IN_WORDS[self.event]}: {self.first:.4g} at first,"
            f" {self.recent:.4g} after {self.num_updates} {self.counted}"
        )


class LossWatch:
    def __init__(self, counted: str = "updates") -> None:
        self._counted = counted
        self._first: float | None = None
        self._began = 0
        self._recent: list[float] = []

    def judge_loss(
        self, mean_loss: float, num_updates: int, first_loss: float = math.inf
    ) -> Stagnation | None:
        """Judge the mean loss of a window that ended at `num_updates` of the job.

        `first_loss`: the first loss in the window. Returns None if the loss falls, or if it is too
        early to tell.
        """
        if self._first is None:
            is_finite = math.isfinite(mean_loss)
            blown_up = not is_finite or mean_loss > BLOW_UP * first_loss > 0
            first = first_loss if blown_up else mean_loss
            self._first = first if math.isfinite(first) else None
            self._began = num_updates
            return None if is_finite else self._stagnation(first, mean_loss, 0)
        self._recent = [*self._recent, mean_loss][-NUM_RECENT:]
        since = num_updates - self._began
        if not math.isfinite(mean_loss):
            # Reported at once: waiting would not help.
            return self._stagnation(self._first, mean_loss, since)
        if len(self._recent) < NUM_RECENT or since < PATIENCE_UPDATES:
            return None
        recent = sum(self._recent) / NUM_RECENT
        # For a negative loss the share is inverted. A mean that is NaN compares false.
        low = EXPECTED_SHARE if self._first > 0 else 1 / EXPECTED_SHARE
        if recent < low * self._first:
            return None
        return self._stagnation(self._first, recent, since)

    def _stagnation(self, first: float, recent: float, since: int) -> Stagnation:
        return Stagnation(first=first, recent=recent, num_updates=since, counted=self._counted)


class LossMonitor:
    """Monitor of one member's losses; logs a warning when the loss stops falling."""

    def __init__(self, policy: str, counted: str = "updates") -> None:
        """`policy`: the job's treatment of staleness, for the log. `counted`: unit of
        `num_updates`.
        """
        self._policy, self._counted = policy, counted
        self._watch = LossWatch(counted)
        self._losses: list[Tensor] = []
        self._logged: Stagnation | None = None
        self._last: Stagnation | None = None

    @property
    def warning(self) -> str:
        """Text of the present problem's log line; empty if there is none."""
        return str(self._logged) if self._logged is not None else ""

    def add(self, loss: Tensor) -> None:
        """Add a loss. Only `judge_window` reads it, as reading waits for the GPU."""
        self._losses.append(loss.detach().float().reshape(()))

    def is_due(self, step: int) -> bool:
        return bool(self._losses) and not step % WINDOW_STEPS

    def judge_window(self, num_updates: int) -> None:
        """Judge a full window; log when a problem begins, changes or ends."""
        mean, first = torch.stack(self._losses).mean().item(), self._losses[0].item()
        self._losses.clear()
        self._last = self._watch.judge_loss(mean, num_updates, first)
        before = self._logged.event if self._logged is not None else ""
        if self._last is None:
            if before:
                log.info("loss_falls", reason=f"after {num_updates} {self._counted}", before=before)
            self._logged = None
        elif self._last.event != before:
            self._logged = self._last
            self._log(self._last)

    def check(self, *, must_fall: bool) -> None:
        """Judge the loss of the last full window, after this member's last step.

        Raises TrainingFailed for a loss that is not finite, and, with `must_fall`, for a loss that
        has not fallen.
        """
        last = self._last
        if last is None:
            return
        if must_fall or not last.is_finite:
            raise TrainingFailed(
                "all samples were trained on, but the final loss is wrong",
                seen=str(last),
                expected="a loss that is lower than at first" if must_fall else "a finite loss",
                fix=FIX,
            )
        # Repeated at the end: the first warning is far up in the log.
        self._logged = last
        self._log(last)

    def _log(self, stagnation: Stagnation) -> None:
        log.warning(stagnation.event, reason=str(stagnation), policy=self._policy, fix=FIX)
