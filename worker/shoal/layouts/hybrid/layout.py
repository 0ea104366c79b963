"""Layout over a mesh of ranks: stages, copies and splits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shoal.backends.abortable.communicators import add_subgroups
from shoal.backends.abortable.waiter import all_reduce
from shoal.layouts.base import Layout, LossFunction, World, materialise
from shoal.layouts.buffers import broadcast_packed
from shoal.layouts.hybrid.mesh import MeshShape
from shoal.layouts.non_finite_check import NonFiniteCheck
from shoal.layouts.pass_gradients import PassGradients
from shoal.layouts.pipeline.layout import PipelineLayout, ScheduleSpec
from shoal.layouts.pipeline.outline import Outline
from shoal.layouts.tensor.layer_group import TensorGroup
from shoal.layouts.tensor.layout import parallelise
from shoal.layouts.tensor.plan import MASK, TensorPlan
from shoal.model.local_parts import local_part, placed_like
from shoal.model.tied_tensors import persistent_buffers
from shoal.torch_private.dtensor import forget_groups

BUCKET_BYTES = 25 * 1024 * 1024
"""Limit of a message with several gradients."""
AXES = ("pipeline", "data", "tensor")


@dataclass(frozen=True, kw_only=True)
class HybridPlan:
    """Plan of a model over a mesh."""

    mesh: MeshShape
    cut: tuple[Outline, Sequence[int]] | None
    """The traced forward pass, and the stage of each of its segments; None for one stage."""
    tensor: TensorPlan
    schedule: ScheduleSpec


class HybridLayout(Layout):
    """Layout of one stage on a rank: split over its tensor group, with copies on other ranks.

    With one stage the script calls the model; with more, `forward_backward` runs the stages.
    """

    def __init__(self, model: nn.Module, world: World, plan: HybridPlan) -> None:
        self.world = world
        self.plan = plan
        self._mesh = mesh = init_device_mesh(
            world.device.type, plan.mesh.sizes, mesh_dim_names=AXES
        )
        self._groups = {axis: mesh.get_group(axis) for axis in AXES}
        add_subgroups(self._groups.values(), world.group, world.device)
        self._at = dict(zip(AXES, mesh.get_coordinate() or (), strict=True))
        self.data_index, self.data_count = self._at["data"], plan.mesh.data
        self.elementwise = plan.mesh.tensor > 1
        self._inner: _OneStage | PipelineLayout
        world.exchanges.set_peers(dist.get_process_group_ranks(self._groups["tensor"]))
        self._ranks = TensorGroup(self._groups["tensor"], world.device, world.exchanges)
        split = _splitter(mesh["tensor"], plan.tensor, self._ranks)
        if plan.cut is None:
            self._inner = _OneStage(model, world, split)
        else:
            self._inner = PipelineLayout(
                model, world, plan.cut, plan.schedule, group=self._groups["pipeline"], prepare=split
            )
        self.module = self._inner.module
        self.shares_loss = self._inner.shares_loss
        if plan.mesh.tensor > 1:
            world.exchanges.add_whole_parameters(self._inner.parameters)
        self.non_finite_check = self._inner.non_finite_check
        self._gradients = PassGradients(self.parameters.values())

    @property
    def plain(self) -> nn.Module:
        return self._inner.plain

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self._inner.parameters

    @property
    def held(self) -> Mapping[str, Tensor]:
        return self._inner.held

    def is_counted_here(self, name: str) -> bool:
        if self._at["data"] or not self._inner.is_counted_here(name):
            return False
        return isinstance(self.parameters.get(name), DTensor) or not self._at["tensor"]

    def replicas(self, name: str) -> Sequence[int]:
        is_cut = isinstance(self.parameters.get(name), DTensor)
        if name not in self.parameters or not self._inner.is_counted_here(name):
            return super().replicas(name)
        is_first = is_cut or not self._at["tensor"]
        return dist.get_process_group_ranks(self._groups["data"]) if is_first else ()

    def is_lost_with_rank(self, name: str) -> bool:
        return self.data_count == 1

    def watch(self, ours: Callable[[], bool]) -> None:
        self._inner.watch(ours)

    def begin(self) -> None:
        self._ranks.begin()
        self._inner.begin()
        self._gradients.begin()

    def forget_gradients(self) -> None:
        self._inner.forget_gradients()
        self._gradients.begin()

    def reduce_in_backward(self, reduces: bool) -> None:
        super().reduce_in_backward(reduces)
        self._inner.reduce_in_backward(reduces)

    def backward(self, loss: Tensor, weight: float) -> None:
        with self._gradients.of_pass(self._complete, completes=self.completes):
            self._inner.backward(loss, weight)

    def forward_backward(
        self, inputs: object, targets: object, loss_function: LossFunction, weight: float
    ) -> Tensor:
        with self._gradients.of_pass(self._complete, completes=self.completes):
            return self._inner.forward_backward(inputs, targets, loss_function, weight)

    @torch.no_grad()
    def _complete(self) -> None:
        self.world.exchanges.note_missing_gradients()
        self._inner.reduce()
        if self.plan.mesh.data > 1:
            average_gradients(list(self.parameters.values()), self._groups["data"])

    @torch.no_grad()
    def reduce(self) -> None:
        """Complete gradients that no pass has completed, and make those of unsplit parameters equal
        within a tensor group."""
        self._gradients.finish(self._complete)
        if self.plan.mesh.tensor > 1:
            broadcast_gradients(list(self.parameters.values()), self._ranks)

    @torch.no_grad()
    def share_buffers(self) -> None:
        buffers = list(persistent_buffers(self.plain).values())
        if buffers and self.plan.mesh.data > 1:
            broadcast_packed(buffers, self._groups["data"])

    def synchronised(self) -> bool:
        return self._inner.synchronised()

    @property
    def num_moved(self) -> int:
        return self._inner.num_moved + self._ranks.num_barriers

    def cut(self, reason: str) -> None:
        self._ranks.cut(reason)
        self._inner.cut(reason)

    def release(self) -> None:
        self._ranks.release()
        self._inner.release()
        self._groups.clear()
        forget_groups(self._mesh)

    def groups(self) -> Iterator[dist.ProcessGroup]:
        return (group for group in self._groups.values() if group is not self.world.group)


class _OneStage(Layout):
    non_finite_check: NonFiniteCheck

    def __init__(
        self, model: nn.Module, world: World, prepare: Callable[[nn.Module], None]
    ) -> None:
        self.world = world
        self.module = model
        prepare(model)
        materialise(model, world.device)
        self._parameters = dict(model.named_parameters())
        self.non_finite_check = NonFiniteCheck(world.group, world.device)

    def begin(self) -> None:
        self.non_finite_check.begin()

    def reduce(self) -> None:
        self.non_finite_check.check_after_pass(self._parameters)

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self._parameters

    def is_counted_here(self, name: str) -> bool:
        return True


def _splitter(
    mesh: DeviceMesh, plan: TensorPlan, ranks: TensorGroup
) -> Callable[[nn.Module], None]:
    def split(stage: nn.Module) -> None:
        parallelise(stage, mesh, plan_of_stage(stage, plan), ranks)

    return split


def plan_of_stage(stage: nn.Module, plan: TensorPlan) -> TensorPlan:
    """Return the plan's entries for this stage's modules."""
    own = dict(stage.named_modules())
    # A stage may run a module whose parameters another stage holds.
    kept = [
        entry
        for entry in plan.entries
        if entry.module in own
        and (entry.style == MASK or next(own[entry.module].parameters(), None) is not None)
    ]
    return replace(plan, entries=tuple(kept))


def average_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average each gradient over the group. A gradient stays None only if no rank has it."""
    for bucket in buckets([p for p in parameters if p.requires_grad]):
        locals_ = [_local_gradient(parameter) for parameter in bucket]
        has_one = torch.tensor([parameter.grad is not None for parameter in bucket])
        flags = has_one.to(locals_[0])
        packed = torch.cat([*(gradient.reshape(-1) for gradient in locals_), flags])
        all_reduce(packed, group)
        sizes = [gradient.numel() for gradient in locals_]
        *means, counts = torch.split(packed, [*sizes, len(bucket)])
        for parameter, gradient, mean, count in zip(
            bucket, locals_, means, counts.tolist(), strict=True
        ):
            if count:
                gradient.copy_(mean.view_as(gradient).div_(group.size()))
                _set_gradient(parameter, gradient)


def broadcast_gradients(parameters: Sequence[nn.Parameter], ranks: TensorGroup) -> None:
    """Broadcast the gradients of unsplit parameters from a tensor group's first rank.

    Kernels that add in no fixed order would let the ranks' parameters drift apart.
    """
    whole = [p for p in parameters if p.grad is not None and not isinstance(p, DTensor)]
    for bucket in buckets(whole):
        ranks.broadcast([_local_gradient(parameter) for parameter in bucket])


def buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each message, in order: of one dtype, and at most `BUCKET_BYTES`
    unless there is one parameter."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for same in by_dtype.values():
        bucket: list[nn.Parameter] = []
        num_bytes = 0
        for parameter in same:
            size = local_part(parameter).nbytes
            if bucket and num_bytes + size > BUCKET_BYTES:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append(parameter)
            num_bytes += size
        yield bucket


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part, writable; zeros if there is none."""
    if parameter.grad is None:
        return torch.zeros_like(local_part(parameter))
    return local_part(parameter.grad)


def _set_gradient(parameter: nn.Parameter, local: Tensor) -> None:
    if parameter.grad is not None:
        return
    parameter.grad = placed_like(parameter, local)
