"""Tensor-parallel layout: modules are split over the ranks, which work on the same samples."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from shoal.layouts.base import Layout, World, materialise
from shoal.layouts.non_finite_check import NonFiniteCheck
from shoal.layouts.pass_gradients import PassGradients
from shoal.layouts.tensor.attention import SplitAttention
from shoal.layouts.tensor.layer_group import LayerGroup, TensorGroup
from shoal.layouts.tensor.parts import (
    ColumnEmbedding,
    ColumnLinear,
    Cut,
    CutDropout,
    RowLinear,
    VocabEmbedding,
)
from shoal.layouts.tensor.plan import COLUMN, HEADS, MASK, ROW, VOCAB, WHOLE, PlanEntry, TensorPlan
from shoal.layouts.tensor.sequence import (
    spread_positions,
    summands_of,
    summed_parameters,
)
from shoal.layouts.tensor.styles import CUT_DIMS
from shoal.state.shards import MODEL, OPTIM
from shoal.torch_private.modules import parameter_table

_Known = dict[int, nn.Parameter]


def parallelise(module: nn.Module, mesh: DeviceMesh, plan: TensorPlan, ranks: TensorGroup) -> None:
    """Split the module in place by a plan, over a mesh of one dimension, without communication.
    `ranks`: the mesh's ranks.

    Parameters may be on the meta device; real ones must be the same on all ranks. Split ones become
    DTensors. If all ranks have the same inputs, each gets the whole outputs, and the gradients of
    its own parameters.
    """
    assert mesh.size() == plan.degree, "the plan is for the mesh"
    known: _Known = {}
    for entry in plan.entries:
        if entry.style != WHOLE:
            style = _Split(entry, known, ranks)
            parallelize_module(module.get_submodule(entry.module), mesh, style)
    # In evaluation, torch's encoder has kernels that need whole weights; these flags disable them.
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoderLayer) and _is_split(part):
            part.activation_relu_or_gelu = 0
        elif isinstance(part, nn.TransformerEncoder) and _is_split(part):
            part.use_nested_tensor = False


def _set_groups(ranks: TensorGroup, module: nn.Module) -> None:
    for name, part in module.named_modules():
        for key, value in list(vars(part).items()):
            if isinstance(value, Cut):
                part.__dict__[key] = replace(value, group=ranks.of_layer(name))


def _is_split(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


class _Split(ParallelStyle):
    def __init__(self, entry: PlanEntry, known: _Known, ranks: TensorGroup) -> None:
        super().__init__()
        self._entry = entry
        self._known = known
        self._ranks = ranks

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for key, dim in make_partial(module, self._entry, self._ranks).items():
            self._cut(module, key, dim, device_mesh)
        return module

    def _cut(self, module: nn.Module, path: str, dim: int, mesh: DeviceMesh) -> None:
        parent, _, key = path.rpartition(".")
        owner = module.get_submodule(parent)
        whole = parameter_table(owner)[key]
        if whole is None:
            return
        if id(whole) not in self._known:
            cut = distribute_tensor(whole.detach(), mesh, [Shard(dim)], src_data_rank=None)
            self._known[id(whole)] = nn.Parameter(cut, requires_grad=whole.requires_grad)
        parameter_table(owner)[key] = self._known[id(whole)]


def make_partial(module: nn.Module, entry: PlanEntry, ranks: TensorGroup) -> Mapping[str, int]:
    """Make the module compute this rank's part. Returns the dimension along which each parameter,
    still whole, is to be cut, by name."""
    base = nn.Dropout if isinstance(module, nn.Dropout) else type(module)
    kind = base, entry.style
    _APPLY[kind](module, ranks.of_layer(entry.module), entry)
    return CUT_DIMS[kind]


def _column(module: Any, group: LayerGroup, entry: PlanEntry) -> None:
    module.__class__ = ColumnLinear
    module.cut = Cut.of(module.out_features, group)
    module.gathers = not entry.paired


def _row(module: Any, group: LayerGroup, entry: PlanEntry) -> None:
    module.__class__ = RowLinear
    module.cut = Cut.of(module.in_features, group)
    module.takes_part = entry.paired


def _vocab(module: Any, group: LayerGroup, entry: PlanEntry) -> None:
    module.__class__ = VocabEmbedding
    module.cut = Cut.of(module.num_embeddings, group)


def _embedding_column(module: Any, group: LayerGroup, entry: PlanEntry) -> None:
    module.__class__ = ColumnEmbedding
    module.cut = Cut.of(module.embedding_dim, group)


def _heads(module: Any, group: LayerGroup, entry: PlanEntry) -> None:
    module.__class__ = SplitAttention
    module.rows = Cut.of(3 * module.embed_dim, group)
    module.heads = Cut.of(module.num_heads, group)
    module.columns = Cut.of(module.embed_dim, group)


def _mask(module: Any, group: LayerGroup, entry: PlanEntry) -> None:
    module.__class__ = CutDropout
    module.cut = Cut.of(entry.width, group)


_APPLY: Mapping[tuple[type[nn.Module], str], Callable[[Any, LayerGroup, PlanEntry], None]] = {
    (nn.Linear, COLUMN): _column,
    (nn.Linear, ROW): _row,
    (nn.Embedding, VOCAB): _vocab,
    (nn.Embedding, COLUMN): _embedding_column,
    (nn.MultiheadAttention, HEADS): _heads,
    (nn.Dropout, MASK): _mask,
}


@runtime_checkable
class SelfSplittingModule(Protocol):
    """A module that splits itself: no plan can be derived for it."""

    def split_over(self, mesh: DeviceMesh) -> None:
        """Replace split parameters by DTensors, and make the module compute with this rank's parts.
        Called in each generation, on a copy on the meta device."""


class TensorLayout(Layout):
    """Layout of all ranks as one tensor-parallel group."""

    elementwise = True
    non_finite_check: NonFiniteCheck

    def __init__(self, module: nn.Module, world: World, plan: TensorPlan) -> None:
        self.world = world
        self.module = module
        self.plan = plan
        mesh = DeviceMesh.from_group(
            world.group, world.device.type, mesh_dim_names=(world.axis("tensor"),)
        )
        world.exchanges.set_peers(range(world.world_size))
        self._ranks = TensorGroup(world.group, world.device, world.exchanges)
        parallelise(module, mesh, plan, self._ranks)
        # Gradients of these parameters cover this rank's positions of the sequence only.
        self._summed = summed_parameters(module, plan.sequence)
        spread_positions(module, plan.sequence, self._ranks)
        if isinstance(module, SelfSplittingModule):
            module.split_over(mesh)
            _set_groups(self._ranks, module)
        materialise(module, world.device)
        self._parameters = dict(module.named_parameters())
        world.exchanges.add_whole_parameters(self._parameters)
        self.non_finite_check = NonFiniteCheck(world.group, world.device)
        self.faults_are_own = not self._summed
        self._gradients = PassGradients(map(self._parameters.__getitem__, self._summed))

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self._parameters

    def is_counted_here(self, name: str) -> bool:
        return isinstance(self._parameters.get(name), DTensor) or self.world.rank == 0

    def is_lost_with_rank(self, name: str) -> bool:
        if name.startswith(MODEL):
            return isinstance(self._parameters.get(name.removeprefix(MODEL)), DTensor)
        owner, _, _ = name.removeprefix(OPTIM).rpartition("/")
        return isinstance(self._parameters.get(owner), DTensor)

    def begin(self) -> None:
        self._ranks.begin()
        self.non_finite_check.begin()
        self._gradients.begin()

    def forget_gradients(self) -> None:
        self._gradients.begin()

    def backward(self, loss: Tensor, weight: float) -> None:
        completes = self.completes and bool(self._summed)
        with self._gradients.of_pass(self._complete, completes=completes):
            super().backward(loss, weight)

    def _complete(self) -> None:
        self.world.exchanges.note_missing_gradients()
        self.non_finite_check.check_after_pass(self._parameters)
        if self.world.world_size > 1:
            self._ranks.sum_packed(summands_of(self._parameters, self._summed))

    def reduce(self) -> None:
        """Broadcast the gradients of whole parameters from the first rank: else rounding would let
        the ranks' parameters drift apart."""
        self._gradients.finish(self._complete)
        if self.world.world_size == 1:
            return
        for gradients in self._whole_gradients():
            self._ranks.broadcast(gradients)

    @property
    def num_moved(self) -> int:
        return self._ranks.num_barriers

    def cut(self, reason: str) -> None:
        self._ranks.cut(reason)

    def release(self) -> None:
        self._ranks.release()

    def _whole_gradients(self) -> Iterator[list[Tensor]]:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self._parameters.values():
            gradient = parameter.grad
            if gradient is not None and not isinstance(gradient, DTensor):
                by_dtype.setdefault(gradient.dtype, []).append(gradient)
        yield from by_dtype.values()
