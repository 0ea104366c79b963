"""What a `state_dict()` holds, as plain values beside tensors, and back.

Nothing is pickled: what arrives from another member, or from a checkpoint, is numbers, text and
tensors, whoever wrote it.
"""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.state.dtypes import DTYPES, name_of
from shoal.state.shards import Json
from shoal_proto.errors import InvalidSpec, MalformedMessage

MAX_VALUES = 20_000
"""Of one object, tensors counted as one: what is more is a table, and belongs into a tensor."""
MAX_BITS = 4096
"""Of an integer: longer ones Python writes as text only if it is told to."""
_MARK = "$"
"""Begins the only key of what JSON has no notation for."""
_CARRIED = (
    "tensors, numpy arrays, numbers, strings, bytes, None, and lists, tuples and dicts of these"
)


def take_apart(state: Any, name: str) -> tuple[Json, dict[str, Tensor]]:
    """The state as JSON, and the tensors that it names, by the dotted path at which each stands.

    The tensors are those of the state, not copied. Raises InvalidSpec, with the place, for what
    cannot be given to another member.
    """
    apart = _Apart(name)
    return apart.plain(state, ()), apart.tensors


def put_together(values: Json, tensors: Mapping[str, Tensor]) -> Any:
    """The state that `take_apart` was given. Raises MalformedMessage for what it did not make."""
    try:
        return _together(values, tensors)
    except (TypeError, ValueError, LookupError, RecursionError) as error:
        raise MalformedMessage(
            "the stored registered state cannot be read",
            seen=f"{type(error).__name__}: {str(error)[:200]}",
            expected="what a member of the same version of Shoal keeps",
        ) from error


class _Apart:
    def __init__(self, name: str) -> None:
        self._name = name
        self._num_values = 0
        self.tensors: dict[str, Tensor] = {}

    def plain(self, value: Any, path: tuple[str, ...]) -> Json:
        self._num_values += 1
        if self._num_values > MAX_VALUES or len(path) > 50:
            raise self._refused(
                path, f"more than {MAX_VALUES:,} values", "a long list as one tensor"
            )
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise self._refused(
                path, f"an integer of {value.bit_length():,} bits", f"at most {MAX_BITS:,}"
            )
        if value is None or isinstance(value, bool | int | float | str):
            return _without_subclass(value)
        if isinstance(value, Tensor):
            return {_MARK + "tensor": self._tensor(value, path)}
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, list | tuple):
            items = [self.plain(item, (*path, str(i))) for i, item in enumerate(value)]
            return {_MARK + "tuple": list[Json](items)} if isinstance(value, tuple) else items
        if isinstance(value, bytes | bytearray):
            return {_MARK + "bytes": base64.b64encode(value).decode()}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            data = base64.b64encode(value.tobytes()).decode()
            return {_MARK + "array": [value.dtype.str, list(value.shape), data]}
        raise self._refused(path, f"a {type(value).__name__}", _CARRIED)

    def _mapping(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> Json:
        plain = all(isinstance(key, str) and not key.startswith(_MARK) for key in value)
        items = {key: self.plain(item, (*path, str(key))) for key, item in value.items()}
        if plain:
            return items
        return {_MARK + "pairs": [[self.plain(key, path), item] for key, item in items.items()]}

    def _tensor(self, tensor: Tensor, path: tuple[str, ...]) -> str:
        key = ".".join(path) or "value"
        if isinstance(tensor, DTensor):
            raise self._refused(
                path, "a part of a tensor that is cut over members", "whole tensors"
            )
        if tensor.layout is not torch.strided or name_of(tensor.dtype) not in DTYPES:
            raise self._refused(
                path, f"a tensor of {tensor.layout} and {tensor.dtype}", ", ".join(DTYPES)
            )
        if key in self.tensors:
            raise self._refused(path, "two tensors", f"one at {key}")
        self.tensors[key] = tensor.detach()
        return key

    def _refused(self, path: tuple[str, ...], seen: str, expected: str) -> InvalidSpec:
        return InvalidSpec(
            f"the state of {self._name!r} cannot be carried",
            seen=f"{seen} at {'.'.join(path) or 'its top'} of its state_dict()",
            expected=expected,
            fix="Leave it out of state_dict(), and create it in load_state_dict().",
        )


def _without_subclass(value: Any) -> Json:
    """Without what subclasses (enums, say) add to it."""
    kind = next((kind for kind in (bool, int, float, str) if isinstance(value, kind)), None)
    plain: Json = value if kind is None else kind(value)
    return plain


def _together(values: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(values, list):
        return [_together(item, tensors) for item in values]
    if not isinstance(values, dict):
        return values
    if len(values) == 1 and next(iter(values)).startswith(_MARK):
        return _marked(*next(iter(values.items())), tensors)
    return {key: _together(item, tensors) for key, item in values.items()}


def _marked(mark: str, content: Any, tensors: Mapping[str, Tensor]) -> Any:
    match mark.removeprefix(_MARK):
        case "tensor":
            return tensors[content]
        case "tuple":
            return tuple(_together(item, tensors) for item in content)
        case "bytes":
            return base64.b64decode(content)
        case "pairs":
            return {_together(k, tensors): _together(v, tensors) for k, v in content}
        case "array":
            dtype, shape, data = content
            return np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()
    raise ValueError(f"the mark {mark!r:.50}")
