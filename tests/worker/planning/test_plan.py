"""A plan's memory and traffic are those measured and counted in real steps."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models.sharded_models import (
    PartlyFrozen,
    Tied,
    adamw,
    deep,
    normed,
    sgd,
    training_of,
    transformer,
)
from support.processes.worlds import LaidOutTraining, Training
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import shoal
from shoal.backends.in_memory.run import run_in_memory
from shoal.backends.process_group.collectives import Count, counts, reset_counts
from shoal.layouts.base import World
from shoal.layouts.replicated import ReplicatedLayout
from shoal.layouts.sharded.layout import ShardedLayout
from shoal.planning.figures import GroupFigures, Plan, fold
from shoal.strategies.base import Strategy
from shoal.strategies.layout.ddp import DDP
from shoal.strategies.layout.fsdp import FSDP, HSDP, Zero2, Zero3
from shoal.strategies.layout.zero1 import Zero1
from shoal.torch_private.fsdp import groups_of, state_of
from shoal_proto.errors import InvalidSpec, UnknownStrategy, UnsupportedOptimizer

SMALL_BUCKETS_MB = 0.0003
STRATEGIES: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "ddp": (DDP, {"bucket_mb": SMALL_BUCKETS_MB}),
    "ddp, unused": (DDP, {"bucket_mb": SMALL_BUCKETS_MB, "find_unused_parameters": True}),
    "zero1": (Zero1, {"bucket_mb": SMALL_BUCKETS_MB}),
    "zero2": (Zero2, {"min_group_bytes": 200}),
    "fsdp": (FSDP, {"min_group_bytes": 200}),
    "fsdp, alone": (FSDP, {"min_group_bytes": 0}),
    "zero3, bf16": (Zero3, {"min_group_bytes": 200, "param_dtype": "bf16"}),
}


@dataclass(frozen=True)
class Measured:
    """Measurements of one rank, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    parameters_peak: int
    gradients_peak: int
    counted: dict[str, Count]


def memory(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of the tensors, each counted once."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


class Watch:
    """Measures gathered parameters while layers compute, and gradients while they are reduced."""

    def __init__(self, layout: ShardedLayout) -> None:
        self._layout = layout
        self.gathered_peak = self.gradients_peak = 0
        for module in layout.module.modules():
            module.register_forward_hook(lambda *_: self._look_at_parameters())
        for part in layout.fsdp_parameters:
            if part.sharded_param.requires_grad:
                part._unsharded_param.register_post_accumulate_grad_hook(
                    lambda _: self._look_at_parameters()
                )
        for module in layout.module.modules():
            if isinstance(module, FSDPModule):
                for group in groups_of(state_of(module)):
                    module.set_custom_reduce_scatter(Watched(group._reduce_scatter_comm, self))

    def _look_at_parameters(self) -> None:
        outputs = [t for part in self._layout.fsdp_parameters for t in part.all_gather_outputs]
        self.gathered_peak = max(self.gathered_peak, memory(outputs))

    def look_at_gradients(self, *reduced: Tensor) -> None:
        held = [p.grad for p in self._layout.parameters.values() if p.grad is not None]
        self.gradients_peak = max(self.gradients_peak, memory([*held, *reduced]))


class Watched(ReduceScatter):
    """torch's own reduce-scatter, watched."""

    def __init__(self, inner: Any, watch: Watch) -> None:
        self._inner, self._watch = (inner._inner if isinstance(inner, Watched) else inner), watch

    def allocate(self, *args: Any, **settings: Any) -> Tensor:
        allocated: Tensor = self._inner.allocate(*args, **settings)
        return allocated

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **settings: Any) -> Any:
        self._watch.look_at_gradients(output_tensor, input_tensor)
        return self._inner(output_tensor=output_tensor, input_tensor=input_tensor, **settings)


class Gradients:
    """Bytes of the gradients' memory before a step's `reduce`, and the part of it that still exists
    when the optimizer steps, whether or not a parameter points to it."""

    def __init__(self, layout: Any) -> None:
        self.before = self.held = 0
        reduce = layout.reduce

        def look_and_reduce() -> None:
            gradients = (p.grad for p in layout.plain.parameters() if p.grad is not None)
            local = (g.to_local() if isinstance(g, DTensor) else g for g in gradients)
            storages = (gradient.untyped_storage() for gradient in local)
            # Weak references keep no gradient alive.
            sizes = {StorageWeakRef(each): each.nbytes() for each in storages}
            self.before = sum(sizes.values())
            reduce()
            self.held = sum(size for ref, size in sizes.items() if not ref.expired())

        layout.reduce = look_and_reduce


def lay_out(strategy: Any, model: nn.Module, world: World) -> Any:
    if isinstance(strategy, DDP):
        return ReplicatedLayout(
            model,
            world,
            bucket_mb=strategy.bucket_mb,
            find_unused_parameters=strategy.find_unused_parameters,
        )
    return strategy.lay_out(model, world)


def measure(training: Training, kind: type[Any], options: dict[str, Any]) -> Measured:
    """Measure the third step: torch has settled by then."""
    group = dist.group.WORLD
    assert group is not None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, world_size=world_size, device=torch.device("cpu"), group=group)
    strategy = kind(**options)
    trained = LaidOutTraining(training, lambda model, _: lay_out(strategy, model, world), world)
    layout = trained.layout
    trained.step(0)
    trained.step(1)
    watch = Watch(layout) if isinstance(layout, ShardedLayout) else None
    gradients = Gradients(layout)
    reset_counts()
    trained.step(2)
    state = [v for each in trained.binding.optimizer.state.values() for v in each.values()]
    parameters = memory(layout.plain.parameters())
    return Measured(
        parameters=parameters,
        gradients=gradients.held,
        optimizer=memory(state),
        parameters_peak=parameters + (watch.gathered_peak if watch else 0),
        gradients_peak=watch.gradients_peak if watch else gradients.before,
        counted={kind: count for kind, count in counts().items() if count.calls},
    )


def check(plan: Plan, measured: list[Measured]) -> None:
    for figures, rank in zip(plan.ranks, measured, strict=True):
        planned = Measured(
            parameters=figures.parameters,
            gradients=figures.gradients,
            optimizer=figures.optimizer,
            parameters_peak=figures.parameters_peak,
            gradients_peak=figures.gradients_peak,
            counted={each.kind: Count(*plan.moved(each.kind)) for each in figures.collectives},
        )
        assert planned == rank


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("model", "optimizer"), [(deep, adamw), (normed, sgd)])
def test_figures_are_those_of_real_steps(model: Any, optimizer: Any, strategy: str) -> None:
    kind, options = STRATEGIES[strategy]
    if model is normed and "param_dtype" in options:
        model = deep  # torch has no batch norm of bf16 with running means of fp32 on the CPU
    training = training_of(model, optimizer)
    built, own_optimizer = training.build()
    plan = shoal.plan(built, kind(**options), world_size=3, optimizer=own_optimizer)
    check(plan, run_in_memory(measure, 3, training, kind, options))


@pytest.mark.parametrize("model", [deep, pytest.param(normed, marks=pytest.mark.long)])
def test_figures_of_copies_that_are_cut_over_ranks(model: Any) -> None:
    training, options = training_of(model, adamw), {"min_group_bytes": 200, "shard": 2}
    built, optimizer = training.build()
    plan = shoal.plan(built, HSDP(**options), world_size=4, optimizer=optimizer)
    assert "2 x 2 (copies x ranks of a copy)" in str(plan)
    check(plan, run_in_memory(measure, 4, training, HSDP, options))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("model", [transformer, Tied, PartlyFrozen])
def test_figures_of_models_that_are_hard_to_cut(model: Any) -> None:
    training = training_of(model, adamw)
    built, optimizer = training.build()
    plan = shoal.plan(built, FSDP(min_group_bytes=200), world_size=2, optimizer=optimizer)
    check(plan, run_in_memory(measure, 2, training, FSDP, {"min_group_bytes": 200}))


class ManyLayers(nn.Sequential):
    """A model of a thousand small layers, large enough for 40 gathered groups."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(5, 5, bias=False) for _ in range(1000)))


def gathers_in_forward() -> int:
    group = dist.group.WORLD
    assert group is not None
    with torch.device("meta"):
        model = ManyLayers()
    world = World(rank=dist.get_rank(), world_size=2, device=torch.device("cpu"), group=group)
    layout = FSDP(min_group_bytes=2500).lay_out(model, world)
    reset_counts()
    layout.module(torch.ones(3, 5))
    return counts()["all_gather"].calls


@pytest.mark.long
def test_a_thousand_layers_are_gathered_at_most_fifty_times() -> None:
    """Groups have 25 layers. With the default size, so small a model would be one group."""
    with torch.device("meta"):
        planned = shoal.plan(ManyLayers(), FSDP(min_group_bytes=2500), world_size=2)
    counted = run_in_memory(gathers_in_forward, 2)
    assert counted == [len(planned.groups)] * 2
    assert 30 < counted[0] <= 50


def test_a_plan_is_a_table() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    table = str(shoal.plan(model, FSDP(min_group_bytes=0), world_size=3, optimizer=optimizer))
    lines = [" ".join(line.split()) for line in table.splitlines()]
    assert lines[0] == "fsdp on 3 ranks"
    assert "0 2 39.5 KiB" in lines
    # Rows: 34 of 100 and 4 of 10, so the last rank has fewer.
    assert "0-1 15 KiB 55.2 KiB 15 KiB 55.2 KiB 30 KiB 140 KiB" in lines
    assert "2 15 KiB 55.2 KiB 15 KiB 55.2 KiB 26.8 KiB 137 KiB" in lines
    assert "0-2 all_gather forward 2 45 KiB" in lines


def test_a_size_just_below_a_unit_is_given_in_that_unit() -> None:
    """Three digits would not do for 1000 KiB."""
    with torch.device("meta"):
        model = nn.Linear(256, 1000, bias=False)
    table = str(shoal.plan(model, FSDP(min_group_bytes=0), world_size=2))
    assert "(model) 1 0.977 MiB" in [" ".join(line.split()) for line in table.splitlines()]
    assert "e+" not in table


def titles_of(*groups: tuple[str, int]) -> list[str]:
    made = [GroupFigures(title=t, num_parameters=2, num_bytes=size) for t, size in groups]
    folded = fold(made)
    assert sum(group.num_bytes for group in folded) == sum(size for _, size in groups)
    return [group.title for group in folded]


def test_layers_that_repeat_are_one_row() -> None:
    """Three or more layers in a row are folded if their names differ in one number only."""
    blocks = [(f"h.{i}.{name}", size) for i in range(4) for name, size in (("fc", 8), ("out", 4))]
    assert titles_of(("wte", 9), *blocks, ("head", 9)) == ["wte", "h.0-3.fc", "h.0-3.out", "head"]
    assert titles_of(("h.0", 1), ("h.1", 1)) == ["h.0", "h.1"]
    assert titles_of(("h.0", 1), ("h.1", 2), ("h.2", 1)) == ["h.0", "h.1", "h.2"]
    assert titles_of(("stage 0: 0 to 1", 4), ("stage 1: 2 to 3", 4), ("stage 2: 4 to 5", 4)) == [
        "stage 0: 0 to 1",
        "stage 1: 2 to 3",
        "stage 2: 4 to 5",
    ]


def test_a_step_on_the_meta_device_leaves_the_optimizer_as_it_was() -> None:
    model = deep()
    optimizer = adamw(model.parameters())
    parameter = next(model.parameters())
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = {key: value.clone() for key, value in optimizer.state[parameter].items()}
    weights = parameter.detach().clone()
    shoal.plan(model, "zero2", world_size=2, optimizer=optimizer)
    assert all(torch.equal(optimizer.state[parameter][key], before[key]) for key in before)
    assert torch.equal(parameter, weights)
    assert len(optimizer.state) == 1


def test_settings_that_training_refuses_are_refused_in_planning() -> None:
    model = deep()
    with pytest.raises(UnsupportedOptimizer, match="Adafactor"):
        optimizer = torch.optim.Adafactor(model.parameters())
        shoal.plan(model, "fsdp", world_size=2, optimizer=optimizer)
    with pytest.raises(InvalidSpec, match="scale"):
        model.scale = nn.Parameter(torch.ones(()))
        shoal.plan(model, "zero3", world_size=2)
    with pytest.raises(InvalidSpec, match="world_size"):
        shoal.plan(model, "ddp", world_size=0)
    with pytest.raises(UnknownStrategy):
        shoal.plan(model, "magic", world_size=2)
    with pytest.raises(InvalidSpec, match="no plan"):
        shoal.plan(model, "async-sgd", world_size=2)
