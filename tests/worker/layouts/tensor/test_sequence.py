"""Positions of a sequence spread over the ranks between split layers: results are those of one
process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.collectives.strategy_runs import (
    Run,
    StepOptions,
    by_a_rank,
    by_one_process,
    difference,
)
from support.members.elastic_schedule import Schedule, check_no_trace, elastic
from support.models import tensor_models
from support.processes.ranks import Ranks
from torch import Tensor, nn

import shoal
from shoal.backends.in_memory.run import run_in_memory
from shoal.data.batches import Loader
from shoal.data.order import Order
from shoal.layouts.base import World
from shoal.layouts.tensor.layout import TensorLayout
from shoal.layouts.tensor.plan import SequenceRole, TensorPlan
from shoal.layouts.tensor.sequence import Positions, summands_of
from shoal.randomness import at
from shoal.randomness.dropout import key_dropout
from shoal.strategies.base import Strategy
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec

WIDTH = tensor_models.WIDTH


def encoder(**options: object) -> nn.Module:
    """A model of torch's own layers, which take masks and have dropout."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 20, batch_first=True, dropout=0.0, **options)  # type: ignore[arg-type]
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Decoder(nn.Module):
    """A decoder layer; the sequence that it attends to is computed from its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 4, 20, batch_first=True, dropout=0.0)
        self.before = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs, self.before(inputs))
        return outputs


class PostNorm(nn.Module):
    """A model with norms after the sums, with dropout, and with two blocks in a row."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self._block(dropout) for _ in range(2)))

    def _block(self, dropout: float) -> nn.Module:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
                self.up, self.down = nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)
                self.drop, self.inner = nn.Dropout(dropout), nn.Dropout(dropout)
                self.first, self.second = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                x = self.first(x + self.attn(x, x, x, need_weights=False)[0])
                hidden = self.inner(torch.relu(self.up(x)))
                outputs: Tensor = self.second(x + self.drop(self.down(hidden)))
                return outputs

        return Block()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.blocks(inputs)
        return outputs


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": tensor_models.tied_gpt,
    "encoder": encoder,
    "norm first": partial(encoder, norm_first=True),
    "decoder": Decoder,
    "post norm": PostNorm,
}


def fill(model: nn.Module, seed: int) -> nn.Module:
    """Fill the model from a generator of its own: ranks are threads, which share torch's
    generator."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def build(name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fill(MODELS[name](), seed)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loader(name: str) -> Loader:
    order = Order(num_samples=24, global_batch_size=7, num_epochs=20)
    return Loader(tensor_models.tokens() if name == "gpt" else tensor_models.sequences(), order)


def run_of(name: str) -> Run:
    return Run(
        build=partial(build, name),
        loader=partial(loader, name),
        loss=tensor_models.next_token if name == "gpt" else tensor_models.squared,
        num_steps=12,
        step_options=StepOptions(max_norm=0.5, passes=(1, 2)),
    )


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "tensor": partial(shoal.TensorParallel, min_split_bytes=0, sequence=True, copies=0),
    "fsdp-tensor": partial(
        shoal.FSDPTensor,
        tensor=2,
        min_split_bytes=0,
        min_group_bytes=200,
        sequence=True,
        copies=0,
    ),
}


# Five positions over 4 ranks are 2, 2, 1 and none.
@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("world", [("tensor", 2), ("tensor", 4), ("fsdp-tensor", 4)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_one_process(name: str, world: tuple[str, int]) -> None:
    strategy, world_size = world
    expected = by_one_process(run_of(name))
    for ours in run_in_memory(by_a_rank, world_size, run_of(name), STRATEGIES[strategy]):
        assert difference(ours, expected) < 1e-5


def _plan(model: nn.Module, degree: int = 2) -> TensorPlan:
    return shoal.TensorParallel(min_split_bytes=0, sequence=True).plan(model, degree)


def test_blocks_are_found_and_shown() -> None:
    plan = _plan(tensor_models.gpt())
    roles = {entry.module: entry.role for entry in plan.sequence if entry.block == "blocks.0"}
    assert roles == {
        "blocks.0": SequenceRole.BLOCK,
        "blocks.0.ln_1": SequenceRole.NORM,
        "blocks.0.attn": SequenceRole.AROUND,
        "blocks.0.ln_2": SequenceRole.NORM,
        "blocks.0.mlp.gate_proj": SequenceRole.COLUMN,
        "blocks.0.mlp.up_proj": SequenceRole.COLUMN,
        "blocks.0.mlp.down_proj": SequenceRole.ROW,
    }
    assert "blocks.0: each rank computes its positions: 2 norms" in str(plan)
    assert not shoal.TensorParallel(min_split_bytes=0).plan(tensor_models.gpt(), 2).sequence


def test_consecutive_blocks_are_one() -> None:
    """Values are not gathered between the blocks."""
    plan = _plan(PostNorm())
    assert [e.module for e in plan.sequence if e.role == SequenceRole.BLOCK] == [""]


class Mixes(nn.Module):
    """A block, except for one operation (`kind`) that needs or changes other positions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.kind = nn.LayerNorm(WIDTH), kind
        self.up, self.down = nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)
        self.scale = nn.Parameter(torch.ones(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        if self.kind == "mean":
            y = y - y.mean(1, keepdim=True)
        if self.kind == "parameter":
            y = y * self.scale
        if self.kind == "size":
            y = y * x.shape[1]
        if self.kind == "twice":
            y = self.norm(y)
        return x + y


@pytest.mark.parametrize("kind", ["mean", "parameter", "size", "twice"])
def test_modules_that_need_other_positions_are_no_block(kind: str) -> None:
    assert _plan(Mixes("")).sequence
    assert not _plan(Mixes(kind)).sequence


def test_a_module_that_is_used_elsewhere_is_in_no_block() -> None:
    """The module's gradients would cover some positions in the block and all of them elsewhere;
    hooks would see only some."""

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.last = Mixes(""), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.last(self.block(x)).mean(1)
            return outputs

    assert _plan(Outside()).sequence
    same, tied, hooked = Outside(), Outside(), Outside()
    same.last = same.block.norm
    tied.last.weight = tied.block.norm.weight
    hooked.block.norm.register_forward_hook(lambda *_: None)
    for model in (same, tied, hooked):
        assert not _plan(model).sequence


def test_a_model_without_blocks_is_refused_by_name() -> None:
    model = tensor_models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for strategy in (shoal.TensorParallel(sequence=True), shoal.FSDPTensor(sequence=True)):
        with pytest.raises(InvalidSpec, match=r"no block of the model.*sequence=True"):
            strategy.check(model, optimizer)
    assert shoal.TensorParallel(sequence=True).options() != shoal.TensorParallel().options()
    assert shoal.FSDPTensor(sequence=True).options() != shoal.FSDPTensor().options()


def _alone_and_split(dropout: float) -> tuple[float, float]:
    """Return how far outputs and gradients of a rank's layout are from those of the model alone."""
    model = fill(PostNorm(dropout), 0)
    key_dropout(model)
    inputs, _ = tensor_models.sequences()
    group = dist.group.WORLD
    assert group is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, world_size=size, device=torch.device("cpu"), group=group)
    state = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    with at(seed=1, step=2, first=0, count=len(inputs)):
        expected = model(inputs)
        expected.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    ours = PostNorm(dropout)
    key_dropout(ours)
    layout = TensorLayout(ours.to("meta"), world, _plan(PostNorm(dropout), size))
    for name, parameter in layout.parameters.items():
        own = layout.shard(name, parameter)
        part = tuple(
            slice(o, o + s) for o, s in zip(own.chunk.offsets, own.chunk.sizes, strict=True)
        )
        own.tensor.copy_(state[name][part])
    layout.begin()
    with at(seed=1, step=2, first=0, count=len(inputs)):
        outputs = layout.module(inputs)
        outputs.square().sum().backward()
    layout.reduce()
    worst = 0.0
    for name, parameter in layout.parameters.items():
        own = layout.shard(name, parameter)
        part = tuple(
            slice(o, o + s) for o, s in zip(own.chunk.offsets, own.chunk.sizes, strict=True)
        )
        found = parameter.grad
        assert found is not None
        found = found.to_local() if hasattr(found, "to_local") else found
        worst = max(worst, float((found - gradients[name][part]).abs().max()))
    return float((outputs - expected).detach().abs().max()), worst


def test_dropout_draws_the_masks_of_one_process() -> None:
    for outputs, gradients in run_in_memory(_alone_and_split, 3, 0.4):
        assert outputs < 1e-5
        assert gradients < 1e-3  # of sums of 1,440 squares


def _dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtype of each layer's output under autocast."""
    seen = {}

    def note(name: str, output: Tensor | tuple[Tensor, object]) -> None:
        seen[name] = (output if isinstance(output, Tensor) else output[0]).dtype

    for name, layer in model.named_modules():
        layer.register_forward_hook(lambda _, __, output, name=name: note(name, output))
    with torch.autocast("cpu", torch.bfloat16):
        model(tensor_models.sequences()[0])
    return seen


@pytest.mark.parametrize("sequence", [False, True])
def test_split_layers_return_what_torchs_layers_return_under_autocast(sequence: bool) -> None:
    expected = _dtypes(PostNorm())
    assert expected["blocks.0.down"] == expected["blocks.0.attn"] == torch.bfloat16

    def body() -> None:
        group = dist.group.WORLD
        assert group is not None
        world = World(rank=dist.get_rank(), world_size=2, device=torch.device("cpu"), group=group)
        plan = shoal.TensorParallel(min_split_bytes=0, sequence=sequence).plan(PostNorm(), 2)
        layout = TensorLayout(PostNorm().to("meta"), world, plan)
        assert _dtypes(layout.module) == expected

    run_in_memory(body, 2)


def test_values_without_positions_are_refused() -> None:
    def body() -> None:
        group = dist.group.WORLD
        assert group is not None
        with pytest.raises(InvalidSpec, match="without positions"):
            Positions(group).begin(torch.zeros(3))

    run_in_memory(body, 2)


@pytest.mark.long
def test_the_plan_counts_reduce_scatters_in_place_of_sums() -> None:
    """The plan without `sequence` has sums over ranks and no reduce-scatters."""
    model = tensor_models.gpt()
    inputs = tensor_models.tokens()[0]
    spread = shoal.TensorParallel(min_split_bytes=0, sequence=True)
    plan = shoal.plan(model, spread, world_size=2, inputs=inputs)
    plain = shoal.plan(model, shoal.TensorParallel(min_split_bytes=0), world_size=2, inputs=inputs)
    assert plan.moved("reduce_scatter")[0] > 0
    assert plain.moved("reduce_scatter")[0] == 0
    assert plan.moved("all_reduce")[0] < plain.moved("all_reduce")[0]


def test_ranks_sum_equally_many_numbers_though_a_gradient_is_missing() -> None:
    """Regression: if a rank sends fewer numbers than the others, Gloo terminates a process before
    the step is refused."""
    norm = nn.LayerNorm(3)
    norm.register_parameter("frozen", nn.Parameter(torch.ones(2), requires_grad=False))
    norm.bias.grad = torch.ones(3)
    held = dict(norm.named_parameters())
    missing, given = summands_of(held, held.keys())
    assert torch.equal(missing, torch.zeros(3))
    assert given.data_ptr() == norm.bias.grad.data_ptr()


@pytest.mark.long
def test_no_change_of_members_leaves_a_trace(cluster: LocalCluster, tmp_path: Path) -> None:
    """Five positions are spread over 3, 2 and 3 members."""
    run = elastic(
        cluster,
        "sequence",
        desired_members=3,
        strategy="tensor",
        options={"min_split_bytes": 0, "sequence": True},
        optimizer="adamw",
        model="gpt",
    )
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=5)
        schedule.start(3)
        schedule.kill()
        schedule.join()
        check_no_trace(schedule, run, 1e-5)
