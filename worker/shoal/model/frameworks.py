"""Takes models of other frameworks where a torch module is expected, without importing those.

Each framework has an adapter, a module of `shoal.integrations` that is loaded once such a model is
there: it stands above all that asks for it here.
"""

import sys
from importlib import import_module
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

_ADAPTERS = {"keras": "shoal.integrations.keras_adapter"}


class FrameworkAdapter(Protocol):
    """What a framework's module answers for its models."""

    def as_torch(self, model: Any) -> nn.Module:
        """A torch module that has the model's own parameters."""

    def distribute_static(self, model: Any, strategy: Any, backend: str | None) -> Any:
        """The model to `fit` over ranks that never change."""

    def distribute_in_session(self, session: Any, model: Any, strategy: Any, **options: Any) -> Any:
        """The model to `fit` in a session."""


def as_torch(model: nn.Module) -> nn.Module:
    """The model itself; of a Keras model a `KerasModule`, which has the same parameters."""
    return adapter_of(model).as_torch(model) if _is_keras(model) else model


def fits_by_itself(model: nn.Module, optimizer: Any) -> bool:
    """Whether this is a Keras model with its own optimizer, which `fit` trains."""
    return _is_keras(model) and not isinstance(optimizer, Optimizer)


def adapter_of(model: Any) -> FrameworkAdapter:
    """That of the framework which a foreign model comes of."""
    assert _is_keras(model), "no other framework's models are taken"
    # Keras takes seconds to import: only who has done so gets here.
    found: Any = import_module(_ADAPTERS["keras"])
    return found  # type: ignore[no-any-return]


def _is_keras(model: Any) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(model, keras.Model)
