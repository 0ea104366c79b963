"""Conversion of a `state_dict()`, or of an optimizer's state, to JSON and tensors, and back.

No object of a script's class is stored, so reading is safe.
"""

import base64
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.state.shards import DTYPES, Json, name_of
from shoal_proto.errors import InvalidSpec, MalformedMessage, ShoalError

MAX_VALUES = 20_000
"""Limit for one object; a tensor counts as one value."""
MAX_BITS = 4096
"""Limit for an integer: fewer digits than the 4,300 that Python converts to text."""
MAX_PICKLED_BITS = 2032
"""Limit for an integer in a checkpoint. Torch's unpickler refuses longer integers."""
MAX_INLINE = 100_000
MAX_DEPTH = 50
_MARK = "$"
"""A dict whose only key begins with this character stands for a value that JSON lacks."""
_CARRIED = (
    "tensors, numpy arrays, numbers, strings, bytes, None, and lists, tuples and dicts of these"
)
CARRIED_EXACTLY = "tensors, numbers, strings, None, and lists, tuples and dicts of these"

Refusal = Callable[[tuple[str, ...], str, str], ShoalError]


def split_state(state: Any, name: str) -> tuple[Json, dict[str, Tensor]]:
    """Split a state into JSON and tensors, to which the JSON refers by dotted path.

    Tensors are not copied. Raises InvalidSpec, with the path, for a value that cannot be sent to
    another member.
    """

    def refused(path: tuple[str, ...], seen: str, expected: str) -> ShoalError:
        return InvalidSpec(
            f"the state of {name!r} cannot be sent to another member",
            seen=f"{seen} at {'.'.join(path) or 'the top'} of its state_dict()",
            expected=expected,
            fix="Leave it out of state_dict(), and create it in load_state_dict().",
        )

    converter = _PlainCopy(refused)
    return converter.plain(state, ()), converter.tensors


def split_state_exactly(
    value: Any,
    path: tuple[str, ...],
    refused: Refusal,
    *,
    inline: bool = False,
    taken: set[str] | None = None,
) -> tuple[Json, dict[str, Tensor]]:
    """Split as `split_state` does, for a checkpoint that plain torch reads with the same types.

    Raises the error of `refused` for values that `join_state` would rebuild with another type,
    except NumPy numbers and strings, enums, other subclasses of Python's scalars, and bytearrays:
    these become plain values. `inline`: write tensors as numbers among the values. `taken`: dotted
    paths already in use, to which those of this value are added.
    """
    converter = _PlainCopy(refused, is_exact=True, is_inline=inline, taken=taken)
    return converter.plain(value, path), converter.tensors


def join_state(values: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild the state given to `split_state`. Raises MalformedMessage for other values."""
    try:
        return _together(values, tensors)
    except (TypeError, ValueError, LookupError, RecursionError) as error:
        raise MalformedMessage(
            "the stored state of an optimizer or a registered object cannot be read",
            seen=f"{type(error).__name__}: {str(error)[:200]}",
            expected="state that a member of the same version of Shoal has stored",
        ) from error


class _PlainCopy:
    def __init__(
        self,
        refused: Refusal,
        *,
        is_exact: bool = False,
        is_inline: bool = False,
        taken: set[str] | None = None,
    ) -> None:
        self._refused = refused
        self._is_exact = is_exact
        self._is_inline = is_inline
        self._max_bits = MAX_PICKLED_BITS if is_exact else MAX_BITS
        self._num_values = 0
        self._taken = set() if taken is None else taken
        self.tensors: dict[str, Tensor] = {}

    def plain(self, value: Any, path: tuple[str, ...]) -> Json:
        self._num_values += 1
        if len(path) > MAX_DEPTH:
            raise self._refused(path, "values nested too deep", f"at most {MAX_DEPTH} levels")
        if self._num_values > MAX_VALUES:
            seen = f"more than {MAX_VALUES:,} values"
            raise self._refused(path, seen, "a long list as one tensor")
        if _is_numpy_number(value) or (self._is_exact and _has_no_dimensions(value)):
            value = value.item()
        if isinstance(value, int) and value.bit_length() > self._max_bits:
            raise self._refused(
                path, f"an integer of {value.bit_length():,} bits", f"at most {self._max_bits:,}"
            )
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        marked = _scalar(value)
        return marked[0] if marked else self._contained(value, path)

    def _contained(self, value: Any, path: tuple[str, ...]) -> Json:
        kind = type(value) if self._is_exact else _base_of(value)
        if kind is dict:
            return self._mapping(value, path)
        if kind in (list, tuple):
            items = [self._inside(item, (*path, str(i))) for i, item in enumerate(value)]
            return {_MARK + "tuple": list[Json](items)} if kind is tuple else items
        if kind is np.ndarray and value.dtype.kind in "biufc" and not self._is_exact:
            data = base64.b64encode(value.tobytes()).decode()
            return {_MARK + "array": [value.dtype.str, list(value.shape), data]}
        expected = CARRIED_EXACTLY if self._is_exact else _CARRIED
        raise self._refused(path, f"a {type(value).__name__}", expected)

    def _mapping(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> Json:
        plain = all(type(key) is str and not key.startswith(_MARK) for key in value)
        pairs: list[Json] = []
        items: dict[str, Json] = {}
        for key, item in value.items():
            entry = self._inside(item, (*path, str(key)))
            if plain:
                items[key] = entry
            else:
                pairs.append([self.plain(key, path), entry])
        return items if plain else {_MARK + "pairs": pairs}

    def _inside(self, item: Any, path: tuple[str, ...]) -> Json:
        if self._is_exact:
            dotted = ".".join(path)
            if dotted in self._taken:
                raise self._refused(
                    path,
                    f"two entries named {dotted!r}",
                    "keys that differ as text, also once they are joined by dots",
                )
            self._taken.add(dotted)
        return self.plain(item, path)

    def _tensor(self, tensor: Tensor, path: tuple[str, ...]) -> Json:
        key = ".".join(path) or "value"
        if isinstance(tensor, DTensor) and (self._is_inline or not self._is_exact):
            raise self._refused(
                path, "a part of a tensor that is divided among members", "whole tensors"
            )
        if fault := fault_of(tensor):
            raise self._refused(path, fault, f"dense tensors of {', '.join(DTYPES)}")
        if self._is_inline:
            if tensor.numel() > MAX_INLINE or tensor.is_complex() or tensor.is_meta:
                seen = f"a tensor of {tensor.numel():,} elements of {tensor.dtype}"
                raise self._refused(path, seen, f"at most {MAX_INLINE:,} real elements in memory")
            return {_MARK + "numbers": [name_of(tensor.dtype), tensor.tolist()]}
        if key in self.tensors:
            raise self._refused(path, "two tensors", f"one at {key}")
        self.tensors[key] = tensor.detach()
        return {_MARK + "tensor": key}


def fault_of(tensor: Tensor) -> str:
    """Return the reason why a tensor cannot be sent or stored; "" if it can."""
    if tensor.layout is not torch.strided or name_of(tensor.dtype) not in DTYPES:
        return f"a tensor of {tensor.layout} and {tensor.dtype}"
    kind = type(tensor)
    # A subclass with a `__torch_dispatch__` of its own wraps other tensors: it has no memory.
    if not isinstance(tensor, DTensor) and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"a {kind.__name__}, which is made of other tensors"
    return ""


def _is_numpy_number(value: object) -> bool:
    """True for a NumPy number or string; not for a date, which `item` may turn into a number."""
    return isinstance(value, np.generic) and value.dtype.kind in "biufcUS"


def _has_no_dimensions(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 0 and _is_numpy_number(value[()])


def _base_of(value: object) -> type:
    for kind, carried in (
        (Mapping, dict),
        (list, list),
        (tuple, tuple),
        (np.ndarray, np.ndarray),
    ):
        if isinstance(value, kind):
            return carried
    return type(value)


def _scalar(value: object) -> tuple[Json] | None:
    if value is None:
        return (None,)
    if isinstance(value, str):
        # An enum's own `str` is its name.
        return (str.__str__(value),)
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return (kind(value),)
    marked: Json = None
    if isinstance(value, complex):
        marked = {_MARK + "complex": [value.real, value.imag]}
    elif isinstance(value, torch.dtype):
        marked = {_MARK + "dtype": name_of(value)}
    elif isinstance(value, bytes | bytearray):
        marked = {_MARK + "bytes": base64.b64encode(value).decode()}
    return (marked,) if marked else None


def _together(values: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(values, list):
        return [_together(item, tensors) for item in values]
    if not isinstance(values, dict):
        return values
    if len(values) == 1 and next(iter(values)).startswith(_MARK):
        return _marked(*next(iter(values.items())), tensors)
    return {key: _together(item, tensors) for key, item in values.items()}


def _marked(mark: str, content: Any, tensors: Mapping[str, Tensor]) -> Any:
    if mark not in _READERS:
        raise ValueError(f"the mark {mark!r:.50}")
    return _READERS[mark](content, tensors)


def _array(content: Any, _: Mapping[str, Tensor]) -> Any:
    dtype, shape, data = content
    return np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()


def _numbers(content: Any, _: Mapping[str, Tensor]) -> Tensor:
    dtype, numbers = content
    return torch.tensor(numbers, dtype=DTYPES[dtype])


def _dtype(content: Any, _: Mapping[str, Tensor]) -> torch.dtype:
    found = getattr(torch, content)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{content!r:.50} is not a dtype")
    return found


_READERS: Mapping[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    _MARK + "array": _array,
    _MARK + "bytes": lambda content, _: base64.b64decode(content),
    _MARK + "complex": lambda content, _: complex(*content),
    _MARK + "dtype": _dtype,
    _MARK + "numbers": _numbers,
    _MARK + "pairs": lambda content, tensors: {
        _together(key, tensors): _together(value, tensors) for key, value in content
    },
    _MARK + "tensor": lambda content, tensors: tensors[content],
    _MARK + "tuple": lambda content, tensors: tuple(_together(each, tensors) for each in content),
}
