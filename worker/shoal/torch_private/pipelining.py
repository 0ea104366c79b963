"""Stages and schedules of torch's pipelining, without checks of old releases."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


class UncheckedStage(PipelineStage):
    """A stage whose outputs are not checked: the last stage may return anything.

    Releases up to 2.11 compare tensors with the announced shapes.
    """

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Do nothing: the stages agreed on their messages."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Do nothing: the last stage returns a loss, which is sent to no other stage."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return the messages that connect neighbours, all of one dtype and shape, unlike torch
        2.9.
        """
        ops = super()._get_init_p2p_neighbors_ops()
        for op in ops:
            op.tensor = op.tensor.new_zeros(1, dtype=torch.float32)
        return ops


_MAY_LEAVE_OUTPUTS = "return_outputs" in inspect.signature(ScheduleGPipe.step).parameters
"""True from torch 2.11 on; 2.9 lacks the option."""


def schedule(kind: Callable[..., Any], stage: PipelineStage, count: int, **options: Any) -> Any:
    """Make a schedule of this kind for `count` micro-batches.

    torch 2.9 demands one micro-batch for each stage, which GPipe does not need.
    """
    num_stages = stage.num_stages
    if kind is ScheduleGPipe:
        stage.num_stages = min(num_stages, count)
    try:
        return kind(stage, count, **options)
    finally:
        stage.num_stages = num_stages


def run(schedule: Any, **inputs: Any) -> None:
    """Run the schedule, and drop the outputs of the last stage."""
    if _MAY_LEAVE_OUTPUTS:
        schedule.step(**inputs, return_outputs=False)
        return
    # torch 2.9 concatenates the outputs, which fails for losses: they have no batch dimension.
    schedule._merge_outputs = _discard_outputs
    schedule.step(**inputs)


def _discard_outputs(outputs: Any) -> None:
    """Drop the outputs of the micro-batches."""
