"""Memory and traffic of a strategy, computed before anything runs."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.model.frameworks import as_torch, is_trained_by_fit
from shoal.planning.figures import Plan, PlanInput, uncompressed
from shoal.planning.replicated import ReplicatedFigures
from shoal.strategies import find_strategy
from shoal.strategies.base import Strategy
from shoal.strategies.layout.ddp import DDP
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import as_index


def plan(
    model: nn.Module,
    strategy: str | Strategy = "fsdp",
    *,
    world_size: int,
    optimizer: Optimizer | None = None,
    inputs: Any = None,
) -> Plan:
    """Compute groups, bytes per rank and collectives of a step; `print` shows them as tables.

    Trains nothing and makes no connection: the model may be on the meta device. With `optimizer`
    (the model's) the figures include its state. With `inputs` (a global batch; meta tensors
    suffice) they include the messages with which ranks exchange activations.

    Raises UnknownStrategy, InvalidSpec for a strategy without figures, and the errors of the
    strategy's own checks of model and optimizer.
    """
    world_size = as_index("world_size", world_size, least=1)
    chosen = find_strategy(strategy)
    figures = figures_of(chosen)
    if figures is None:
        raise InvalidSpec(
            f"strategy {chosen.name!r} has no plan",
            seen=type(chosen).__name__,
            expected="a strategy that knows its memory and traffic before it runs",
        )
    if optimizer is not None and is_trained_by_fit(model, optimizer):
        raise InvalidSpec(
            "the state of a Keras optimizer cannot be computed beforehand",
            seen=type(optimizer).__name__,
            expected="a torch.optim.Optimizer, or none",
            fix="Plan without an optimizer; its state is then left out.",
        )
    return figures(
        PlanInput(model=as_torch(model), world_size=world_size, optimizer=optimizer, inputs=inputs)
    )


def figures_of(strategy: Strategy) -> Callable[[PlanInput], Plan] | None:
    """Return the function that computes the figures of a strategy; None if it has none."""
    if isinstance(strategy, DDP):
        return partial(_ddp_figures, strategy)
    own_method: Callable[[PlanInput], Plan] | None = getattr(strategy, "figures", None)
    return own_method


def _ddp_figures(ddp: DDP, subject: PlanInput) -> Plan:
    figures = ReplicatedFigures(
        subject, ddp.bucket_mb, find_unused_parameters=ddp.find_unused_parameters
    )
    return figures.ddp(uncompressed(ddp.compression))
