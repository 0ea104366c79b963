"""Whether a state is that of the script's own optimizer.

The settings of a state take the place of the script's own: those of another kind of optimizer, or
of groups that were cut in another way, would train something else without an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shoal.model.several import optimizers_of
from shoal_proto.errors import InvalidSpec

KINDS = "optimizers"
"""Where the kind of the optimizer of each group stands in a state's values."""
_TELLING = {"momentum", "betas", "eps", "alpha", "rho", "amsgrad", "lr_decay", "etas"}
"""Settings by which kinds of torch's optimizers differ, in all its releases."""

_BEGAN = "initial_lr"
"""What a scheduler keeps the rate in that it began with."""
_MOVED = {"lr", "momentum", "betas"}
"""Settings that torch's schedulers move."""


def kinds_of(optimizer: Optimizer) -> list[str]:
    """The class of the optimizer of each group, by name."""
    return [
        type(each).__name__ for each in optimizers_of(optimizer).values() for _ in each.param_groups
    ]


def check_same_optimizer(
    optimizer: Optimizer, names: Sequence[Sequence[str]], values: Mapping[str, Any]
) -> None:
    """Raise InvalidSpec if the state has settings of another kind of optimizer, or of parameters
    that are in another group; `names` are the parameters of each own group, `values`
    what of the state is no tensor. A state without settings fits."""
    groups: Any = values.get("groups") or ()
    own, written = kinds_of(optimizer), values.get(KINDS)
    if groups and isinstance(written, list) and _listed(written) != _listed(own):
        raise _other(_listed(written), _listed(own))
    _check_names(groups, names, values.get("tied") or {})
    place = {name: index for index, group in enumerate(names) for name in group}
    for index, settings in enumerate(groups):
        for name in settings.get("params", ()):
            if place.get(name, index) != index:
                raise _other(f"{name} in group {index}", f"{name} in group {place[name]}")
    for index, (group, settings) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        _check_settings(index, group, settings, type(optimizer).__name__)


def replaced_settings(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the settings of a state, by group, change in the script's own, in words: nothing where
    they are alike.

    What a scheduler of the script's moves is left out as long as both began with the same rate.
    """
    told: list[str] = []
    for index, (group, settings) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        began = group.get(_BEGAN)
        is_moved = began is not None and _plain(began) == _plain(settings.get(_BEGAN))
        for key in sorted(
            group.keys() & settings.keys() - ({"params"} | (_MOVED if is_moved else set()))
        ):
            own, given = _plain(group[key]), _plain(settings[key])
            if own != given:
                told.append(f"{key} of group {index}: {own} in the script, {given} in it")
    return told


def _plain(value: Any) -> Any:
    """Without tuples, and tensors as the numbers in them."""
    if isinstance(value, Tensor):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _check_names(
    groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], tied: Mapping[str, str]
) -> None:
    """Whether the optimizers hold the same parameters, whatever the names of tied ones."""
    if not any("params" in settings for settings in groups):
        return
    written = {tied.get(name, name) for each in groups for name in each.get("params", ())}
    own = {tied.get(name, name) for group in names for name in group}
    if further := sorted(written - own):
        raise _other(f"{further[0]} in it", "the parameters that the script's optimizer holds")
    if lacks := sorted(own - written):
        raise _other(f"it without {lacks[0]}", "the parameters that the script's optimizer holds")


def _check_settings(index: int, group: Any, settings: Any, kind: str) -> None:
    """Of a state that does not say of which kind it is, as plain torch writes it."""
    lacks = (group.keys() & _TELLING) - settings.keys()
    if lacks:
        raise _other(f"group {index} without {', '.join(sorted(lacks))}", f"those of {kind}")
    decay = "decoupled_weight_decay"
    own = group.get(decay)
    if settings.get(decay, own) != own:
        raise _other(f"{decay}={settings[decay]} in group {index}", f"{own}, as {kind} has")


def _listed(kinds: Sequence[object]) -> str:
    return ", ".join(sorted({str(kind) for kind in kinds}))


def _other(seen: str, expected: str) -> InvalidSpec:
    return InvalidSpec(
        "the state is that of another optimizer than the script's",
        seen=seen,
        expected=expected,
        fix="Go on with the optimizer, and the groups, that the checkpoint was written with. To"
        " begin a new optimizer with its weights, load these before session.distribute, and write"
        " checkpoints to another directory.",
    )
