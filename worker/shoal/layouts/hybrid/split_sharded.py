"""FSDP and tensor parallelism: layers are split over a few ranks, and each part is cut by rows.

Consecutive ranks are a tensor group, which works on the same samples. Ranks with the same index in
their groups shard a part by rows.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shoal.backends.abortable.communicators import add_subgroups
from shoal.layouts.base import World
from shoal.layouts.hybrid.layout import buckets
from shoal.layouts.non_finite_check import NonFiniteCheck
from shoal.layouts.pass_gradients import PassGradients
from shoal.layouts.sharded.layout import ShardedLayout, ShardedOptions
from shoal.layouts.sharded.nan_propagating_reduce_scatter import own_fault
from shoal.layouts.tensor.layer_group import TensorGroup
from shoal.layouts.tensor.layout import parallelise
from shoal.layouts.tensor.plan import TensorPlan
from shoal.layouts.tensor.sequence import (
    spread_positions,
    summands_of,
    summed_parameters,
)
from shoal.model.local_parts import local_part
from shoal.state.shards import Chunk
from shoal.torch_private.dtensor import forget_groups
from shoal.torch_private.fsdp import mesh_of_rows


class SplitShardedLayout(ShardedLayout):
    """Layout in which a rank holds some rows of its part of each parameter. An unsplit parameter
    has the same rows on a whole tensor group."""

    non_finite_check: NonFiniteCheck

    def __init__(
        self, model: nn.Module, world: World, options: ShardedOptions, plan: TensorPlan
    ) -> None:
        self.plan = plan
        self._row, self._column = divmod(world.rank, plan.degree)
        self._chunks_of: dict[str, Chunk] = {}
        self._split: frozenset[str] = frozenset()
        super().__init__(model, world, options)
        self.data_index, self.data_count = self._row, world.world_size // plan.degree
        self.non_finite_check = NonFiniteCheck(
            world.group, world.device, partial(own_fault, self._reductions.values())
        )
        self._gradients = PassGradients(map(self._parameters.__getitem__, self._summed))

    def _rows_and_copies(self, options: ShardedOptions) -> DeviceMesh:
        world, degree = self.world, self.plan.degree
        self._copy, self._num_copies = 0, 1
        names = (world.axis("data"), world.axis("tensor"))
        sizes = (world.world_size // degree, degree)
        mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=names)
        self._groups.update(zip(("rows", "tensor"), map(mesh.get_group, names), strict=True))
        add_subgroups(self._groups.values(), world.group, world.device)
        self._tensor_mesh = mesh[names[1]]
        return mesh[names[0]]

    def groups(self) -> Iterator[dist.ProcessGroup]:
        return (group for group in self._groups.values() if group is not self.world.group)

    def _shard(self, model: nn.Module, options: ShardedOptions) -> None:
        group, exchanges = self._groups["tensor"], self.world.exchanges
        exchanges.set_peers(dist.get_process_group_ranks(group))
        self._ranks = TensorGroup(group, self.world.device, exchanges)
        parallelise(model, self._tensor_mesh, self.plan, self._ranks)
        self._summed = summed_parameters(model, self.plan.sequence)
        spread_positions(model, self.plan.sequence, self._ranks)
        parameters = dict(model.named_parameters())
        self._split = frozenset(n for n, p in parameters.items() if isinstance(p, DTensor))
        self._chunks_of = {name: self._chunk_of(each) for name, each in parameters.items()}
        super()._shard(model, options)

    def _chunk_of(self, parameter: nn.Parameter) -> Chunk:
        offsets, sizes = [0] * parameter.ndim, list(parameter.shape)
        if isinstance(parameter, DTensor):
            (placement,) = parameter.placements
            assert isinstance(placement, Shard), "a split parameter is cut along one dimension"
            _narrow(offsets, sizes, placement.dim, self._column, self.plan.degree)
        _narrow(offsets, sizes, 0, self._row, self.world.world_size // self.plan.degree)
        return Chunk(offsets=tuple(offsets), sizes=tuple(sizes))

    def chunk(self, name: str, tensor: Tensor) -> Chunk:
        is_cut = isinstance(tensor, DTensor)
        return self._chunks_of[name] if is_cut else super().chunk(name, tensor)

    def is_counted_here(self, name: str) -> bool:
        if name in self._parameters and name not in self._split:
            return self._column == 0
        return super().is_counted_here(name)

    def failure_domains(self, hosts: Sequence[str]) -> Sequence[str]:
        """Return the hosts or, on one host, the tensor groups: a group's ranks leave together if a
        gradient is not finite."""
        if len(set(hosts)) > 1:
            return hosts
        return [str(rank // self.plan.degree) for rank in range(self.world.world_size)]

    # --- a step ---

    def begin(self) -> None:
        self._ranks.begin()
        super().begin()
        self.non_finite_check.begin()
        self._gradients.begin()

    def forget_gradients(self) -> None:
        self._gradients.begin()

    def note_loss(self, loss: Tensor) -> None:
        self.non_finite_check.losses.note(loss)

    def backward(self, loss: Tensor, weight: float) -> None:
        completes = self.completes and bool(self._summed)
        with self._gradients.of_pass(self._complete, completes=completes):
            super().backward(loss, weight)

    @torch.no_grad()
    def _complete(self) -> None:
        """Sum, over a tensor group, the gradients that each rank has for its positions of the
        sequence only."""
        self.world.exchanges.note_missing_gradients()
        if self.plan.degree > 1:
            self._ranks.sum_packed(summands_of(self._parameters, self._summed))

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce as `ShardedLayout` does, and broadcast gradients of unsplit parameters: see
        `broadcast_gradients` in `hybrid/layout.py`."""
        super().reduce()
        self._gradients.finish(self._complete)
        if self.plan.degree == 1:
            return
        whole = [
            parameter
            for name, parameter in self._parameters.items()
            if name not in self._split and parameter.grad is not None
        ]
        for bucket in buckets(whole):
            self._ranks.broadcast([local_part(p.grad) for p in bucket if p.grad is not None])

    def check(self) -> None:
        """Check by `NonFiniteCheck`: a fault may be visible in one tensor group only."""
        self.non_finite_check.check(self._parameters, self.step)

    @property
    def num_moved(self) -> int:
        return self._ranks.num_barriers

    def cut(self, reason: str) -> None:
        self._ranks.cut(reason)
        super().cut(reason)

    def release(self) -> None:
        meshes = [mesh_of_rows(part) for part in self.fsdp_parameters]
        self._ranks.release()
        super().release()
        for mesh in (self._tensor_mesh, *meshes):
            forget_groups(mesh)


def _narrow(offsets: list[int], sizes: list[int], dim: int, part: int, num_parts: int) -> None:
    """Narrow to one of `num_parts` parts, cut as by torch.chunk."""
    chunk = -(-sizes[dim] // num_parts)
    start = min(sizes[dim], part * chunk)
    offsets[dim] += start
    sizes[dim] = min(chunk, sizes[dim] - start)


def tensor_degree(world_size: int, tensor: int) -> int:
    """Return the largest divisor of `world_size` up to `tensor`."""
    return next(n for n in range(min(tensor, world_size), 0, -1) if world_size % n == 0)
