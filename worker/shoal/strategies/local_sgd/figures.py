"""Planned memory and traffic of the local-SGD strategies."""

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.planning.figures import UPDATE, Collective, GroupFigures, Plan, PlanInput, RankFigures
from shoal.strategies.local_sgd.outer_loop import buckets, has_mean, summing_dtype


class OuterLoopFigures:
    """Computation of one plan. Only the end of a round has traffic."""

    def __init__(self, subject: PlanInput, every_steps: int, *, keeps_velocity: bool) -> None:
        self._subject, self._every_steps = subject, every_steps
        self._keeps_velocity = keeps_velocity
        self._buffers = dict(subject.model.named_buffers())

    def plan(self, strategy: str, notes: tuple[str, ...] = ()) -> Plan:
        """Return the plan; all ranks are alike."""
        groups = [*_packed(self._stepped()), *_packed(self._means())]
        return Plan(
            strategy=strategy,
            groups=tuple(
                GroupFigures(
                    title=names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}",
                    num_parameters=len(names),
                    num_bytes=sum(tensor.nbytes for tensor in tensors),
                )
                for names, tensors, _ in groups
            ),
            ranks=(self._rank(),) * self._subject.world_size,
            notes=notes,
        )

    def _stepped(self) -> dict[str, Tensor]:
        optimizer, parameters = self._subject.optimizer, self._subject.parameters
        if optimizer is None:
            return {name: p for name, p in parameters.items() if p.requires_grad}
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        return {name: p for name, p in parameters.items() if p in own}

    def _means(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self._buffers.items() if has_mean(buffer)}

    def _rank(self) -> RankFigures:
        parameters = self._subject.parameters
        held = sum(p.nbytes for p in parameters.values())
        gradients = sum(p.nbytes for p in parameters.values() if p.requires_grad)
        optimizer = self._subject.state_bytes({n: tuple(p.shape) for n, p in parameters.items()})
        velocity = sum(num_bytes for _, _, num_bytes in _packed(self._stepped()))
        buffers = sum(buffer.nbytes for buffer in self._buffers.values())
        return RankFigures(
            parameters=held,
            parameters_peak=held,
            gradients=gradients,
            gradients_peak=gradients,
            optimizer=optimizer,
            kept=held + buffers + optimizer + (velocity if self._keeps_velocity else 0),
            collectives=self._collectives() if self._subject.world_size > 1 else (),
        )

    def _collectives(self) -> tuple[Collective, ...]:
        averaged = [b for kind in (self._stepped(), self._means()) for _, _, b in _packed(kind)]
        counters = [b.nbytes for b in self._buffers.values() if not has_mean(b)]
        sizes_by_kind = (("all_reduce", averaged), ("broadcast", counters))
        return tuple(
            Collective(
                kind=kind,
                when=UPDATE,
                calls=len(sizes),
                num_bytes=sum(sizes),
                every_steps=self._every_steps,
            )
            for kind, sizes in sizes_by_kind
            if sizes
        )


def _packed(tensors: Mapping[str, Tensor]) -> list[tuple[list[str], list[Tensor], int]]:
    messages = []
    for names in buckets(tensors):
        own = [tensors[name] for name in names]
        num_bytes = sum(_elements(tensor) * summing_dtype(tensor).itemsize for tensor in own)
        messages.append((names, own, num_bytes))
    return messages


def _elements(tensor: Tensor) -> int:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).numel()
