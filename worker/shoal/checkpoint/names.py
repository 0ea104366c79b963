"""Where each part of a state stands in a checkpoint.

DCP flattens nested dictionaries; an entry's key is its path joined by dots. The paths here are
those of `{"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}`, so
that plain torch finds what it looks for:

    model.<parameter>               ("model", <parameter>)
    optim.<parameter>/<key>         ("optim", "state", <parameter>, <key>)
    values["groups"][i][<setting>]  ("optim", "param_groups", i, <setting>)
    registered.<name>/<path>        ("registered", <name>, <path>)
    everything else                 ("shoal", "state"), JSON
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.state.shards import MODEL, OPTIM, REGISTERED, Json
from shoal_proto.errors import InvalidSpec, MalformedMessage

FORMAT = 1
"""Of what stands in `OWN`; a reader refuses a number that it does not know yet."""

OWN = ("shoal", "state")

STEP = ("step",)
"""Where plain torch may have saved the number of steps."""

Path = tuple[str | int, ...]

_NUMBERS: Mapping[type, tuple[str, torch.dtype]] = {
    bool: ("#bool", torch.bool),
    int: ("#int", torch.int64),
    float: ("#float", torch.float64),
}
"""State of an optimizer that is a plain number is a scalar shard under a marked name, and a plain
number again in a checkpoint."""


def key_of(path: Path) -> str:
    return ".".join(map(str, path))


def path_of(name: str) -> Path:
    """Where the shard of this name stands."""
    if name.startswith(MODEL):
        return ("model", name.removeprefix(MODEL))
    if name.startswith(REGISTERED):
        owner, _, path = name.removeprefix(REGISTERED).partition("/")
        return ("registered", owner, path)
    parameter, _, key = name.removeprefix(OPTIM).rpartition("/")
    return ("optim", "state", parameter, key.partition("#")[0])


def is_number(name: str) -> bool:
    """Whether the shard of this name stands for a plain number."""
    return name.startswith(OPTIM) and "#" in name.rpartition("/")[2]


def name_of_tensor(path: Path) -> str | None:
    """The name of the shard that a tensor there is; None for what is none of a state's.

    Raises InvalidSpec for what torch can save and Shoal has no place for.
    """
    match path:
        case ("model", *rest):
            return MODEL + key_of(tuple(rest))
        case ("registered", str(owner), *rest) if rest:
            return f"{REGISTERED}{owner}/{key_of(tuple(rest))}"
        case ("optim", "state", str(parameter), str(key)):
            return f"{OPTIM}{parameter}/{key}"
        case ("optim", "state", *_):
            raise _no_place(path, "nested state of an optimizer")
        case ("optim", part, *_) if part != "param_groups":
            raise InvalidSpec(
                "the checkpoint's optimizer state is flattened",
                seen=key_of(path),
                expected="optim.state.<parameter>.<key>",
                fix="Save get_optimizer_state_dict(...) without flatten_optimizer_state_dict.",
            )
    return None


def name_of_number(path: Path, value: object) -> str | None:
    """The same for what is no tensor; None also for a None, which counts as not there."""
    if path[:2] != ("optim", "state") or value is None:
        return None
    if type(value) not in _NUMBERS:
        raise _no_place(path, type(value).__name__)
    name = name_of_tensor(path)
    assert name is not None, "it is the optimizer's"
    return name + _NUMBERS[type(value)][0]


def is_read(path: Path) -> bool:
    """Whether an object there is any of Shoal's business; raises InvalidSpec if it has no place."""
    if path[0] == "model":
        raise _no_place(path, "an extra state that is no tensor")
    return path[0] == "optim" or path in {OWN, STEP}


def _no_place(path: Path, seen: str) -> InvalidSpec:
    return InvalidSpec(
        f"the checkpoint's entry {key_of(path)} has no place in a state",
        seen=seen,
        expected="tensors of the model; tensors and numbers of the optimizer",
    )


def scalar(number: object) -> Tensor:
    """The scalar tensor that stands for a plain number."""
    return torch.tensor(number, dtype=_NUMBERS[type(number)][1])


def entries_of(step: int, values: Mapping[str, Json]) -> dict[Path, object]:
    """What of a state is no shard, as entries of a checkpoint."""
    groups: Any = values.get("groups", [])
    entries: dict[Path, object] = {}
    for index, group in enumerate(groups):
        for setting, value in group.items():
            entries["optim", "param_groups", index, setting] = _for_torch(setting, value)
    own = {
        "format": FORMAT,
        "step": step,
        "values": {name: value for name, value in values.items() if name != "groups"},
        "checksums": torch.serialization.get_crc32_options(),
    }
    entries[OWN] = json.dumps(own)
    return entries


def _for_torch(setting: str, value: Any) -> object:
    if isinstance(value, dict):
        return torch.tensor(value["tensor"])
    # JSON has no tuples; the settings of torch's optimizers have no lists but this one.
    return tuple(value) if isinstance(value, list) and setting != "params" else value


def groups_of(entries: Mapping[Path, object]) -> list[Json]:
    """The optimizer's groups, from the entries under ("optim", "param_groups").

    Raises InvalidSpec if they do not name parameters.
    """
    groups: dict[int, dict[str, Json]] = {}
    for path, value in entries.items():
        match path:
            case ("optim", "param_groups", int(index), str(setting)):
                groups.setdefault(index, {})[setting] = _for_json(value)
    found: list[Json] = []
    for _, group in sorted(groups.items()):
        names = group.get("params")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InvalidSpec(
                "the checkpoint's optimizer groups do not name their parameters",
                seen=str(names)[:100],
                expected="names of parameters",
                fix="Save get_optimizer_state_dict(model, optimizer), not optimizer.state_dict().",
            )
        found.append(group)
    return found


def _for_json(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"tensor": value.tolist()}
    return list(value) if isinstance(value, tuple) else value


def own_state(text: object) -> Mapping[str, Any]:
    """What stands at `OWN`: format, step, values, checksums.

    Raises InvalidSpec if a later version of Shoal wrote it, MalformedMessage if it is damaged.
    """
    try:
        own: Any = json.loads(text if isinstance(text, str) else "")
        written, step, values = own["format"], own["step"], own["values"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise MalformedMessage(
            f"the checkpoint's entry {key_of(OWN)} cannot be read", seen=str(text)[:100]
        ) from error
    if not isinstance(written, int) or written > FORMAT:
        raise InvalidSpec(
            "the checkpoint has a newer format",
            seen=str(written)[:100],
            expected=f"at most {FORMAT}",
            fix="Read it with the version of Shoal that wrote it, or a later one.",
        )
    return {"step": int(step), "values": dict(values), "checksums": bool(own.get("checksums"))}
