"""Takes models of other frameworks where a torch module is expected, without importing those."""

import sys
from typing import Any

from torch import nn
from torch.optim import Optimizer


def as_torch(model: nn.Module) -> nn.Module:
    """The model itself; of a Keras model a `KerasModule`, which has the same parameters."""
    if not _is_keras(model):
        return model
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
