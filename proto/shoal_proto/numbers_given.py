"""Conversion of the numbers that a script passes, of any library, into Python's own.

NumPy's integers overflow, JSON and checkpoints do not accept most of its floats, and a comparison
with a 0-d tensor returns a tensor.
"""

import math
import operator
from collections.abc import Iterable
from typing import Any

from shoal_proto.errors import InvalidSpec


def as_index(name: str, value: Any, *, least: int | None = None, most: float = math.inf) -> int:
    """Return the integer value of the argument `name`: a Python int, a NumPy integer, a 0-d array
    or tensor of integers, or another object with `__index__`. Raises InvalidSpec for anything else,
    also True and False; with `least`, also for a number out of the range.
    """
    plain = plain_number(name, value)
    if isinstance(plain, bool) or hasattr(plain, "shape"):
        raise _refusal(name, value, "an integer")
    try:
        number = operator.index(plain)
    except TypeError as error:
        raise _refusal(name, value, "an integer") from error
    if least is not None and not least <= number <= most:
        expected = f"{least} or more" if most == math.inf else f"{least} to {most}"
        raise InvalidSpec(f"{name} is out of range", seen=str(number), expected=expected)
    return number


def as_number(name: str, value: Any) -> float:
    """Return the real value of the argument `name`: a number of Python or NumPy, a 0-d array or
    tensor, or another object with `__float__`. Infinity passes. Raises InvalidSpec for anything
    else, also True and False, NaN, and integers beyond the range of a float.
    """
    plain = plain_number(name, value)
    if isinstance(plain, bool | str | bytes) or hasattr(plain, "shape"):
        raise _refusal(name, value, "a number")
    try:
        number = float(plain)
    except (OverflowError, TypeError, ValueError) as error:
        raise _refusal(name, value, "a number") from error
    if math.isnan(number):
        raise _refusal(name, value, "a number")
    return number


def plain_number(name: str, value: Any) -> Any:
    """Return the Python number in a scalar of another library; other values unchanged. Raises
    InvalidSpec for a scalar without a value, as on the meta device."""
    if getattr(value, "shape", None) != () or not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (RuntimeError, NotImplementedError) as error:
        raise InvalidSpec(
            f"{name} cannot be read", seen=f"{_shown(value)}: {error}", expected="a number"
        ) from error


def convert_fields(
    config: Any, *, indices: Iterable[str] = (), numbers: Iterable[str] = ()
) -> None:
    """Convert these fields of a frozen dataclass, from its `__post_init__`; None stays None. Raises
    what `as_index` and `as_number` raise.
    """
    for names, convert in ((indices, as_index), (numbers, as_number)):
        for name in names:
            value = getattr(config, name)
            if value is not None:
                object.__setattr__(config, name, convert(name, value))


def _refusal(name: str, value: Any, expected: str) -> InvalidSpec:
    return InvalidSpec(f"{name} is not {expected}", seen=_shown(value), expected=expected)


def _shown(value: Any) -> str:
    return f"{value!r} of type {type(value).__name__}"[:200]
