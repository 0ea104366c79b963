"""JSON with an unexpected value."""

import random
from copy import deepcopy
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, 10**30, 10**400, 0.5, -1.5, 1e308),
    *(float("nan"), float("inf"), "", "x", "../../x", "0", "NaN", "\x00", "é", "a" * 5000),
    *([], [0], [[0, 1]], ["x"], [None], {}, {"x": 1}, {"": None}, [[[[[]]]]]),
)


def spoil_json(draw: random.Random, value: Any) -> None:
    """Change one value somewhere inside, remove it, or add one."""
    holders = list(_holders(value))
    holder = draw.choice(holders)
    if isinstance(holder, dict):
        key = draw.choice([*holder, "added"])
        if draw.random() < 0.15:
            holder.pop(key, None)
        else:
            holder[key] = deepcopy(draw.choice(VALUES))
    elif holder and draw.random() < 0.8:
        holder[draw.randrange(len(holder))] = deepcopy(draw.choice(VALUES))
    else:
        holder.append(deepcopy(draw.choice(VALUES)))


def _holders(value: Any) -> list[Any]:
    found = []
    if isinstance(value, dict | list):
        found.append(value)
        for each in value.values() if isinstance(value, dict) else value:
            found += _holders(each)
    return found
