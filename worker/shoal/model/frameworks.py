"""Adapters that let models of other frameworks be used as torch modules.

An adapter is a Python module of `shoal.integrations`, imported for the first model of its
framework.
"""

import sys
from importlib import import_module
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

_ADAPTERS = {"keras": "shoal.integrations.keras_adapter"}


class FrameworkAdapter(Protocol):
    """Interface of the adapter module of a framework."""

    def as_torch(self, model: Any) -> nn.Module:
        """Return a torch module with the model's own parameters."""

    def distribute_static(self, model: Any, strategy: Any, backend: str | None) -> Any:
        """Make `fit` train over a fixed set of ranks; return the model to call it on."""

    def distribute_in_session(self, session: Any, model: Any, strategy: Any, **options: Any) -> Any:
        """Make `fit` train in a session; return the model to call it on."""


def as_torch(model: nn.Module) -> nn.Module:
    """Return the model itself, or for a Keras model a `KerasModule` with its parameters."""
    return adapter_of(model).as_torch(model) if _is_keras(model) else model


def is_trained_by_fit(model: nn.Module, optimizer: Any) -> bool:
    """True if this is a Keras model without an optimizer of torch: `fit` then trains the model."""
    return _is_keras(model) and not isinstance(optimizer, Optimizer)


def adapter_of(model: Any) -> FrameworkAdapter:
    """Return the adapter of the framework that a foreign model belongs to."""
    assert _is_keras(model), "only Keras models have an adapter"
    # Keras takes seconds to import; a script with such a model has imported it.
    adapter: Any = import_module(_ADAPTERS["keras"])
    return adapter  # type: ignore[no-any-return]


def keras_batchnorm_layers(module: Any) -> list[str]:
    """Return the names of the trainable batch-norm layers in a Keras layer or model, or in the
    model of a `KerasModule`; empty for any other module."""
    keras = sys.modules.get("keras")
    layers = getattr(module, "keras_model", module)
    if keras is None or not isinstance(layers, keras.layers.Layer):
        return []
    return [
        layer.name
        for layer in layers._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    ]


def _is_keras(model: Any) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(model, keras.Model)
