"""Phases of a schedule, with the learning rates of `torch.optim.lr_scheduler` to the last bit."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from shoal_proto.v1 import optimizer_pb2 as pb

MAX_MILESTONES = 4096


class ConstantRate:
    """A phase with a constant rate; subclasses override the methods in which their rate differs."""

    def expected(self) -> str:
        """Return the valid range of the settings if they are out of range; else an empty text."""
        return ""

    def opening(self, base: float) -> float:
        """Return the rate of the phase's first update, if the phase is the schedule's first."""
        return base

    def first_rate(self, base: float) -> float:
        """Return the rate of the first update of a later phase: torch's formula differs."""
        return self.opening(base)

    def following(self, since: int, base: float, lr: float) -> float:
        """Return the rate after `since` updates of the phase, 1 or more. `lr`: the rate before."""
        return lr


class Constant(ConstantRate):
    """ConstantLR."""

    def __init__(self, settings: pb.ConstantPhase) -> None:
        self._factor, self._total = settings.factor, settings.total_iters

    def expected(self) -> str:
        return "" if 0 < self._factor <= 1 else "0 < factor <= 1"

    def opening(self, base: float) -> float:
        return base * self._factor

    def first_rate(self, base: float) -> float:
        return base * (self._factor + (self._total == 0) * (1 - self._factor))

    def following(self, since: int, base: float, lr: float) -> float:
        return lr * (1.0 / self._factor) if since == self._total else lr


class Linear(ConstantRate):
    """LinearLR."""

    def __init__(self, settings: pb.LinearPhase) -> None:
        self._start, self._total = settings.start_factor, settings.total_iters
        self._rise = settings.end_factor - settings.start_factor
        self._end = settings.end_factor

    def expected(self) -> str:
        good = 0 < self._start <= 1 and 0 <= self._end <= 1 and self._total
        return "" if good else "0 < start_factor <= 1, 0 <= end_factor <= 1, 1 <= total_iters"

    def opening(self, base: float) -> float:
        return base * self._start

    def following(self, since: int, base: float, lr: float) -> float:
        if since > self._total:
            return lr
        return lr * (1.0 + self._rise / (self._total * self._start + (since - 1) * self._rise))


class StepDecay(ConstantRate):
    """StepLR."""

    def __init__(self, settings: pb.StepPhase) -> None:
        self._size, self._gamma = settings.step_size, settings.gamma

    def expected(self) -> str:
        good = self._size and _is_rate(self._gamma)
        return "" if good else "1 <= step_size, and a finite gamma from 0 up"

    def following(self, since: int, base: float, lr: float) -> float:
        return lr if since % self._size else lr * self._gamma


class MultiStep(ConstantRate):
    """MultiStepLR."""

    def __init__(self, settings: pb.MultiStepPhase) -> None:
        self._milestones, self._gamma = list(settings.milestones), settings.gamma

    def expected(self) -> str:
        good = len(self._milestones) <= MAX_MILESTONES and _is_rate(self._gamma)
        return "" if good else f"at most {MAX_MILESTONES} milestones, and a finite gamma from 0 up"

    def opening(self, base: float) -> float:
        return base * self._gamma ** self._milestones.count(0)

    def following(self, since: int, base: float, lr: float) -> float:
        return lr * self._gamma ** self._milestones.count(since)


class Exponential(ConstantRate):
    """ExponentialLR."""

    def __init__(self, settings: pb.ExponentialPhase) -> None:
        self._gamma = settings.gamma

    def expected(self) -> str:
        return "" if _is_rate(self._gamma) else "a finite gamma from 0 up"

    def following(self, since: int, base: float, lr: float) -> float:
        return lr * self._gamma


class Cosine(ConstantRate):
    """CosineAnnealingLR. Loshchilov and Hutter 2017, "SGDR", arXiv:1608.03983."""

    def __init__(self, settings: pb.CosinePhase) -> None:
        self._half_period, self._low = settings.t_max, settings.eta_min

    def expected(self) -> str:
        good = self._half_period and _is_rate(self._low)
        return "" if good else "1 <= t_max, and a finite eta_min from 0 up"

    def first_rate(self, base: float) -> float:
        return self._low + (base - self._low) * (1 + math.cos(0.0)) / 2

    def following(self, since: int, base: float, lr: float) -> float:
        half = self._half_period
        # After the lowest point the recursion would divide by 0.
        if (since - 1 - half) % (2 * half) == 0:
            return lr + (base - self._low) * (1 - math.cos(math.pi / half)) / 2
        now = 1 + math.cos(math.pi * since / half)
        before = 1 + math.cos(math.pi * (since - 1) / half)
        return now / before * (lr - self._low) + self._low


_KINDS: Mapping[str, Callable[[Any], ConstantRate]] = {
    "constant": Constant,
    "linear": Linear,
    "step": StepDecay,
    "multi_step": MultiStep,
    "exponential": Exponential,
    "cosine": Cosine,
}


def running(phase: pb.Phase) -> ConstantRate | None:
    """Return the phase of a message; None if its kind is not set."""
    kind = phase.WhichOneof("kind")
    return None if kind is None else _KINDS[kind](getattr(phase, kind))


def _is_rate(value: float) -> bool:
    return 0 <= value < math.inf
