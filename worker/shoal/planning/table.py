"""A plan as a person reads it."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from shoal.planning.figures import Collective, Plan, RankFigures

MAX_GROUPS = 60
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
    rows: list[Sequence[str]] = [
        (group.title, str(group.num_parameters), _size(group.num_bytes))
        for group in plan.groups[:MAX_GROUPS]
    ]
    left = plan.groups[MAX_GROUPS:]
    if left:
        rows.append(
            (
                f"and {len(left)} more",
                str(sum(group.num_parameters for group in left)),
                _size(sum(group.num_bytes for group in left)),
            )
        )
    whole = sum(group.num_bytes for group in plan.groups)
    parameters = sum(group.num_parameters for group in plan.groups)
    return [*rows, (f"all {len(plan.groups)}", str(parameters), _size(whole))]


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


__all__ = ["render"]
