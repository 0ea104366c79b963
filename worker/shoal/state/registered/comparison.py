"""Comparison of registered state between members at the same step."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from shoal.backends.abortable.gather import barrier_after_collective, gather_if_different
from shoal.state.shards import Json
from shoal_proto.errors import RegisteredStateDiffers

TOLERANCE = 1e-5
"""Allowed relative difference: hosts with other instruction sets round sums differently."""
SMALL = 1e-14
"""Allowed absolute difference: 1 minus a cosine may be a rounding error instead of 0."""
UNTRAINED = -1
MAX_SHOWN = 120


def compare(
    group: dist.ProcessGroup, members: Sequence[str], step: int, own: Mapping[str, Json] | None
) -> None:
    """Check, by a collective, that members at the same step hold the same registered state.

    `members`: by rank. `own`: this member's state by the objects' names; None: this member is not
    compared. Raises RegisteredStateDiffers, on all members.
    """
    if len(members) == 1:
        return
    text = json.dumps([step, own], sort_keys=True)
    messages = gather_if_different(text.encode(), group)
    if messages is None:
        return
    states = [json.loads(message) for message in messages]
    by_step: dict[int, dict[str, Mapping[str, Any]]] = {}
    for member, (at_step, held) in zip(members, states, strict=True):
        if held is not None:
            by_step.setdefault(at_step, {})[member] = held
    for at_step, holders in sorted(by_step.items()):
        found = difference(holders)
        if found:
            barrier_after_collective(group)
            raise _differs(at_step, found)


def difference(holders: Mapping[str, Any]) -> tuple[str, dict[str, str]] | None:
    """Return the first path at which holders differ, and their values; None if none differ."""
    own, *others = holders.values()
    for other in others:
        path = _first_path_that_differs(own, other, ())
        if path is not None:
            shown = {name: _value_at(held, path) for name, held in holders.items()}
            return ".".join(path), shown
    return None


def _differs(step: int, found: tuple[str, dict[str, str]]) -> RegisteredStateDiffers:
    path, shown = found
    name, _, inside = path.partition(".")
    inside = inside.partition(".")[2] or "its state"
    holders: dict[str, list[str]] = {}
    for member, value in shown.items():
        holders.setdefault(value, []).append(member)
    text = "; ".join(f"{value} by {', '.join(names[:8])}" for value, names in holders.items())
    return RegisteredStateDiffers(
        f"the members' state of {name!r} differs "
        + ("before the first step" if step == UNTRAINED else f"after step {step}"),
        seen=f"{inside}: {text}",
        expected="the same on every member: a count of one member alone is not part of the"
        " job's state",
        fix="Change it with the same values on all members, in the step or `if step.committed`;"
        " for a metric, register the sum over members.",
        details=shown,
    )


def _first_path_that_differs(one: Any, other: Any, path: tuple[str, ...]) -> tuple[str, ...] | None:
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = {key: (one.get(key), other.get(key)) for key in [*one, *other]}
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = {str(i): pair for i, pair in enumerate(zip(one, other, strict=True))}
    else:
        return None if are_close(one, other, TOLERANCE) else path
    for key, (a, b) in pairs.items():
        found = _first_path_that_differs(a, b, (*path, key))
        if found is not None:
            return found
    return None


def are_close(one: Any, other: Any, tolerance: float) -> bool:
    """True if two values of JSON are equal, or numbers that differ by at most `tolerance` or SMALL.

    Lists are compared element by element. Integers have to be equal; NaN equals NaN.
    """
    if isinstance(one, list) and isinstance(other, list):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(are_close(*both, tolerance) for both in pairs)
    kinds = {type(one), type(other)}
    if float in kinds and kinds <= {float, int}:
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or math.isclose(one, other, rel_tol=tolerance, abs_tol=SMALL)
    return bool(one == other)


def _value_at(held: Any, path: tuple[str, ...]) -> str:
    for key in path:
        if isinstance(held, dict):
            held = held.get(key)
        elif isinstance(held, list) and int(key) < len(held):
            held = held[int(key)]
    return str(held)[:MAX_SHOWN]
