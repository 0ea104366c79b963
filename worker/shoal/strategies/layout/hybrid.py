"""Pipeline, data and tensor parallel at once, over a mesh chosen by the world size."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from torch import nn
from torch.optim import Optimizer

from shoal.layouts.base import Layout, World
from shoal.layouts.hybrid.layout import HybridLayout, HybridPlan
from shoal.layouts.hybrid.mesh import FixedSizes, MeshShape, ModelFacts, divisors_of, mesh_for
from shoal.layouts.tensor.derivation import MIN_SPLIT_BYTES, derive
from shoal.model.elementwise_optimizers import (
    refuse_unless_elementwise,
    refuse_unless_per_parameter,
)
from shoal.planning.figures import Plan, PlanInput
from shoal.planning.mesh import MeshFigures
from shoal.strategies.layout.pipeline import StageSplit, schedule_spec
from shoal.strategies.layout.sharded import ShardedStrategy
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import as_index

log = structlog.get_logger(__name__)

STATE_FACTOR = 4
"""Bytes of parameters, gradients and two moments, as a multiple of parameter bytes."""


class Hybrid(ShardedStrategy):
    """Strategy "hybrid": stages of the model, each split and copied, on torch's DeviceMesh.

    `pipeline`, `data`, `tensor`: sizes of the mesh; by default chosen by the world size, see
    `shoal.layouts.hybrid.mesh.mesh_for`. `max_rank_bytes`: prefer meshes within this limit of a
    member's parameters, gradients and optimizer state, which are estimated as four times its
    parameters. `plan`, `min_split_bytes` and `elementwise_optimizer`: see `TensorParallel`; with
    tensor=1 the optimizer may also be one that needs a whole parameter at a time. The other
    options: see `Pipeline`.

    `session.forward_backward(batch, loss_function)` works on every mesh; with pipeline=1 a step may
    also call the model and `session.backward(loss)`.
    """

    name = "hybrid"
    compiles = False
    shares_samples = True

    def __init__(
        self,
        *,
        pipeline: int | None = None,
        data: int | None = None,
        tensor: int | None = None,
        max_rank_bytes: int | None = None,
        plan: Mapping[str, str] | None = None,
        min_split_bytes: int = MIN_SPLIT_BYTES,
        schedule: str = "1f1b",
        microbatches: int = 4,
        balance: str = "bytes",
        split_at: Sequence[str] | None = None,
        example: Any = None,
        elementwise_optimizer: bool = False,
        copies: int = 1,
        copy_every_steps: int | None = None,
    ) -> None:
        super().__init__(copies=copies, copy_every_steps=copy_every_steps)
        self._fixed = FixedSizes(
            pipeline=pipeline, data=data, tensor=tensor, max_rank_bytes=max_rank_bytes
        )
        min_split_bytes = as_index("min_split_bytes", min_split_bytes, least=0)
        self._overrides = dict(plan or {})
        self._min_split_bytes = min_split_bytes
        self._schedule = schedule_spec(schedule, microbatches)
        self._split = StageSplit(balance=balance, split_at=split_at, example=example)
        self._elementwise_optimizer = elementwise_optimizer

    def check(self, model: nn.Module, optimizer: Optimizer) -> None:
        vouched = self._elementwise_optimizer
        if self._fixed.tensor == 1:
            refuse_unless_per_parameter(self.name, optimizer, vouched=vouched)
        else:
            refuse_unless_elementwise(self.name, optimizer, vouched)

    def mesh(self, model: nn.Module, world_size: int) -> MeshShape:
        """Return the mesh for a world size. Raises InvalidSpec if there is none."""
        sizes = divisors_of(world_size)
        facts = ModelFacts(
            state_bytes=STATE_FACTOR * sum(p.nbytes for p in model.parameters()),
            pipeline_sizes=frozenset(size for size in sizes if self._cuts(model, size)),
            tensor_sizes=frozenset(size for size in sizes if self._splits(model, size)),
        )
        return mesh_for(world_size, facts, self._fixed)

    def try_lay_out(self, model: nn.Module, world_size: int) -> None:
        self.mesh(model, world_size)

    def _cuts(self, model: nn.Module, num_stages: int) -> bool:
        try:
            self._split.splitter.outline(model, num_stages)
        except InvalidSpec:
            return False
        return True

    def _splits(self, model: nn.Module, degree: int) -> bool:
        try:
            return derive(
                model, degree, self._overrides, min_split_bytes=self._min_split_bytes
            ).splits
        except InvalidSpec:
            return False

    def lay_out(self, model: nn.Module, world: World) -> Layout:
        mesh = self.mesh(model, world.world_size)
        plan = HybridPlan(
            mesh=mesh,
            cut=self._split.cut(model, world, mesh.pipeline) if mesh.pipeline > 1 else None,
            tensor=derive(
                model, mesh.tensor, self._overrides, min_split_bytes=self._min_split_bytes
            ),
            schedule=self._schedule,
        )
        log.info("mesh_chosen", pipeline=mesh.pipeline, data=mesh.data, tensor=mesh.tensor)
        return HybridLayout(model, world, plan)

    def figures(self, subject: PlanInput) -> Plan:
        """See `shoal.planning.figures.PlannableStrategy`."""
        if subject.optimizer is not None:
            self.check(subject.model, subject.optimizer)
        mesh = self.mesh(subject.model, subject.world_size)
        several = mesh.pipeline > 1
        plan = HybridPlan(
            mesh=mesh,
            cut=self._split.by_bytes(subject.model, mesh.pipeline) if several else None,
            tensor=derive(
                subject.model, mesh.tensor, self._overrides, min_split_bytes=self._min_split_bytes
            ),
            schedule=self._schedule,
        )
        notes = self._split.notes if several else ()
        return MeshFigures(subject, plan).plan(self.name, notes)

    def gradients_lack(self) -> str:
        return super().gradients_lack() or "gradients of the layers that this member has"

    def gathers_lack(self) -> str:
        layout = self._layout()
        stages = layout.plan.mesh.pipeline if isinstance(layout, HybridLayout) else 1
        if stages == 1:
            return ""
        return "stages, of which the last computes the loss of one micro-batch after another"

    def options(self) -> Mapping[str, str]:
        chosen = {
            "mesh": str(self._fixed),
            "max_rank_bytes": self._fixed.max_rank_bytes,
            "plan": self._overrides,
            "min_split_bytes": self._min_split_bytes,
            "schedule": self._schedule.schedule,
            "microbatches": self._schedule.microbatches,
            **self._split.options(),
        }
        return {"hybrid": json.dumps(chosen, sort_keys=True)}
