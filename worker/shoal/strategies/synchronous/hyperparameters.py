"""Hyperparameters of each step, and their comparison when a step is repeated."""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from operator import is_
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from shoal.model.several import optimizers_of
from shoal.state.registered.comparison import are_close

Values = tuple[Mapping[str, Any], ...]

KEPT_STEPS = 1024
"""Limit of the steps whose hyperparameters are kept."""
TOLERANCE = 1e-9
"""Relative tolerance: math libraries differ in the last bit of a schedule."""
_CLIPPING = "max_norm of clip_grad_norm"
_NORM_TOLERANCE = 1e-5
"""Relative tolerance for `max_norm`, which may be computed from earlier norms."""


class Hyperparameters:
    """Hyperparameters of one optimizer, now and in recent steps, for all generations.

    A repeated step has to be the same as its first attempt. But a scheduler that counts its own
    calls has counted the first attempt too.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._applied: OrderedDict[int, Values] = OrderedDict()
        self._failed: tuple[int, Values] | None = None
        self._conflict = ""
        self._now: Values = ()
        self._seen: list[object] | None = None

    @property
    def names(self) -> Sequence[str]:
        """Names of the optimizers; a single one has the empty name."""
        return list(optimizers_of(self._optimizer))

    def current_values(self) -> Values:
        """The present values; the same object as long as nothing changes."""
        own, groups = self._optimizer.defaults, self._optimizer.param_groups
        seen: list[object] = []
        for group in groups:
            seen += group
            seen += group.values()
        known = self._seen
        if known is not None and len(seen) == len(known) and all(map(is_, seen, known)):
            # The usual case: nothing changed. The conversion below takes ten times as long.
            return self._now
        values = tuple(
            {
                key: _plain(value)
                for key, value in group.items()
                if key != "params" and (not own or key in own)
            }
            for group in groups
        )
        fixed = all(_is_immutable(v) for g in groups for key, v in g.items() if key != "params")
        self._seen = seen if fixed else None
        if values != self._now:
            self._now = values
        return self._now

    def failed(self, step: int) -> None:
        """Note that an attempt at a step failed. `step`: number of committed steps before it."""
        self._failed = (step, self.current_values())

    def compare_with_failed(self) -> None:
        """Compare the values with a failed attempt's, before a new generation changes them."""
        failed, self._failed = self._failed, None
        if failed is not None:
            step, values = failed
            change = _changed(step, {"when it failed": values, "after that": self.current_values()})
            self._conflict = self._conflict or change

    def conflict(self, step: int) -> str:
        """Return the reason why the step cannot be repeated as it was; "" if it can.

        A difference that `compare_with_failed` found is returned only once.
        """
        conflict, self._conflict = self._conflict, ""
        return conflict or self.differences_on_retry(step)

    def differences_on_retry(self, step: int) -> str:
        """Return the differences from the values last applied in this step; "" if none."""
        before = self._applied.get(step)
        if before is None or before == self.current_values():
            return ""
        return _changed(step, {"the first time": before, "now": self.current_values()})

    def apply(self, step: int) -> None:
        """Note that the present values are applied in this step."""
        self._applied[step] = self.current_values()
        self._applied.move_to_end(step)
        while len(self._applied) > KEPT_STEPS:
            self._applied.popitem(last=False)


def with_norms(values: Values, norms: Sequence[float]) -> Values:
    """Return the values with the norms that gradients are clipped to."""
    return (*values, {_CLIPPING: [*norms]}) if norms else values


def digest_of(values: Any) -> int:
    """Return a digest: a positive number below 2**56."""
    text = json.dumps(values, default=repr).encode()
    return int.from_bytes(blake2b(text, digest_size=7).digest(), "big") or 1


def differences(by_holder: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the fields that differ by more than a tolerance, with the value of each holder."""
    first, *others = by_holder.values()
    fields = {
        (index, key) for groups in by_holder.values() for index, g in enumerate(groups) for key in g
    }
    differing = {}
    for index, key in sorted(fields):
        values = [_at(groups, index, key) for groups in (first, *others)]
        tolerance = _NORM_TOLERANCE if key == _CLIPPING else TOLERANCE
        if not all(are_close(values[0], value, tolerance) for value in values[1:]):
            field = key if key == _CLIPPING else f"{key} of group {index}"
            differing[field] = dict(zip(by_holder, values, strict=True))
    return differing


def describe_differences(differing: Mapping[str, Mapping[str, Any]]) -> str:
    """Text of the differences: "lr of group 0: 0.1 by a, b; 0.05 by c"."""
    return ". ".join(f"{field}: {by_value(values)}" for field, values in differing.items())


def _changed(step: int, versions: Mapping[str, Values]) -> str:
    differing = differences(versions)
    words = (
        f"{field} " + " and ".join(f"{value} {when}" for when, value in values.items())
        for field, values in differing.items()
    )
    return f"in step {step} {', '.join(words)}" if differing else ""


def by_value(values: Mapping[str, Any], most: int = 8) -> str:
    """Text of values with their holders, of which the first `most` are named."""
    holders: dict[str, list[str]] = {}
    for name, value in values.items():
        holders.setdefault(str(value), []).append(name)
    parts = []
    for value, names in holders.items():
        more = f" and {len(names) - most} more" if len(names) > most else ""
        parts.append(f"{value} by {', '.join(names[:most])}{more}")
    return "; ".join(parts)


def _is_immutable(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_immutable, value))
    return value is None or type(value) in (bool, int, float, str)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor | np.generic | np.ndarray):
        # A member that receives the state has Python's numbers instead of NumPy's.
        return _plain(value.tolist())
    if isinstance(value, bool) or not isinstance(value, float):
        return [_plain(each) for each in value] if isinstance(value, tuple | list) else value
    return float(value)


def _at(groups: Sequence[Mapping[str, Any]], index: int, key: str) -> Any:
    return groups[index].get(key) if index < len(groups) else None
