"""Figures of the ranks of a mesh, which has stages, copies and splits, from shapes alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.order import range_of_rank
from shoal.layouts.hybrid.layout import HybridPlan, buckets, plan_of_stage
from shoal.layouts.pipeline.schedules import StepInputs, num_microbatches
from shoal.layouts.pipeline.stages import Stage
from shoal.layouts.tensor.layer_group import TensorGroup
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
from shoal.planning.meta_device import on_meta, to_meta
from shoal.planning.rehearsal import RehearsalGroup, RehearsedPass
from shoal.planning.tensor import first_equal_rank, non_finite_message, split_alone, tensor_groups

LOSS_BYTES = torch.float64.itemsize
NO_INPUTS = "without inputs, messages between ranks in forward and backward are not counted"
SHAPES = "the first step of each batch shape has one or two more forward passes, not counted"


@dataclass(frozen=True, kw_only=True)
class _Part:
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    """Parameters by name in the user's model, in the shapes that this rank holds."""
    cut: frozenset[int]
    stage: Stage | None
    """Stage of this part; None if the model is not cut into stages."""
    group: RehearsalGroup

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.parameters.items() if p.requires_grad}


class MeshFigures:
    """Computation of one plan. The traffic within a pass is computed only if inputs are given."""

    def __init__(
        self, subject: PlanInput, plan: HybridPlan, *, tells_faults_ahead: bool = False
    ) -> None:
        """`tells_faults_ahead`: True if ranks report non-finite gradients in their votes, unless
        stages share a parameter."""
        self._subject, self._plan = subject, plan
        self._tells_faults_ahead = tells_faults_ahead
        self._mesh = plan.mesh
        self._parts = {
            (stage, split): self._part(stage, split)
            for stage in range(self._mesh.pipeline)
            for split in range(self._mesh.tensor)
        }
        self._passes: dict[tuple[int, int], tuple[_Pass, ...]] = {}

    def plan(self, strategy: str, notes: tuple[str, ...] = ()) -> Plan:
        """Return the plan of these ranks, under the name of the strategy that arranges them."""
        if self._subject.inputs is None and self._mesh.pipeline * self._mesh.tensor > 1:
            notes += (NO_INPUTS,)
        if self._mesh.pipeline > 1:
            notes += (SHAPES,)
        return Plan(
            strategy=strategy,
            arrangement=str(self._mesh) if strategy == "hybrid" else "",
            groups=self._groups(),
            ranks=tuple(map(self._rank, range(self._mesh.world_size))),
            notes=notes,
        )

    def _part(self, index: int, split: int) -> _Part:
        model = on_meta(self._subject.model)
        stage = Stage(model, *self._plan.cut, index) if self._plan.cut is not None else None
        group = RehearsalGroup(split, self._mesh.tensor)
        cut: frozenset[int] = frozenset()
        if self._mesh.tensor > 1:
            ranks = TensorGroup(group, torch.device("meta"))
            cut = split_alone(model, plan_of_stage(model, self._plan.tensor), ranks)
        parameters = dict(model.named_parameters()) if stage is None else stage.parameters
        return _Part(module=model, parameters=parameters, cut=cut, stage=stage, group=group)

    def _groups(self) -> tuple[GroupFigures, ...]:
        if self._plan.cut is None:
            return tensor_groups(self._plan.tensor)
        outline, stage_of = self._plan.cut
        groups = []
        for index in range(self._mesh.pipeline):
            pairs = zip(outline.segments, stage_of, strict=True)
            names = [segment.name for segment, stage in pairs if stage == index]
            own = [self._subject.parameters[n] for n in self._parts[index, 0].parameters]
            title = f"stage {index}: {names[0]}" + (f" to {names[-1]}" if names[1:] else "")
            groups.append(GroupFigures(title=title, num_parameters=len(own), num_bytes=_bytes(own)))
        return tuple(groups)

    # --- one rank ---

    def _rank(self, rank: int) -> RankFigures:
        stage, copy, split = self._mesh.coordinates(rank)
        part = self._parts[stage, split]
        held, gradients = _bytes(part.parameters.values()), _bytes(part.trained.values())
        shapes = {name: tuple(p.shape) for name, p in part.parameters.items()}
        collectives = [*self._passed(stage, copy, split), *self._update(part)]
        return RankFigures(
            parameters=held,
            parameters_peak=held,
            gradients=gradients,
            gradients_peak=gradients,
            optimizer=self._subject.state_bytes(shapes),
            collectives=tuple(each for each in collectives if each.calls),
        )

    def _passed(self, stage: int, copy: int, split: int) -> Iterable[Collective]:
        if self._subject.inputs is None:
            return
        whole = to_meta(self._subject.inputs)
        samples = StepInputs(inputs={"": whole})
        start, stop = range_of_rank(0, samples.num_samples, copy, self._mesh.data)
        # A rank without a share computes with one stand-in sample.
        num_samples = max(stop - start, 1)
        split = first_equal_rank(self._plan.tensor, split)
        key = split, num_samples
        if key not in self._passes:
            inputs = samples.samples(whole, 0, num_samples)
            self._passes[key] = tuple(self._through_stages(split, inputs, num_samples))
        passes = self._passes[key]
        before = passes[stage - 1].outputs if stage else ()
        outputs = passes[stage].outputs if stage + 1 < len(passes) else ()
        count = passes[stage].count
        yield _messages("recv", FORWARD, before, count)
        yield _messages("send", FORWARD, outputs, count)
        yield _messages("recv", BACKWARD, [t for t in outputs if t.requires_grad], count)
        yield _messages("send", BACKWARD, [t for t in before if t.requires_grad], count)
        yield from passes[stage].moved

    def _through_stages(self, split: int, inputs: Any, num_samples: int) -> Iterable["_Pass"]:
        if self._plan.cut is None:
            part = self._parts[0, split]
            done = RehearsedPass(part.group, lambda: part.module(inputs))
            yield _Pass(count=1, outputs=(), moved=done.collectives())
            return
        first = self._parts[0, split].stage
        assert first is not None, "the model is cut"
        step_inputs = StepInputs(inputs=first.bind((inputs,), {}))
        count = num_microbatches(num_samples, self._plan.schedule.microbatches)
        micro_batch = step_inputs.samples(dict(step_inputs.inputs), 0, num_samples // count)
        passed: Sequence[Tensor] = ()
        for index in range(self._mesh.pipeline):
            part = self._parts[index, split]
            stage = part.stage
            assert stage is not None, "the model is cut"
            entering = [t.detach().requires_grad_(t.requires_grad) for t in passed]
            done = RehearsedPass(part.group, lambda s=stage, e=entering: s.run(micro_batch, e))  # type: ignore[misc]
            passed = done.outputs if index + 1 < self._mesh.pipeline else ()
            yield _Pass(count=count, outputs=tuple(passed), moved=done.collectives(count))

    def _has_reported_faults(self, part: _Part) -> bool:
        holders = part.stage.holders.values() if part.stage is not None else ()
        return self._tells_faults_ahead and all(len(stages) == 1 for stages in holders)

    def _update(self, part: _Part) -> Iterable[Collective]:
        if part.stage is not None:
            yield Collective(kind="broadcast", when=UPDATE, calls=1, num_bytes=LOSS_BYTES)
            # Each message has a further element: a flag that there is a gradient.
            shared = [
                (p.numel() + 1) * p.element_size()
                for name, p in part.trained.items()
                for _ in part.stage.holders[name][1:]
            ]
            for kind in ("send", "recv"):
                yield Collective(kind=kind, when=UPDATE, calls=len(shared), num_bytes=sum(shared))
        if self._mesh.data > 1:
            averaged = [
                _bytes(bucket) + len(bucket) * bucket[0].element_size()
                for bucket in buckets(list(part.trained.values()))
            ]
            yield _collective("all_reduce", averaged)
        if self._mesh.world_size > 1 and not self._has_reported_faults(part):
            yield non_finite_message(self._mesh.world_size)
        if self._mesh.tensor > 1:
            whole = [p for p in part.trained.values() if id(p) not in part.cut]
            yield _collective("broadcast", list(map(_bytes, buckets(whole))))
        kept = _bytes(persistent_buffers(part.module).values())
        if self._mesh.data > 1 and kept:
            yield _collective("broadcast", [kept])


@dataclass(frozen=True, kw_only=True)
class _Pass:
    count: int
    outputs: tuple[Tensor, ...]
    moved: tuple[Collective, ...]
    """Collectives among the ranks over which the stage is split, of all micro-batches."""


def _messages(kind: str, when: str, tensors: Sequence[Tensor], count: int) -> Collective:
    return Collective(
        kind=kind, when=when, calls=count * len(tensors), num_bytes=count * _bytes(tensors)
    )


def _collective(kind: str, sizes: Sequence[int]) -> Collective:
    return Collective(kind=kind, when=UPDATE, calls=len(sizes), num_bytes=sum(sizes))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
