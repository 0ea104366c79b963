"""Hyperparameters of a job, from the fields that its members agreed on."""

import re
from collections.abc import Mapping

_NOT_SHOWN = frozenset({"schema", "torch", "backend", "device", "nccl", "validators", "registered"})
"""Fields that describe the model's parts, or the hardware and software."""
_ORDER = ("strategy", "global_batch", "epochs", "optimizer", "lr", "weight_decay")
_OPTIMIZER = re.compile(r"(\w+)\((.*)\)")
_SETTING = re.compile(r"(\w+)=(.*?)(?= \w+=|$)")
_SWITCHES = frozenset({"capturable", "differentiable", "foreach", "fused"})
_NUM_PARAMETERS = "parameters"
"""Last entry of a group's text: its number of parameters."""


def hyperparameters(fields: Mapping[str, str]) -> dict[str, str]:
    """Return the hyperparameters by name: first those in `_ORDER`, then the others by name.

    The settings of a single optimizer become entries of their own, with the values of its groups if
    these differ.
    """
    found = {name: value for name, value in fields.items() if name not in _NOT_SHOWN}
    settings = _settings_of(found.get("optimizer", ""))
    # A field takes precedence over a setting of the same name.
    found = {**settings, **found, **({"optimizer": settings["optimizer"]} if settings else {})}
    first = {name: found[name] for name in _ORDER if name in found}
    return first | dict(sorted(found.items()))


def _settings_of(optimizer: str) -> dict[str, str]:
    """Class and settings of an optimizer by name; empty for several optimizers."""
    form = _OPTIMIZER.fullmatch(optimizer)
    if form is None:
        return {}
    groups = [dict(_SETTING.findall(group)) for group in form[2].split(" | ")]
    names = {name: None for group in groups for name in group if name not in _SWITCHES}
    settings = {"optimizer": form[1]}
    for name in names:
        values = [group.get(name, "none") for group in groups]
        if name != _NUM_PARAMETERS:
            settings[name] = values[0] if len(set(values)) == 1 else " | ".join(values)
    return settings
