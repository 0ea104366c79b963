"""Paths of the parts of a state in a checkpoint.

Plain torch can read the checkpoint: the paths are those of
`{"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}`.
Left: the part's name in a `StateShard`; right: its path:

    model.<parameter>               ("model", <parameter>)
    optim.<parameter>/<key>         ("optim", "state", <parameter>, <key>)
    optim.<parameter>/#<key>.<i>    ("optim", "state", <parameter>, <key>, <i>)
    values["slots"][...][<key>]     ("optim", "state", <parameter>, <key>), or paths of its parts
    values["groups"][i][<setting>]  ("optim", "param_groups", i, <setting>)
    registered.<name>/<path>        ("registered", <name>, <path>)
    everything else                 ("shoal", "state"), JSON
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.state.optimizer_state import INNER, SLOTS, plain_setting
from shoal.state.plain_values import join_state, split_state_exactly
from shoal.state.shards import MODEL, OPTIM, REGISTERED, Json
from shoal.torch_private.checkpoint import flatten_state_dict
from shoal_proto.errors import InvalidSpec, MalformedMessage

FORMAT = 1
"""Version of the format of Shoal's own entry; a reader refuses a higher version."""

OWN = ("shoal", "state")

STEP = ("step",)
"""Path of the number of steps in a checkpoint that Shoal did not write."""

Path = tuple[str | int, ...]


_INDEX = re.compile(r"0|[1-9][0-9]*")


def key_of(path: Path) -> str:
    return ".".join(map(str, path))


def path_of(name: str) -> Path:
    """Return the checkpoint path of the tensor with this name in a state."""
    if name.startswith(MODEL):
        return ("model", name.removeprefix(MODEL))
    if name.startswith(REGISTERED):
        owner, _, path = name.removeprefix(REGISTERED).partition("/")
        return ("registered", owner, path)
    parameter, _, key = name.removeprefix(OPTIM).rpartition("/")
    if not key.startswith(INNER):
        return ("optim", "state", parameter, key)
    return ("optim", "state", parameter, *_key_parts(key.removeprefix(INNER)))


def _key_parts(dotted: str) -> Path:
    key, *inner = dotted.split(".")
    # "01" is the key of a dictionary, not the index of a list.
    return (key, *(int(each) if _INDEX.fullmatch(each) else each for each in inner))


def name_of_tensor(path: Path, slots: Mapping[str, Any]) -> str | None:
    """Return the name that the tensor at this path has in a state; None if no state has a tensor
    there.

    `slots`: plain values of the optimizer's state that are stored in several entries. Raises
    InvalidSpec for an entry of the optimizer that a state cannot hold.
    """
    match path:
        case ("model", *rest):
            return MODEL + key_of(tuple(rest))
        case ("registered", str(owner), *rest) if rest:
            return f"{REGISTERED}{owner}/{key_of(tuple(rest))}"
        case ("optim", "state", str(parameter), str(key)):
            return f"{OPTIM}{parameter}/{key}"
        case ("optim", "state", str(parameter), *rest) if is_inside(path, slots):
            return f"{OPTIM}{parameter}/{INNER}{key_of(tuple(rest))}"
        case ("optim", "state", *_):
            raise _not_representable(path, "nested state of an optimizer")
        case ("optim", part, *_) if part != "param_groups":
            raise InvalidSpec(
                "the checkpoint's optimizer state is flattened",
                seen=key_of(path),
                expected="optim.state.<parameter>.<key>",
                fix="Save get_optimizer_state_dict(...) without flatten_optimizer_state_dict.",
            )
    return None


def is_inside(path: Path, slots: Mapping[str, Any]) -> bool:
    """True if this entry is a part of a value in `slots`."""
    match path:
        case ("optim", "state", str(parameter), *rest) if len(rest) > 1:
            # A key may contain dots.
            inner = key_of(tuple(rest))
            return any(inner.startswith(f"{key}.") for key in slots.get(parameter, ()))
    return False


def slots_of(entries: Mapping[Path, object], slots: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of the optimizer's state, by parameter. Raises InvalidSpec for an
    entry that a state cannot hold."""
    plain_values = {parameter: dict(values) for parameter, values in slots.items()}
    for path, value in entries.items():
        if path[:2] != ("optim", "state") or is_inside(path, slots):
            continue
        if len(path) != 4:
            raise _not_representable(path, "nested state of an optimizer")
        _, _, parameter, key = path
        plain, _ = split_state_exactly(value, (), partial(_refused, path), inline=True)
        plain_values.setdefault(str(parameter), {})[str(key)] = plain
    return plain_values


def is_read(path: Path) -> bool:
    """True if Shoal reads the entry at this path. Only for entries that are not tensors. Raises
    InvalidSpec for an entry of the model: a state holds only tensors of a model."""
    if path[0] == "model":
        raise _not_representable(path, "an extra state that is not a tensor")
    return path[0] == "optim" or path in {OWN, STEP}


def _refused(path: Path, _: tuple[str, ...], seen: str, expected: str) -> InvalidSpec:
    return _not_representable(path, seen)


def _not_representable(path: Path, seen: str) -> InvalidSpec:
    return InvalidSpec(
        f"the checkpoint's entry {key_of(path)} cannot be part of a state",
        seen=seen,
        expected="tensors of the model; tensors and plain values of the optimizer",
    )


def entries_of(step: int, values: Mapping[str, Any]) -> dict[Path, object]:
    """Return a checkpoint's entries for step and values."""
    entries: dict[Path, object] = {}
    for index, group in enumerate(values.get("groups", [])):
        for setting, value in group.items():
            entries["optim", "param_groups", index, setting] = join_state(value, {})
    slots: dict[str, dict[str, Json]] = {}
    for parameter, parameter_values in values.get(SLOTS, {}).items():
        for key, value in parameter_values.items():
            inner = _flattened_parts(key, value)
            if inner is not None:
                slots.setdefault(parameter, {})[key] = value
            for path, leaf in ({(key,): join_state(value, {})} if inner is None else inner).items():
                entries["optim", "state", parameter, *path] = leaf
    other_values = {name: value for name, value in values.items() if name not in ("groups", SLOTS)}
    own_values = {
        "format": FORMAT,
        "step": step,
        "values": {**other_values, **({SLOTS: slots} if slots else {})},
        "checksums": torch.serialization.get_crc32_options(),
    }
    entries[OWN] = json.dumps(own_values)
    return entries


def _flattened_parts(key: str, value: Json) -> dict[Path, object] | None:
    """Return the parts into which torch flattens a value, by path, except tensors; None if torch
    leaves the value whole."""
    if not isinstance(value, list | dict):
        return None
    native = join_state(value, defaultdict(lambda: torch.empty(0)))
    flat, paths = flatten_state_dict({key: native})
    if paths.keys() == {key}:
        return None
    return {tuple(paths[each]): leaf for each, leaf in flat.items() if not isinstance(leaf, Tensor)}


def groups_of(entries: Mapping[Path, object]) -> list[Json]:
    """Return the optimizer's groups. Raises InvalidSpec if they do not list parameters by name."""
    groups: dict[int, dict[str, Json]] = {}
    for path, value in entries.items():
        match path:
            case ("optim", "param_groups", int(index), str(setting)):
                groups.setdefault(index, {})[setting] = plain_setting(
                    value, (), partial(_refused, path)
                )
    checked: list[Json] = []
    for _, group in sorted(groups.items()):
        names = group.get("params")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InvalidSpec(
                "the checkpoint's optimizer groups do not name their parameters",
                seen=str(names)[:100],
                expected="names of parameters",
                fix="Save get_optimizer_state_dict(model, optimizer), not optimizer.state_dict().",
            )
        checked.append(group)
    return checked


def own_state(text: object) -> Mapping[str, Any]:
    """Parse `OWN`: step, values, checksums. Raises InvalidSpec if a later version of Shoal wrote
    it, and MalformedMessage if it is damaged."""
    try:
        content: Any = json.loads(text if isinstance(text, str) else "")
        written, step = int(content["format"]), int(content["step"])
        values, checksums = dict(content["values"]), bool(content.get("checksums"))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise MalformedMessage(
            f"the checkpoint's entry {key_of(OWN)} cannot be read", seen=str(text)[:100]
        ) from error
    if written > FORMAT:
        raise InvalidSpec(
            "the checkpoint has a newer format",
            seen=str(written),
            expected=f"at most {FORMAT}",
            fix="Read it with the version of Shoal that wrote it, or a later one.",
        )
    return {"step": step, "values": values, "checksums": checksums}
