"""Takes models of other frameworks where a torch module is expected, without importing those."""

import sys
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal_proto.errors import InvalidSpec


def as_torch(model: nn.Module, optimizer: Any) -> nn.Module:
    """The model itself; of a Keras model a `KerasModule`, which has the same parameters.

    Raises InvalidSpec for a Keras optimizer: what trains a torch module is one of torch's.
    """
    if not _is_keras(model):
        return model
    if not isinstance(optimizer, Optimizer):
        raise InvalidSpec(
            "a Keras model trains here with a torch optimizer, in a loop of your own",
            seen=f"{type(optimizer).__module__}.{type(optimizer).__name__}",
            expected="a torch.optim.Optimizer over model.parameters()",
            fix="For fit() and Keras's optimizers call shoal.distribute under torchrun.",
        )
    # Keras takes seconds to import: only who has done so gets here.
    from shoal.integrations.keras import KerasModule  # noqa: PLC0415

    return KerasModule(model)


def fits_by_itself(model: nn.Module, optimizer: Any) -> bool:
    """Whether this is a Keras model with its own optimizer, which `fit` trains."""
    return _is_keras(model) and not isinstance(optimizer, Optimizer)


def _is_keras(model: Any) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(model, keras.Model)


__all__ = ["as_torch", "fits_by_itself"]
