"""Figures of the strategies "fsdp", "hsdp", "zero2" and "zero3", from shapes alone."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from shoal.layouts.sharded.grouping import ModuleGroup, group_modules
from shoal.layouts.sharded.layout import ShardedOptions, ranks_of_copy
from shoal.model.tied_tensors import persistent_buffers
from shoal.planning.figures import (
    BACKWARD,
    FORWARD,
    UPDATE,
    Collective,
    GroupFigures,
    Plan,
    PlanInput,
    RankFigures,
)

OFFLOADED = (
    "cpu_offload: parameters, gradients and optimizer state are in host memory; a GPU holds what is"
    " gathered for a pass and its gradients until they are reduced"
)


def rows_of(num_rows: int, rank: int, world_size: int) -> int:
    """Return the number of a parameter's rows on this rank; rank 0 has the most rows."""
    most = -(-num_rows // world_size)
    return max(0, min(num_rows - rank * most, most))


class ShardedFigures:
    """Computation of one plan.

    Parameters, gradients and collectives are counted with padding, as if every rank had as many
    rows as rank 0. Optimizer state is counted without padding.
    """

    def __init__(self, subject: PlanInput, options: ShardedOptions) -> None:
        self._subject, self._options = subject, options
        self._n = ranks_of_copy(subject.world_size, options.shard)
        self._num_copies = subject.world_size // self._n
        grouping = group_modules(subject.model, options.min_group_bytes)
        self._groups = list(grouping)
        self._rest = grouping.rest

    def plan(self, strategy: str) -> Plan:
        return Plan(
            strategy=strategy,
            groups=tuple(
                GroupFigures(
                    title=group.title,
                    num_parameters=len(group.parameters),
                    num_bytes=group.num_bytes,
                )
                for group in self._groups
            ),
            ranks=tuple(self._rank(rank) for rank in range(self._n)) * self._num_copies,
            arrangement=f"{self._num_copies} x {self._n} (copies x ranks of a copy)"
            if self._num_copies > 1
            else "",
            notes=(OFFLOADED,) if self._options.cpu_offload else (),
        )

    def _rank(self, rank: int) -> RankFigures:
        held = sum(self._part(p, p.dtype) for group in self._groups for p in self._of(group))
        shapes = {
            name: (rows_of(p.shape[0], rank, self._n), *p.shape[1:])
            for name, p in self._subject.parameters.items()
        }
        return RankFigures(
            parameters=held,
            parameters_peak=held + self._gathered_peak(),
            gradients=sum(self._gradients(group) for group in self._groups),
            gradients_peak=self._gradients_peak(),
            optimizer=self._subject.state_bytes(shapes),
            collectives=self._collectives() if self._n > 1 else (),
        )

    # --- memory ---

    def _of(self, group: ModuleGroup) -> list[nn.Parameter]:
        return [self._subject.parameters[name] for name in group.parameters]

    def _trained(self, group: ModuleGroup) -> list[nn.Parameter]:
        return [parameter for parameter in self._of(group) if parameter.requires_grad]

    def _part(self, parameter: nn.Parameter, dtype: torch.dtype) -> int:
        rows, *others = parameter.shape
        return rows_of(rows, 0, self._n) * math.prod(others) * dtype.itemsize

    def _compute_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        chosen = self._options.param_dtype
        return chosen if chosen and parameter.is_floating_point() else parameter.dtype

    def _gathered(self, group: ModuleGroup) -> int:
        return self._n * sum(self._part(p, self._compute_dtype(p)) for p in self._of(group))

    def _gathered_peak(self) -> int:
        sizes = [self._gathered(group) for group in self._groups if group is not self._rest]
        rest = self._gathered(self._rest)
        return rest + (max(sizes, default=0) if self._options.free_after_forward else sum(sizes))

    def _gradients(self, group: ModuleGroup) -> int:
        return sum(self._part(p, p.dtype) for p in self._trained(group))

    def _reduced(self, group: ModuleGroup) -> int:
        return self._n * sum(
            self._part(p, self._options.reduces_in(p.dtype)) for p in self._trained(group)
        )

    def _gradients_peak(self) -> int:
        before, peak = 0, 0
        for group in self._order_of_reduction():
            whole = self._reduced(group)
            peak = max(peak, before + whole + whole // self._n)
            before += self._gradients(group)
        return max(peak, before)

    def _order_of_reduction(self) -> list[ModuleGroup]:
        """Return the groups with gradients, in the order in which backward finishes them."""
        first = next((n for n, p in self._subject.parameters.items() if p.requires_grad), "")
        groups = [group for group in reversed(self._groups) if self._trained(group)]
        return sorted(groups, key=lambda g: (first in g.parameters, g is self._rest))

    # --- traffic ---

    def _collectives(self) -> tuple[Collective, ...]:
        again = [group for group in self._groups if group is not self._rest]
        reduced = [group for group in self._groups if self._trained(group)]
        buffers = [buffer.nbytes for buffer in persistent_buffers(self._subject.model).values()]
        collectives = [
            _collective("all_gather", FORWARD, map(self._gathered, self._groups)),
            _collective(
                "all_gather",
                BACKWARD,
                map(self._gathered, again if self._options.free_after_forward else ()),
            ),
            _collective("reduce_scatter", BACKWARD, map(self._reduced, reduced)),
            _collective(
                "all_reduce",
                BACKWARD,
                (self._reduced(group) // self._n for group in reduced if self._num_copies > 1),
            ),
            _collective("broadcast", UPDATE, [sum(buffers)] if buffers else []),
        ]
        return tuple(each for each in collectives if each.calls)


def _collective(kind: str, when: str, sizes: Iterable[int]) -> Collective:
    each = list(sizes)
    return Collective(kind=kind, when=when, calls=len(each), num_bytes=sum(each))
