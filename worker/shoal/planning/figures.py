"""Figures of a strategy before anything runs: groups, memory and traffic of a step, from shapes
only. The model may be on the meta device."""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Adagrad, Optimizer

from shoal_proto.errors import UnsupportedOptimizer

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Collectives of one kind in one part of a step, as one rank counts them."""

    kind: str
    """Kind as in `process_group.collectives`: "all_gather", "reduce_scatter", "all_reduce", ..."""
    when: str
    """Part of the step: "forward", "backward" or "update" (after the last gradient)."""
    calls: int
    num_bytes: int
    """Bytes of all calls together, with padding. A call counts the output of an all-gather, the
    input of a reduction or a broadcast, or the tensor sent or received."""
    every_steps: int = 1
    """Interval in steps at which these collectives take place."""


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """Memory of one rank, in bytes, and its collectives in a step. Activations, and buffers of
    collectives in progress, are not counted."""

    parameters: int
    """Parameters between steps, with padding."""
    parameters_peak: int
    """Parameters within a step, including gathered ones."""
    gradients: int
    """Gradients when the optimizer steps, or all of DDP's buckets, which stay."""
    gradients_peak: int
    """Gradients in backward, including whole ones that are not reduced yet."""
    optimizer: int
    kept: int = 0
    """Other memory kept between steps; under local SGD, the last outer step's state and
    velocity."""
    collectives: tuple[Collective, ...]

    @property
    def held(self) -> int:
        """Memory in use when the optimizer steps, except for parameters still gathered."""
        return self.parameters + self.gradients + self.optimizer + self.kept

    @property
    def peak(self) -> int:
        """Upper bound of the memory in use at any moment."""
        return self.parameters_peak + self.gradients_peak + self.optimizer + self.kept

    @property
    def bytes_per_step(self) -> float:
        """Bytes of all collectives of a step, averaged over many steps."""
        return sum(each.num_bytes / each.every_steps for each in self.collectives)

    @property
    def calls_per_step(self) -> float:
        """Number of collectives in a step, averaged over many steps."""
        return sum(each.calls / each.every_steps for each in self.collectives)


@dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """Parameters that are communicated together: a gathered group, a bucket, a stage."""

    title: str
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Figures of training a model with a strategy. `str()` renders them as tables."""

    strategy: str
    groups: tuple[GroupFigures, ...]
    """Groups in the order of the forward pass, as far as known; DDP's buckets in the order in which
    they fill."""
    ranks: tuple[RankFigures, ...]
    arrangement: str = ""
    """Arrangement of the ranks in a mesh; empty if they are in one row."""
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def moved(self, kind: str, rank: int = 0) -> tuple[int, int]:
        """Return calls and bytes of a rank's collectives of a kind, in a step with all of them."""
        of_kind = [each for each in self.ranks[rank].collectives if each.kind == kind]
        return sum(each.calls for each in of_kind), sum(each.num_bytes for each in of_kind)

    def __str__(self) -> str:
        return render(self)


@dataclass(frozen=True, kw_only=True)
class PlanInput:
    """Input of a plan: model, world size, optimizer and inputs."""

    model: nn.Module
    """Model on any device, also meta; it is not changed."""
    world_size: int
    optimizer: Optimizer | None = None
    """Optimizer of the model's parameters; None: its state is not counted."""
    inputs: Any = None
    """Argument of the model for the global batch: a tensor or a tuple of tensors, real or meta;
    None: figures that depend on it are left out."""
    parameters: Mapping[str, nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", dict(self.model.named_parameters()))

    def state_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Compute the bytes of optimizer state for parameters of these shapes, by a step on the
        meta device. Raises UnsupportedOptimizer if that step fails."""
        if self.optimizer is None:
            return 0
        replacements: dict[int, Any] = {}
        for name, parameter in self.parameters.items():
            shape = shapes.get(name, (0,))
            replacements[id(parameter)] = replacement = nn.Parameter(
                torch.empty(shape, dtype=parameter.dtype, device="meta"),
                requires_grad=parameter.requires_grad,
            )
            if parameter.requires_grad and name in shapes:
                replacement.grad = torch.empty_like(replacement)
        return _state_after_step(self.optimizer, replacements)


def uncompressed(compression: object) -> tuple[str, ...]:
    """Return the note of a strategy with `compression`; nothing for one without."""
    if compression is None:
        return ()
    return (f"bytes are counted as without compression; {compression} sends fewer",)


MAX_GROUPS = 60
MIN_FOLDED = 3
_MOVED = ("rank", "collective", "when", "calls", "bytes")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def render(plan: Plan) -> str:
    """Render tables of the groups, the bytes per rank, and the collectives of each rank."""
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
    unlisted = folded[MAX_GROUPS:]
    if unlisted:
        rows.append((f"and {len(unlisted)} more", *_sums(unlisted)))
    return [*rows, (f"all {len(plan.groups)}", *_sums(plan.groups))]


def _sums(groups: Sequence[GroupFigures]) -> tuple[str, str]:
    whole = sum(group.num_bytes for group in groups)
    return str(sum(group.num_parameters for group in groups)), _size(whole)


def fold(groups: Sequence[GroupFigures]) -> list[GroupFigures]:
    """Fold three or more groups of one size with titles that differ in one number: "layers.0",
    "layers.1" and "layers.2" become "layers.0-2", with the figures of all. The numbers must have no
    gap."""
    alike: dict[_Kind, dict[int, int]] = {}
    for index, group in enumerate(groups):
        for kind, number in _kinds(group):
            alike.setdefault(kind, {})[number] = index
    by_index = dict(enumerate(groups))
    for kind, group_of in sorted(alike.items(), key=lambda item: -len(item[1])):
        numbers, indices = list(group_of), list(group_of.values())
        in_a_row = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        if len(indices) < MIN_FOLDED or not in_a_row or not by_index.keys() >= set(indices):
            continue
        for index in indices:
            del by_index[index]
        by_index[indices[0]] = GroupFigures(
            title=f"{kind.before}{numbers[0]}-{numbers[-1]}{kind.after}",
            num_parameters=len(indices) * kind.num_parameters,
            num_bytes=len(indices) * kind.num_bytes,
        )
    return [by_index[index] for index in sorted(by_index)]


class _Kind(NamedTuple):
    before: str
    after: str
    num_parameters: int
    num_bytes: int


def _kinds(group: GroupFigures) -> Iterator[tuple[_Kind, int]]:
    for digits in re.finditer(r"\d+", group.title):
        before, after = group.title[: digits.start()], group.title[digits.end() :]
        yield _Kind(before, after, group.num_parameters, group.num_bytes), int(digits[0])


def _held(plan: Plan) -> tuple[Sequence[str], list[Sequence[str]]]:
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
    rows: list[Sequence[str]] = []
    for name, rank in _alike(plan, lambda rank: rank.collectives):
        used = [each for each in rank.collectives if each.calls]
        rows += [
            (name, each.kind, _when(each), str(each.calls), _size(each.num_bytes)) for each in used
        ]
        if used[1:] or any(each.every_steps > 1 for each in used):
            total = f"{round(rank.calls_per_step, 2):g}", _size(round(rank.bytes_per_step))
            rows.append((name, "all", "a step", *total))
    return rows


def _when(collective: Collective) -> str:
    every = collective.every_steps
    return collective.when if every == 1 else f"{collective.when}, every {every} steps"


def _alike(plan: Plan, key: object) -> Iterable[tuple[str, RankFigures]]:
    assert callable(key)
    for _, run in groupby(enumerate(plan.ranks), lambda item: key(item[1])):
        numbered = list(run)
        (first, figures), last = numbered[0], numbered[-1][0]
        yield str(first) if first == last else f"{first}-{last}", figures


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), 0
    while size >= 10 * 1024 or (unit and size >= 999.5):
        size, unit = size / 1024, unit + 1
    return f"{num_bytes} B" if not unit else f"{size:.3g} {_UNITS[unit]}"


class PlannableStrategy(Protocol):
    """Strategy that can compute its own figures."""

    def figures(self, subject: PlanInput) -> Plan:
        """Compute the figures for this model, without communication or side effects. Raises the
        errors of the strategy's checks of model and optimizer, and InvalidSpec or
        UnsupportedOptimizer for figures that cannot be computed."""


def _state_after_step(optimizer: Optimizer, replacements: dict[int, Any]) -> int:
    # The state, which may be large, is not copied: a first step makes it anew.
    replacements[id(optimizer.state)] = type(optimizer.state)(dict)
    trial = copy.deepcopy(optimizer, replacements)
    _make_first_state(trial)
    try:
        trial.step()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise UnsupportedOptimizer(
            f"the state of {type(optimizer).__name__} cannot be computed beforehand",
            seen=str(error),
            expected="an optimizer that can step parameters on the meta device",
            fix="Plan without an optimizer; its state is then left out.",
        ) from error
    return sum(
        value.nbytes
        for state in trial.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def _make_first_state(optimizer: Optimizer) -> None:
    """Create the state that Adagrad's constructor creates, before torch 2.13, for replaced
    parameters."""
    if type(optimizer) is Adagrad:
        optimizer.state.update(Adagrad(optimizer.param_groups, **optimizer.defaults).state)
