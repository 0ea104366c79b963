"""A plan as a person reads it."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from shoal.planning.figures import Plan, RankFigures

MAX_GROUPS = 60
_HELD = ("rank", "parameters", "in a step", "gradients", "in backward", "optimizer", "peak")
_MOVED = ("rank", "collective", "when", "calls", "bytes")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def render(plan: Plan) -> str:
    """Groups, bytes per rank, and what each rank moves in a step."""
    ranks = "rank" if plan.world_size == 1 else "ranks"
    lines = [f"{plan.strategy} on {plan.world_size} {ranks}", ""]
    lines += _table(("group", "parameters", "bytes"), _group_rows(plan), left=1)
    lines += ["", *_table(_HELD, _rank_rows(plan), left=1)]
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


def _rank_rows(plan: Plan) -> list[Sequence[str]]:
    def held(rank: RankFigures) -> tuple[int, ...]:
        return (
            rank.parameters,
            rank.parameters_peak,
            rank.gradients,
            rank.gradients_peak,
            rank.optimizer,
            rank.peak,
        )

    return [(name, *map(_size, held(rank))) for name, rank in _alike(plan, held)]


def _moved_rows(plan: Plan) -> list[Sequence[str]]:
    return [
        (name, each.kind, each.when, str(each.calls), _size(each.num_bytes))
        for name, rank in _alike(plan, lambda rank: rank.collectives)
        for each in rank.collectives
        if each.calls
    ]


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
