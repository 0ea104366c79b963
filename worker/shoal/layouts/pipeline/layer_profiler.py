"""Time that each layer of a model takes, measured once and sent to all ranks."""

import copy
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.backends.abortable.waiter import wait_abortable
from shoal.layouts.base import World, materialise
from shoal.layouts.pipeline.outline import Outline
from shoal.layouts.pipeline.stages import Stage
from shoal.torch_private.tensors import pytree

REPEATS = 5
"""Number of passes; the fastest counts, as other load on the machine only adds time."""


class LayerProfiler:
    """Times of segments on an example input, measured once on the first rank: all ranks must cut
    the model alike."""

    def __init__(self, example: Any) -> None:
        self._example = example
        self._known: dict[frozenset[str], list[int]] = {}

    def costs(self, model: nn.Module, outline: Outline, world: World) -> list[int]:
        """Return the nanoseconds of a forward and a backward pass of each segment. Collective."""
        if world.rank == 0:
            costs = self._known.get(outline.opened) or measured(
                model, outline, self._example, world.device
            )
        else:
            costs = [0] * len(outline.segments)
        shared = torch.tensor(costs, dtype=torch.int64, device=world.device)
        wait_abortable(
            dist.broadcast(shared, group=world.group, group_src=0, async_op=True), world.group
        )
        self._known[outline.opened] = shared.tolist()
        return self._known[outline.opened]


def measured(model: nn.Module, outline: Outline, example: Any, device: torch.device) -> list[int]:
    """Measure the nanoseconds of each segment, on a copy of the model. Memory is allocated only for
    the parameters of the segment that is being measured."""
    order = range(len(outline.segments))
    activations: list[Tensor] = []
    costs = []
    for index in order:
        stage = Stage(copy.deepcopy(model), outline, order, index, is_trained=False)
        materialise(stage.model, device)
        with torch.no_grad():
            for parameter in stage.model.parameters():
                if parameter.is_floating_point():
                    parameter.normal_(std=0.02)
        inputs = stage.bind((example,), {})
        nanoseconds, activations = _measure(stage, inputs, activations, device)
        costs.append(nanoseconds)
    return costs


def _measure(
    stage: Stage, inputs: Mapping[str, Any], given: list[Tensor], device: torch.device
) -> tuple[int, list[Tensor]]:
    fastest_ns = 0
    returned: list[Tensor] = []
    for _ in range(REPEATS):
        fresh = [t.detach().requires_grad_(t.is_floating_point()) for t in given]
        _finish(device)
        started_ns = time.perf_counter_ns()
        outputs = stage.run(inputs, fresh)
        leaves = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor)]
        trained = [t for t in leaves if t.requires_grad]
        torch.autograd.backward(trained, [torch.ones_like(t) for t in trained])
        _finish(device)
        taken_ns = time.perf_counter_ns() - started_ns
        fastest_ns = min(fastest_ns or taken_ns, taken_ns)
        returned = [t.detach() for t in leaves]
    return fastest_ns, returned


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
