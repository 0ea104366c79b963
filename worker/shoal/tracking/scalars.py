"""Values that may be logged: numbers by name."""

import re
from collections.abc import Mapping
from numbers import Real

from torch import Tensor

from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import plain_number

MAX_NAMES = 1000
MAX_NAME_LENGTH = 100
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_NAME = re.compile(rf"{_PART}(/{_PART})*")
_RESERVED = {"step", "_step", "_runtime", "_timestamp", "_wandb"}
"""Names of that form under which Weights & Biases keeps values of its own."""

Scalar = float | int | Tensor
"""A number, or a tensor of one."""


def scalars(values: Mapping[str, Scalar]) -> dict[str, float]:
    """Return the values as Python numbers, by name. Reading a tensor waits for its device.

    Raises InvalidSpec for a value that is not a number, for a name that some tracker does not
    accept, and for more than `MAX_NAMES` names.
    """
    if not isinstance(values, Mapping):
        raise InvalidSpec(
            "session.log takes numbers by name",
            seen=type(values).__name__,
            expected='a dict, such as session.log({"loss": loss})',
        )
    if len(values) > MAX_NAMES:
        raise InvalidSpec(
            "too many values in one session.log",
            seen=f"{len(values)} names",
            expected=f"at most {MAX_NAMES}",
        )
    return {_checked(name): _number(name, value) for name, value in values.items()}


def _checked(name: str) -> str:
    if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name):
        raise InvalidSpec(
            "a value cannot be logged under this name",
            seen=repr(name)[:200],
            expected="letters, digits, _, . and -, in parts divided by /,"
            f" {MAX_NAME_LENGTH} characters at most",
        )
    if name in _RESERVED:
        raise InvalidSpec(
            "a value cannot be logged under this name",
            seen=name,
            expected=f"another name than {', '.join(sorted(_RESERVED))}",
            fix="The number of the step is logged with each value.",
        )
    return name


def _number(name: str, value: Scalar) -> float:
    plain = value if isinstance(value, Tensor) else plain_number(name, value)
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            return float(value.detach())
        seen = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    elif isinstance(plain, Real):
        return float(plain)
    else:
        seen = f"{type(value).__name__}: {value!r}"[:200]
    raise InvalidSpec(
        f"{name} cannot be logged: it is not one number",
        seen=seen,
        expected="a number, or a tensor of one element",
        fix="Log its mean or its norm. Pictures and texts go to the tracker itself, `if"
        " session.is_first`.",
    )
