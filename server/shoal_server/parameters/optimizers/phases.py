"""Phases of a learning-rate schedule, each one of torch's schedulers."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    StepLR,
)

from shoal_proto.v1.optimizer_pb2 import Phase

MAX_MILESTONES = 4096


def new_scheduler(phase: Phase, optimizer: Optimizer) -> LRScheduler:
    """The scheduler of a phase for which `range_error` is empty."""
    match phase.WhichOneof("kind"):
        case "constant":
            return ConstantLR(optimizer, phase.constant.factor, phase.constant.total_iters)
        case "linear":
            linear = phase.linear
            return LinearLR(optimizer, linear.start_factor, linear.end_factor, linear.total_iters)
        case "step":
            return StepLR(optimizer, phase.step.step_size, phase.step.gamma)
        case "multi_step":
            return MultiStepLR(optimizer, list(phase.multi_step.milestones), phase.multi_step.gamma)
        case "exponential":
            return ExponentialLR(optimizer, phase.exponential.gamma)
        case kind:
            assert kind == "cosine", kind
            return CosineAnnealingLR(optimizer, phase.cosine.t_max, phase.cosine.eta_min)


def range_error(phase: Phase) -> str:
    """The valid range of the settings if one is out of range; else an empty text."""
    match phase.WhichOneof("kind"):
        case "constant":
            is_valid = 0 < phase.constant.factor <= 1
            expected = "0 < factor <= 1"
        case "linear":
            linear = phase.linear
            is_valid = 0 < linear.start_factor <= 1 and 0 <= linear.end_factor <= 1
            is_valid = is_valid and linear.total_iters > 0
            expected = "0 < start_factor <= 1, 0 <= end_factor <= 1, 1 <= total_iters"
        case "step":
            is_valid = phase.step.step_size > 0 and _is_rate(phase.step.gamma)
            expected = "1 <= step_size, and a finite gamma from 0 up"
        case "multi_step":
            is_valid = len(phase.multi_step.milestones) <= MAX_MILESTONES
            is_valid = is_valid and _is_rate(phase.multi_step.gamma)
            expected = f"at most {MAX_MILESTONES} milestones, and a finite gamma from 0 up"
        case "exponential":
            is_valid = _is_rate(phase.exponential.gamma)
            expected = "a finite gamma from 0 up"
        case "cosine":
            is_valid = phase.cosine.t_max > 0 and _is_rate(phase.cosine.eta_min)
            expected = "1 <= t_max, and a finite eta_min from 0 up"
        case _:
            is_valid, expected = False, "a kind of phase"
    return "" if is_valid else expected


def _is_rate(value: float) -> bool:
    return 0 <= value < math.inf
