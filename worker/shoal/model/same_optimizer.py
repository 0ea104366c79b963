"""Check that a state belongs to an optimizer like the script's own: the state's settings replace
those of the script."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shoal.model.several import optimizers_of
from shoal_proto.errors import InvalidSpec

KINDS = "optimizers"
"""Key, in a state's values, of each group's kind of optimizer."""
_DISTINGUISHING = {"momentum", "betas", "eps", "alpha", "rho", "amsgrad", "lr_decay", "etas"}

_INITIAL_RATE = "initial_lr"
_SCHEDULED = {"lr", "momentum", "betas"}


def kinds_of(optimizer: Optimizer) -> list[str]:
    """Return the class name of the optimizer of each group."""
    return [
        type(each).__name__ for each in optimizers_of(optimizer).values() for _ in each.param_groups
    ]


def check_same_optimizer(
    optimizer: Optimizer, names: Sequence[Sequence[str]], values: Mapping[str, Any]
) -> None:
    """Raise InvalidSpec if the state has settings of another kind of optimizer, or other parameters
    or groups. `names`: the parameters of each group of the script's optimizer. `values`: the
    state's values that are not tensors. A state without settings fits."""
    groups: Any = values.get("groups") or ()
    kinds, written = kinds_of(optimizer), values.get(KINDS)
    if groups and isinstance(written, list) and _listed(written) != _listed(kinds):
        raise _other(_listed(written), _listed(kinds))
    _check_names(groups, names, values.get("tied") or {})
    group_of = {name: index for index, group in enumerate(names) for name in group}
    for index, settings in enumerate(groups):
        for name in settings.get("params", ()):
            if group_of.get(name, index) != index:
                raise _other(f"{name} in group {index}", f"{name} in group {group_of[name]}")
    for index, (group, settings) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        _check_settings(index, group, settings, type(optimizer).__name__)


def replaced_settings(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe the settings of a state, by group, that differ from the script's own. Leaves out
    settings that the script's scheduler changes, if script and state began with the same rate."""
    texts: list[str] = []
    for index, (group, settings) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        began = group.get(_INITIAL_RATE)
        is_moved = began is not None and _plain(began) == _plain(settings.get(_INITIAL_RATE))
        for key in sorted(
            group.keys() & settings.keys() - ({"params"} | (_SCHEDULED if is_moved else set()))
        ):
            ours, held = _plain(group[key]), _plain(settings[key])
            if ours != held:
                texts.append(f"{key} of group {index}: {ours} in the script, {held} in the state")
    return texts


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _check_names(
    groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], tied: Mapping[str, str]
) -> None:
    """Raise unless the optimizers hold the same parameters; tied names count as one."""
    if not any("params" in settings for settings in groups):
        return
    written = {tied.get(name, name) for each in groups for name in each.get("params", ())}
    held = {tied.get(name, name) for group in names for name in group}
    if extra := sorted(written - held):
        raise _other(f"{extra[0]} in the state", "parameters that the script's optimizer holds")
    if lacks := sorted(held - written):
        raise _other(f"a state without {lacks[0]}", "parameters that the script's optimizer holds")


def _check_settings(index: int, group: Any, settings: Any, kind: str) -> None:
    """Check settings by their names: a state written by plain torch does not name the optimizer."""
    lacks = (group.keys() & _DISTINGUISHING) - settings.keys()
    if lacks:
        raise _other(f"group {index} without {', '.join(sorted(lacks))}", f"settings of {kind}")
    decay = "decoupled_weight_decay"
    ours = group.get(decay)
    if settings.get(decay, ours) != ours:
        raise _other(f"{decay}={settings[decay]} in group {index}", f"{ours}, as {kind} has")


def _listed(kinds: Sequence[object]) -> str:
    return ", ".join(sorted({str(kind) for kind in kinds}))


def _other(seen: str, expected: str) -> InvalidSpec:
    return InvalidSpec(
        "the state belongs to another optimizer than the script's",
        seen=seen,
        expected=expected,
        fix="Continue with the optimizer and the groups with which the checkpoint was written. To"
        " use its weights with a new optimizer, load them before session.distribute, and write"
        " checkpoints to another directory.",
    )
