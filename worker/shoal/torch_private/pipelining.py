"""Torch's pipelining: stages and schedules without what only older releases do with outputs."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


class UncheckedStage(PipelineStage):
    """A stage that may return anything if it is the last one, as in torch 2.13. Releases up to 2.11
    compare tensors with what was announced."""

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Nothing: what comes was agreed on."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Nothing: what the last stage returns is a loss, which nobody is sent."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Messages that connect neighbours: torch 2.9 sends them of another dtype and shape than it
        receives them."""
        ops = super()._get_init_p2p_neighbors_ops()
        for op in ops:
            op.tensor = op.tensor.new_zeros(1, dtype=torch.float32)
        return ops


_MAY_LEAVE_OUTPUTS = "return_outputs" in inspect.signature(ScheduleGPipe.step).parameters
"""torch 2.11 has that option, 2.9 does not."""


def schedule(kind: Callable[..., Any], stage: PipelineStage, count: int, **options: Any) -> Any:
    """Make a schedule of this kind, for so many micro-batches.

    torch 2.9 asks for a micro-batch for each stage, which GPipe does not need: it is told of fewer
    stages, which it looks at here only.
    """
    num_stages = stage.num_stages
    if kind is ScheduleGPipe:
        stage.num_stages = min(num_stages, count)
    try:
        return kind(stage, count, **options)
    finally:
        stage.num_stages = num_stages


def run(schedule: Any, **inputs: Any) -> None:
    """Run the schedule. What the last stage returns is let go of."""
    if _MAY_LEAVE_OUTPUTS:
        schedule.step(**inputs, return_outputs=False)
        return
    # torch 2.9 puts the outputs together: of losses, which have no samples, it cannot.
    schedule._merge_outputs = _let_go
    schedule.step(**inputs)


def _let_go(outputs: Any) -> None:
    """Return nothing of what the micro-batches gave."""
