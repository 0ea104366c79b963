"""What a script has set on the modules of a model since it was laid out.

A layout is a copy of the model as it was distributed. A probability of dropout that the script
lowers later, a cache that the forward pass has made, lie in the copy of one generation; the next
one would compute with what stood there at first, and nobody would be told.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.model.module_proxy import shown
from shoal.torch_private.modules import buffer_table, transient_buffers

_PLAIN = (bool, int, float, str, type(None), tuple, torch.dtype)


class ScriptAttributes:
    """Of one model in one generation after the other.

    Looked at are numbers, words, tuples and tensors that modules have as attributes, and buffers
    that their state_dict leaves out. An attribute whose name begins with _ is the module's own.
    """

    def __init__(self) -> None:
        self._seen: dict[str, Mapping[str, Any]] = {}

    def note(self, model: nn.Module) -> None:
        """The model is laid out: what is set from now on is the script's."""
        self._seen = {name: _attributes(part) for name, part in _parts(model).items()}

    def carry(self, model: nn.Module, into: nn.Module) -> None:
        """Give what was set on the model since then to another of the same make."""
        others = _parts(into)
        for name, part in _parts(model).items():
            # A stage of a pipeline shows modules that the model does not have.
            if name in self._seen and isinstance(part, type(others.get(name))):
                _carry(part, self._seen[name], others[name])


class ScriptModes:
    """Which modules train and which evaluate, as it was when a step began.

    A step whose block is left early, as when a member is lost while the script samples between
    `model.eval()` and `model.train()`, would else be taken again in the mode of that place.
    """

    def __init__(self) -> None:
        self._tables: list[dict[str, Any]] = []
        self._noted: list[bool] = []

    def look_at(self, models: Iterable[nn.Module]) -> None:
        """These stand behind the script's models from now on."""
        tables = [vars(part) for model in models for part in model.modules()]
        # A replica within a stage of a pipeline has no mode of its own.
        self._tables = [each for each in tables if "training" in each]
        self._noted = []

    def note(self) -> None:
        """A step begins: 3 us for 150 modules."""
        self._noted = [each["training"] for each in self._tables]

    def take_back(self) -> None:
        """The step's block was left early."""
        for each, training in zip(self._tables, self._noted, strict=False):
            each["training"] = training


def _carry(part: nn.Module, seen: Mapping[str, Any], into: nn.Module) -> None:
    passing = transient_buffers(part)
    for key, value in _attributes(part).items():
        if key in seen and _is_same(seen[key], value):
            continue
        if key in passing:
            into.register_buffer(key, value, persistent=False)
        else:
            setattr(into, key, value)


def _parts(model: nn.Module) -> dict[str, nn.Module]:
    return {name: shown(part) for name, part in model.named_modules()}


def _attributes(part: nn.Module) -> dict[str, Any]:
    passing = transient_buffers(part)
    buffers = {key: value for key, value in buffer_table(part).items() if key in passing}
    return buffers | {
        key: value
        for key, value in vars(part).items()
        if not key.startswith("_") and key != "training" and _can_be_copied(value)
    }


def _can_be_copied(value: object) -> bool:
    # What has a history cannot, such as an output that a module keeps.
    if isinstance(value, Tensor):
        return type(value) is Tensor and not value.requires_grad
    return isinstance(value, _PLAIN)


def _is_same(before: object, now: object) -> bool:
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        return before is now
    return before is now or (type(before) is type(now) and before == now)
