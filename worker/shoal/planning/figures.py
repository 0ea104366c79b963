"""What a strategy says of itself before anything runs: groups, memory and traffic of a step.

A strategy that can say so has a method `figures(subject) -> Plan`, see `Planned`. It computes, from
shapes alone: no group exists yet, and the model may be on the meta device.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.torch_private.optimizers import make_first_state
from shoal_proto.errors import UnsupportedOptimizer

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Operations of one kind in one part of a step, as one rank counts them."""

    kind: str
    """As `process_group.collectives` counts: "all_gather", "reduce_scatter", "all_reduce", ..."""
    when: str
    """"forward", "backward" or "update" (from the last gradient to the end of the step)."""
    calls: int
    num_bytes: int
    """Of all calls together; of the whole tensor that an operation is about: what an all-gather
    puts together, what a reduce-scatter, an all-reduce or a broadcast is given, what is sent or
    received. Padding counts."""
    every_steps: int = 1
    """One of so many steps has it, the others have none of it."""


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """What one rank holds, in bytes of memory, and what it moves in a step.

    Activations, and the buffers of operations under way, are not in it.
    """

    parameters: int
    """Between steps. Padding counts."""
    parameters_peak: int
    """In a step: with those that are whole for as long as layers compute with them."""
    gradients: int
    """When the optimizer steps. A bucket of DDP counts whole: it is there for as long as DDP is,
    though `zero1` steps few of the gradients in it."""
    gradients_peak: int
    """In backward: with those that are whole until they are reduced, as they are handed over."""
    optimizer: int
    """State of the optimizer, once it has stepped every parameter."""
    kept: int = 0
    """What else is kept from step to step: under local SGD the state that all members had last,
    and the outer step's velocity."""
    collectives: tuple[Collective, ...]
    """Of a step with one forward and one backward pass in which everything takes part."""

    @property
    def held(self) -> int:
        """All that is there when the optimizer steps, but for parameters gathered before."""
        return self.parameters + self.gradients + self.optimizer + self.kept

    @property
    def peak(self) -> int:
        """The largest that all of it can come to together."""
        return self.parameters_peak + self.gradients_peak + self.optimizer + self.kept

    @property
    def bytes_per_step(self) -> float:
        """What all collectives of a step are about, on an average over many steps."""
        return sum(each.num_bytes / each.every_steps for each in self.collectives)

    @property
    def calls_per_step(self) -> float:
        """How many collectives a step has, on an average over many steps."""
        return sum(each.calls / each.every_steps for each in self.collectives)


@dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """Parameters that travel together: a gathered group, a bucket, a stage."""

    title: str
    num_parameters: int
    num_bytes: int
    """Of the parameters, whole and without padding."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a strategy would train a model. `str()` is a table."""

    strategy: str
    groups: tuple[GroupFigures, ...]
    """In the order in which a forward pass comes to them, as far as is known."""
    ranks: tuple[RankFigures, ...]
    arrangement: str = ""
    """How the ranks are arranged, if not in a row."""
    notes: tuple[str, ...] = ()
    """What the figures leave out or take for granted."""

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def moved(self, kind: str, rank: int = 0) -> tuple[int, int]:
        """Calls and bytes of all operations of a kind in one rank's step, one that has them all."""
        found = [each for each in self.ranks[rank].collectives if each.kind == kind]
        return sum(each.calls for each in found), sum(each.num_bytes for each in found)

    def __str__(self) -> str:

        return render(self)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a plan is asked for."""

    model: nn.Module
    """On any device, meta too; it is not changed."""
    world_size: int
    optimizer: Optimizer | None = None
    """Of the model's parameters; None: optimizer state counts as nothing."""
    inputs: Any = None
    """What the model is called with for the global batch, tensors or tuple of tensors, real or
    meta; None where figures do not depend on it."""
    parameters: Mapping[str, nn.Parameter] = field(init=False)
    """By name, each once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", dict(self.model.named_parameters()))

    def state_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Bytes of the optimizer's state on a rank that steps these parameters in these shapes.

        A copy of the optimizer takes a step on the meta device to find out. Parameters that do not
        require a gradient have no state. Raises UnsupportedOptimizer if it cannot do that.
        """
        if self.optimizer is None:
            return 0
        stand_ins: dict[int, Any] = {}
        for name, parameter in self.parameters.items():
            shape = shapes.get(name, (0,))
            stand_ins[id(parameter)] = stand_in = nn.Parameter(
                torch.empty(shape, dtype=parameter.dtype, device="meta"),
                requires_grad=parameter.requires_grad,
            )
            if parameter.requires_grad and name in shapes:
                stand_in.grad = torch.empty_like(stand_in)
        return _state_after_step(self.optimizer, stand_ins)


def uncompressed(compression: object) -> tuple[str, ...]:
    """The note for a strategy whose collectives are counted as without its compression."""
    if compression is None:
        return ()
    return (f"bytes are counted as without compression; {compression} sends fewer",)


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


class Planned(Protocol):
    """A strategy that answers for itself."""

    def figures(self, subject: Subject) -> Plan:
        """The figures for this model. Talks to nobody, changes nothing.

        Raises what `distribute` would refuse the model or the optimizer with.
        """


def _state_after_step(optimizer: Optimizer, stand_ins: dict[int, Any]) -> int:
    # Its state, which may be large, is not copied: only what a first step makes of it counts.
    stand_ins[id(optimizer.state)] = type(optimizer.state)(dict)
    trial = copy.deepcopy(optimizer, stand_ins)
    make_first_state(trial)
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
