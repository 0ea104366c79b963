"""Strategies for training one model on many members: one class each, found by name."""

from collections.abc import Mapping
from importlib import import_module

from shoal.strategies.base import Strategy
from shoal_proto.errors import UnknownStrategy

# Module and class, imported only when a script chooses the strategy.
STRATEGIES: Mapping[str, tuple[str, str]] = {
    "async-diloco": ("shoal.strategies.asynchronous.async_diloco", "AsyncDiLoCo"),
    "async-sgd": ("shoal.strategies.asynchronous.async_sgd", "AsyncSGD"),
    "bsp": ("shoal.strategies.asynchronous.bounded_staleness", "BSP"),
    "ddp": ("shoal.strategies.layout.ddp", "DDP"),
    "diloco": ("shoal.strategies.local_sgd.strategy", "DiLoCo"),
    "fsdp": ("shoal.strategies.layout.fsdp", "FSDP"),
    "fsdp-tensor": ("shoal.strategies.layout.fsdp_tensor", "FSDPTensor"),
    "hsdp": ("shoal.strategies.layout.fsdp", "HSDP"),
    "hybrid": ("shoal.strategies.layout.hybrid", "Hybrid"),
    "local-sgd": ("shoal.strategies.local_sgd.strategy", "LocalSGD"),
    "pipeline": ("shoal.strategies.layout.pipeline", "Pipeline"),
    "ssp": ("shoal.strategies.asynchronous.bounded_staleness", "SSP"),
    "tensor": ("shoal.strategies.layout.tensor", "TensorParallel"),
    "zero1": ("shoal.strategies.layout.zero1", "Zero1"),
    "zero2": ("shoal.strategies.layout.fsdp", "Zero2"),
    "zero3": ("shoal.strategies.layout.fsdp", "Zero3"),
}

FORWARD_ALONE = frozenset({"ddp", "zero1", "local-sgd", "diloco"})
"""Synchronous strategies under which a member can evaluate its model alone."""


def find_strategy(strategy: str | Strategy) -> Strategy:
    """Return the strategy of that name with default options, or the given object.

    Raises UnknownStrategy.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if strategy not in STRATEGIES:
        raise UnknownStrategy(
            f"there is no strategy {strategy!r}",
            seen=repr(strategy),
            expected=f"one of {', '.join(map(repr, sorted(STRATEGIES)))}, or a Strategy object",
        )
    module, kind = STRATEGIES[strategy]
    default: Strategy = getattr(import_module(module), kind)()
    return default
