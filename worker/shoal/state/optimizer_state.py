"""State that an optimizer keeps for its parameters, and the settings of its groups, by name.

A tensor that the optimizer keeps for a parameter is a shard of the state, named
`optim.<parameter>/<key>`. All else that it keeps for a parameter is a plain value in the `values`
of a state, under `SLOTS`; a tensor within a plain value is a shard of its own. The settings of
groups are in `values` under "groups".

A rank of a sharded model reports the plain values of the parameters that it steps, with a mark
(`mark_of`) for each, a shard of one byte: a missing mark shows that values are missing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.model.trained_parameters import are_same
from shoal.state.plain_values import (
    CARRIED_EXACTLY,
    Refusal,
    fault_of,
    join_state,
    split_state_exactly,
)
from shoal.state.shards import OPTIM, Json, TensorShard
from shoal_proto.errors import ShoalError, UnsupportedOptimizer

SLOTS = "slots"
"""Key, in a state's `values`, of a dict with the optimizer's plain values by parameter and key."""
INNER = "#"
"""Prefix of the key of a tensor within a plain value. By itself it is the key of a mark."""
_SMALL = 1 << 63


@dataclass(frozen=True, kw_only=True)
class Slots:
    """State that an optimizer keeps for one parameter."""

    tensors: Mapping[str, Tensor]
    """Tensors by key; for a tensor within a plain value, `INNER` and the dotted path to it."""
    values: Mapping[str, Json]


def take_slots(state: Mapping[Any, Any], parameter: str, optimizer: Optimizer) -> Slots:
    """Return the state that the optimizer keeps for this parameter, not copied. Raises
    UnsupportedOptimizer for state that cannot be sent to another member."""

    def refused(path: tuple[str, ...], seen: str, expected: str) -> ShoalError:
        return cannot_carry(optimizer, f"state {'.'.join(path)!r} of {parameter}: {seen}", expected)

    tensors: dict[str, Tensor] = {}
    values: dict[str, Json] = {}
    taken = {str(key) for key in state}
    for key, value in state.items():
        if type(key) is not str or "/" in key or key.startswith(INNER):
            expected = f"a string without '/', that does not begin with {INNER!r}"
            raise refused((str(key),), f"the key {key!r:.100}", expected)
        if isinstance(value, Tensor):
            if fault := fault_of(value):
                raise refused((key,), fault, CARRIED_EXACTLY)
            tensors[key] = value
        elif _is_small(value):
            values[key] = value
        else:
            values[key], inner = split_state_exactly(value, (key,), refused, taken=taken)
            # A name has the parameter before its last "/", and the key after it.
            if bad := next((path for path in inner if "/" in path), None):
                raise refused((bad,), "a key with '/'", "keys without '/'")
            tensors |= {INNER + path: tensor for path, tensor in inner.items()}
    return Slots(tensors=tensors, values=values)


def put_slots(slots: Slots) -> dict[str, Any]:
    """Rebuild the state given to `take_slots`. Raises MalformedMessage for other values."""
    inner = {
        key.removeprefix(INNER): tensor
        for key, tensor in slots.tensors.items()
        if key.startswith(INNER)
    }
    own = {key: t for key, t in slots.tensors.items() if not key.startswith(INNER)}
    return {**own, **{key: join_state(value, inner) for key, value in slots.values.items()}}


def take_settings(optimizer: Optimizer, *, with_tensors: bool = True) -> list[dict[str, Json]]:
    """Return the settings of the optimizer's groups, without their parameters. `with_tensors`:
    include settings that are tensors; reading them waits for the GPU. Raises UnsupportedOptimizer
    if one cannot be sent to another member."""

    def refused(path: tuple[str, ...], seen: str, expected: str) -> ShoalError:
        index, setting, *_ = path
        return cannot_carry(optimizer, f"setting {setting!r} of group {index}: {seen}", expected)

    found = []
    for index, group in enumerate(optimizer.param_groups):
        settings: dict[str, Json] = {}
        taken = {f"{index}.{key}" for key in group}
        for key, value in group.items():
            if key != "params" and (with_tensors or not isinstance(value, Tensor)):
                key_path = (str(index), str(key))
                if type(key) is not str:
                    raise refused(key_path, f"the key {key!r:.100}", "a string")
                settings[key] = plain_setting(value, key_path, refused, taken)
        found.append(settings)
    return found


def plain_setting(
    value: Any, path: tuple[str, ...], refused: Refusal, taken: set[str] | None = None
) -> Json:
    """Return the value of a setting as JSON, with tensors inline as numbers. Raises the error of
    `refused` for a value that cannot be sent."""
    if _is_small(value):
        small: Json = value
        return small
    return split_state_exactly(value, path, refused, inline=True, taken=taken)[0]


def put_settings(optimizer: Optimizer, values: Mapping[str, Any]) -> None:
    """Apply the settings in a state's values to the optimizer's groups, as `set_settings` does."""
    set_settings(optimizer, settings_of(values))


@torch.no_grad()
def set_settings(optimizer: Optimizer, settings: Iterable[Mapping[str, Any]]) -> None:
    """Set the settings of the optimizer's groups, other than parameters, to copies of the values.

    A tensor is overwritten in place if shape and dtype fit: a scheduler or a captured graph may
    hold it. Groups that share a tensor and get different values share it no longer.
    """
    written: set[int] = set()
    for group, own in zip(optimizer.param_groups, settings, strict=False):
        for key, value in own.items():
            if key == "params":
                continue
            held = group.get(key)
            if not isinstance(value, Tensor):
                group[key] = value
            elif not isinstance(held, Tensor):
                group[key] = value.clone()
            else:
                given = value.to(held.device)
                fits = (held.shape, held.dtype) == (given.shape, given.dtype)
                if fits and (id(held) not in written or torch.equal(held, given)):
                    held.copy_(given)
                    written.add(id(held))
                else:
                    group[key] = given.clone()


def settings_of(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the settings in a state's values, by group."""
    groups: Sequence[Mapping[str, Json]] = values.get("groups") or ()
    return [{key: join_state(value, {}) for key, value in settings.items()} for settings in groups]


def contents_of(optimizers: Iterable[Optimizer]) -> list[object]:
    """List optimizers, and the keys and values of their state."""
    contents: list[object] = []
    for each in optimizers:
        contents.append(each)
        for parameter, state in each.state.items():
            contents.append(parameter)
            contents += state
            contents += state.values()
    return contents


class InspectedObjects:
    """Objects that were inspected: the same objects need no other inspection."""

    def __init__(self) -> None:
        self._contents: list[object] = []
        self._can_change = True
        """True if an object may have changed, other than a tensor's contents."""

    def has(self, contents: list[object]) -> bool:
        """True if these are the same objects, and cannot have changed."""
        return not self._can_change and are_same(contents, self._contents)

    def keep(self, contents: list[object]) -> None:
        """Note these objects as inspected."""
        self._contents = contents
        self._can_change = not all(map(_is_fixed, contents))


def _is_fixed(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return isinstance(value, Tensor | Optimizer | int | float | complex | str | None)


def refuse_other_owners(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Raise UnsupportedOptimizer if the optimizer keeps state for anything but these tensors."""
    own = set(map(id, parameters))
    for owner in optimizer.state:
        if id(owner) not in own:
            shown = (
                f"a tensor of {tuple(owner.shape)}"
                if isinstance(owner, Tensor)
                else f"{owner!r:.100}"
            )
            raise cannot_carry(
                optimizer, f"state for {shown}, which is not a parameter", "state of its parameters"
            )


def cannot_carry(optimizer: Optimizer, seen: str, expected: str) -> UnsupportedOptimizer:
    """Return the error for state that neither a message nor a checkpoint can carry."""
    return UnsupportedOptimizer(
        f"the state of {type(optimizer).__name__} cannot be handed to another member",
        seen=seen,
        expected=expected,
        fix="Values that are the same on all members and in all steps can be kept outside of the"
        " optimizer's state and groups (docs/models.md).",
    )


# --- as shards ---


def mark_of(parameter: str) -> tuple[str, TensorShard]:
    """Return the name and shard of a mark, for the rank that holds the parameter's plain values."""
    return f"{OPTIM}{parameter}/{INNER}", TensorShard.whole(torch.ones((), dtype=torch.uint8))


def is_mark(name: str) -> bool:
    """True for the name of a mark."""
    return name.startswith(OPTIM) and name.endswith(f"/{INNER}")


def is_of_value(name: str) -> bool:
    """True for the name of a mark or of a tensor within a plain value, which may be missing at the
    next step."""
    return name.startswith(OPTIM) and name.rpartition("/")[2].startswith(INNER)


def merged(by_rank: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the plain values of all parameters. `by_rank`: the `values` of each rank's state. If
    several ranks report a parameter, the lowest rank wins."""
    found: dict[str, Any] = {}
    for values in by_rank:
        found = {**(values.get(SLOTS) or {}), **found}
    return found


def _is_small(value: object) -> bool:
    if type(value) is int:
        return abs(value) < _SMALL
    return value is None or type(value) in (bool, float, str)
