"""A plan as a person reads it."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from shoal.planning.figures import Collective, GroupFigures, Plan, RankFigures

MAX_GROUPS = 60
MIN_FOLDED = 3
_MOVED = ("rank", "collective", "when", "calls", "bytes")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def render(plan: Plan) -> str:
    """Groups, bytes per rank, and what each rank moves in a step."""
    ranks = "rank" if plan.world_size == 1 else "ranks"
    arranged = f": {plan.arrangement}" if plan.arrangement else ""
    lines = [f"{plan.strategy} on {plan.world_size} {ranks}{arranged}", ""]
    lines += _table(("group", "parameters", "bytes"), _group_rows(plan), left=1)
    lines += ["", *_table(*_held(plan), left=1)]
    moved = _moved_rows(plan)
    lines += ["", *(_table(_MOVED, moved, left=3) if moved else ["no collectives counted"])]
    return "\n".join([*lines, *("" for _ in plan.notes[:1]), *plan.notes])


def _group_rows(plan: Plan) -> list[Sequence[str]]:
    folded = fold(plan.groups)
    rows: list[Sequence[str]] = [
        (group.title, str(group.num_parameters), _size(group.num_bytes))
        for group in folded[:MAX_GROUPS]
    ]
    left = folded[MAX_GROUPS:]
    if left:
        rows.append((f"and {len(left)} more", *_together(left)))
    return [*rows, (f"all {len(plan.groups)}", *_together(plan.groups))]


def _together(groups: Sequence[GroupFigures]) -> tuple[str, str]:
    whole = sum(group.num_bytes for group in groups)
    return str(sum(group.num_parameters for group in groups)), _size(whole)


def fold(groups: Sequence[GroupFigures]) -> list[GroupFigures]:
    """Groups of one size whose titles differ in one number only become one, where the first was.

    "layers.0", "layers.1" and "layers.2" become "layers.0-2", with the figures of all three. Fewer
    than three stay as they are, and so do numbers with a gap.
    """
    alike: dict[_Kind, dict[int, int]] = {}
    for index, group in enumerate(groups):
        for kind, number in _kinds(group):
            alike.setdefault(kind, {})[number] = index
    found = dict(enumerate(groups))
    for kind, places in sorted(alike.items(), key=lambda item: -len(item[1])):
        numbers, own = list(places), list(places.values())
        in_a_row = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        if len(own) < MIN_FOLDED or not in_a_row or not found.keys() >= set(own):
            continue
        for index in own:
            del found[index]
        found[own[0]] = GroupFigures(
            title=f"{kind.before}{numbers[0]}-{numbers[-1]}{kind.behind}",
            num_parameters=len(own) * kind.num_parameters,
            num_bytes=len(own) * kind.num_bytes,
        )
    return [found[index] for index in sorted(found)]


class _Kind(NamedTuple):
    """What a group is like apart from one number in its title."""

    before: str
    behind: str
    num_parameters: int
    num_bytes: int


def _kinds(group: GroupFigures) -> Iterator[tuple[_Kind, int]]:
    for found in re.finditer(r"\d+", group.title):
        before, behind = group.title[: found.start()], group.title[found.end() :]
        yield _Kind(before, behind, group.num_parameters, group.num_bytes), int(found[0])


def _held(plan: Plan) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Header and rows; what no rank has is left out."""

    def held(rank: RankFigures) -> tuple[int, ...]:
        return (
            rank.parameters,
            rank.parameters_peak,
            rank.gradients,
            rank.gradients_peak,
            rank.optimizer,
            *((rank.kept,) if keeps else ()),
            rank.peak,
        )

    keeps = any(rank.kept for rank in plan.ranks)
    header = ("rank", "parameters", "in a step", "gradients", "in backward", "optimizer")
    rows: list[Sequence[str]] = [
        (name, *map(_size, held(rank))) for name, rank in _alike(plan, held)
    ]
    return (*header, *(("kept",) if keeps else ()), "peak"), rows


def _moved_rows(plan: Plan) -> list[Sequence[str]]:
    """What each rank moves, and all of it together where that is more than one row."""
    rows: list[Sequence[str]] = []
    for name, rank in _alike(plan, lambda rank: rank.collectives):
        own = [each for each in rank.collectives if each.calls]
        rows += [
            (name, each.kind, _when(each), str(each.calls), _size(each.num_bytes)) for each in own
        ]
        if own[1:] or any(each.every_steps > 1 for each in own):
            total = f"{round(rank.calls_per_step, 2):g}", _size(round(rank.bytes_per_step))
            rows.append((name, "all", "a step", *total))
    return rows


def _when(collective: Collective) -> str:
    every = collective.every_steps
    return collective.when if every == 1 else f"{collective.when}, every {every} steps"


def _alike(plan: Plan, key: object) -> Iterable[tuple[str, RankFigures]]:
    """Neighbouring ranks of which the same is to be said, under one name."""
    assert callable(key)
    for _, found in groupby(enumerate(plan.ranks), lambda item: key(item[1])):
        numbered = list(found)
        (first, figures), last = numbered[0], numbered[-1][0]
        yield str(first) if first == last else f"{first}-{last}", figures


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Lines; the first `left` columns lean to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]


def _size(num_bytes: int) -> str:
    """Exact below 10 KiB, else with three digits."""
    size, unit = float(num_bytes), 0
    while size >= 10 * 1024 or (unit and size >= 1024):
        size, unit = size / 1024, unit + 1
    return f"{num_bytes} B" if not unit else f"{size:.3g} {_UNITS[unit]}"
