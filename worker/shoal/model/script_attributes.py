"""Attributes that a script has set on the modules of a model since the model was laid out. The next
layout, a copy of the model as it was distributed, would lose them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.model.module_proxy import unwrapped_modules
from shoal.torch_private.modules import buffer_table, transient_buffers
from shoal.torch_private.tensors import num_writes

_PLAIN = (bool, int, float, str, type(None), tuple, torch.dtype)


class ScriptAttributes:
    """Attributes of one model, carried from one generation to the next.

    Covers numbers, strings, tuples, dtypes and plain tensors without a graph that are attributes of
    modules, unless their names begin with _; and transient buffers of any name.
    """

    def __init__(self) -> None:
        self._seen: dict[str, Mapping[str, object]] = {}

    def note(self, model: nn.Module) -> None:
        """Note the attributes of a model that was just laid out: later changes are the script's."""
        self._seen = {
            name: {key: _noted(value) for key, value in _attributes(part).items()}
            for name, part in unwrapped_modules(model).items()
        }

    def copy_to(self, model: nn.Module, into: nn.Module) -> None:
        """Copy the attributes set since `note` to another model of the same structure."""
        others = unwrapped_modules(into)
        for name, part in unwrapped_modules(model).items():
            # A stage of a pipeline has modules that the model lacks.
            if name in self._seen and isinstance(part, type(others.get(name))):
                _carry(part, self._seen[name], others[name])


class ScriptModes:
    """Training or evaluation mode of each module when a step began, for a step that is retried."""

    def __init__(self) -> None:
        self._tables: list[dict[str, Any]] = []
        self._noted: list[bool] = []

    def watch_models(self, models: Iterable[nn.Module]) -> None:
        """Watch these models, to which the script's proxies now refer."""
        tables = [vars(part) for model in models for part in model.modules()]
        # A proxy within a stage of a pipeline has no mode of its own.
        self._tables = [each for each in tables if "training" in each]
        self._noted = []

    def note(self) -> None:
        """Note the modes when a step begins."""
        self._noted = [each["training"] for each in self._tables]

    def restore(self) -> None:
        """Restore the modes after a step's block was left early."""
        for each, training in zip(self._tables, self._noted, strict=False):
            each["training"] = training


def _carry(part: nn.Module, seen: Mapping[str, object], into: nn.Module) -> None:
    transient = transient_buffers(part)
    for key, value in _attributes(part).items():
        if key in seen and seen[key] == _noted(value):
            continue
        if key in transient:
            into.register_buffer(key, value, persistent=False)
        else:
            setattr(into, key, value)


def _attributes(part: nn.Module) -> dict[str, Any]:
    transient = transient_buffers(part)
    buffers = {key: value for key, value in buffer_table(part).items() if key in transient}
    return buffers | {
        key: value
        for key, value in vars(part).items()
        if not key.startswith("_") and key != "training" and _can_be_copied(value)
    }


def _can_be_copied(value: object) -> bool:
    # A tensor with a graph, such as a kept output, cannot be copied.
    if isinstance(value, Tensor):
        return type(value) is Tensor and not value.requires_grad
    if isinstance(value, tuple):
        return all(_can_be_copied(each) for each in value if isinstance(each, Tensor | tuple))
    return isinstance(value, _PLAIN)


@dataclass(frozen=True)
class _NotedObject:
    """Record of an object. Equal to a later record of the same object, unless something was written
    to the tensor."""

    kept: object = field(compare=False)
    """Keeps the object alive, so that no other one gets its id."""
    identity: int
    num_writes: int


def _noted(value: object) -> object:
    if isinstance(value, tuple):
        return type(value), tuple(map(_noted, value))
    if isinstance(value, _PLAIN):
        return type(value), value
    return _NotedObject(value, id(value), num_writes(value) if isinstance(value, Tensor) else 0)
