"""Optimizers of the server have the results of torch.optim."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shoal.strategies.outer_step import OuterStep
from shoal_proto.errors import InvalidSpec, ShoalError, UnsupportedOptimizer
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_server.core.shards.placement import Parameter, cut_into_shards
from shoal_server.parameters.optimizers import new_optimizer
from shoal_server.parameters.optimizers.base import WholeStepOptimizer
from shoal_server.parameters.optimizers.checks import check_spec

SHAPES = ((7,), (33, 5), (1000,), (3, 3, 3), (40_000,), (65,))
NUM_STEPS = 4

SGD = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
ADAM = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.0, "amsgrad": False}
ADAGRAD = {
    "lr": 0.1,
    "lr_decay": 0.0,
    "weight_decay": 0.0,
    "initial_accumulator_value": 0.0,
    "eps": 1e-10,
}
CASES = [
    ("sgd", SGD),
    ("sgd", SGD | {"momentum": 0.9}),
    ("sgd", SGD | {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01}),
    ("sgd", SGD | {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "maximize": True}),
    ("adam", ADAM),
    ("adam", ADAM | {"amsgrad": True, "weight_decay": 0.1}),
    ("adam", ADAM | {"maximize": True}),
    ("adamw", ADAM | {"weight_decay": 0.1}),
    ("adamw", ADAM | {"weight_decay": 0.1, "amsgrad": True}),
    ("adagrad", ADAGRAD),
    ("adagrad", ADAGRAD | {"lr_decay": 0.1, "weight_decay": 0.01, "maximize": True}),
    ("adagrad", ADAGRAD | {"initial_accumulator_value": 0.5, "eps": 1e-3}),
]
TORCH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
}


def to_spec(kind: str, settings: dict[str, object]) -> OptimizerSpec:
    fields = {name: value for name, value in settings.items() if name != "betas"}
    if "betas" in settings:
        fields["beta1"], fields["beta2"] = settings["betas"]  # type: ignore[misc]
    return OptimizerSpec(kind=kind, groups=[HyperParameters(**fields)])


def gradient(step: int, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def has_gradient(step: int, index: int) -> bool:
    """True if the parameter has a gradient in this step. Some parameters begin with a later
    step."""
    return (step + index) % 3 != 0


def train_torch(
    kind: str, settings: dict[str, object], dtype: torch.dtype, fused: bool | None
) -> list[Tensor]:
    parameters = [
        torch.nn.Parameter(gradient(99, i, shape, dtype)) for i, shape in enumerate(SHAPES)
    ]
    optimizer = TORCH[kind](parameters, fused=fused, **settings)
    for step in range(NUM_STEPS):
        for i, p in enumerate(parameters):
            p.grad = gradient(step, i, SHAPES[i], dtype) if has_gradient(step, i) else None
        optimizer.step()
    return [p.detach().flatten() for p in parameters]


def train_sharded(kind: str, settings: dict[str, object], dtype: torch.dtype) -> list[Tensor]:
    """Train the same parameters, cut into shards as for three servers."""
    name = str(dtype).removeprefix("torch.")
    schema = [Parameter(name=str(i), shape=s, dtype=name) for i, s in enumerate(SHAPES)]
    values = [gradient(99, i, shape, dtype).flatten() for i, shape in enumerate(SHAPES)]
    shards = []
    for shard in cut_into_shards(schema, 3):
        parts = [values[int(b.parameter)][b.offset :][: b.num_elements] for b in shard.blocks]
        flat = torch.cat(parts)
        views = torch.split(flat, [part.numel() for part in parts])
        shards.append((shard, views, new_optimizer(to_spec(kind, settings), 0, views)))
    for step in range(NUM_STEPS):
        for shard, _, optimizer in shards:
            present = [
                i for i, b in enumerate(shard.blocks) if has_gradient(step, int(b.parameter))
            ]
            if present:
                gradients = []
                for b in (shard.blocks[i] for i in present):
                    index = int(b.parameter)
                    whole = gradient(step, index, SHAPES[index], dtype).flatten()
                    gradients.append(whole[b.offset :][: b.num_elements].clone())
                lr = float(settings["lr"])  # type: ignore[arg-type]
                is_whole = len(present) == len(shard.blocks) and isinstance(
                    optimizer, WholeStepOptimizer
                )
                if not (is_whole and optimizer.step_whole(torch.cat(gradients), lr)):
                    optimizer.step(present, gradients, lr)
    for shard, views, _ in shards:
        for block, view in zip(shard.blocks, views, strict=True):
            values[int(block.parameter)][block.offset :][: block.num_elements] = view
    return values


@pytest.mark.sampled()
@pytest.mark.parametrize(("kind", "settings"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_results_equal_fused_torch_bit_for_bit(
    kind: str, settings: dict[str, object], dtype: torch.dtype
) -> None:
    """The reference is torch.optim with fused=True, except for SGD where that is wrong. Some
    parameters have no gradient in some steps."""
    if kind == "sgd" and dtype == torch.bfloat16:
        # torch's own fused SGD is wrong for 16-bit types.
        expected = train_torch(kind, settings, dtype, fused=False)
    elif kind == "sgd" and settings["momentum"]:
        # torch's fused SGD cannot start the momentum of one parameter later than another's.
        expected = train_torch_alone(settings, dtype)
    else:
        expected = train_torch(kind, settings, dtype, fused=True)
    for seen, wanted in zip(train_sharded(kind, settings, dtype), expected, strict=True):
        assert torch.equal(seen, wanted)


def train_torch_alone(settings: dict[str, object], dtype: torch.dtype) -> list[Tensor]:
    trained = []
    for i, shape in enumerate(SHAPES):
        p = torch.nn.Parameter(gradient(99, i, shape, dtype))
        optimizer = torch.optim.SGD([p], fused=True, **settings)  # type: ignore[arg-type]
        for step in range(NUM_STEPS):
            p.grad = gradient(step, i, shape, dtype) if has_gradient(step, i) else None
            optimizer.step()
        trained.append(p.detach().flatten())
    return trained


def test_each_parameter_group_has_its_own_settings() -> None:
    """A shard belongs to one group, and its optimizer has that group's settings."""
    groups = [ADAM, ADAM | {"lr": 0.1, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.5}]
    hypers = [to_spec("adam", group).groups[0] for group in groups]
    spec = OptimizerSpec(kind="adam", groups=hypers)
    parameters = [torch.nn.Parameter(gradient(99, i, (65,), torch.float32)) for i in range(2)]
    values = [p.detach().clone() for p in parameters]
    reference = torch.optim.Adam(
        [{"params": [p]} | group for p, group in zip(parameters, groups, strict=True)],
        fused=True,  # type: ignore[arg-type]
    )
    ours = [new_optimizer(spec, i, [value]) for i, value in enumerate(values)]
    for step in range(NUM_STEPS):
        for i, p in enumerate(parameters):
            p.grad = gradient(step, i, (65,), torch.float32)
            ours[i].step([0], [p.grad.clone()], hypers[i].lr)
        reference.step()
    for seen, wanted in zip(values, parameters, strict=True):
        assert torch.equal(seen, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "outer",
    [OuterStep(), OuterStep(lr=0.5, momentum=0.9), OuterStep(lr=0.7, momentum=0.9, nesterov=True)],
    ids=str,
)
def test_the_outer_step_on_the_server_equals_that_of_members(
    outer: OuterStep, dtype: torch.dtype
) -> None:
    """A member that pushes its changes gets the values that it would compute itself."""
    settings = {"lr": outer.lr, "momentum": outer.momentum, "nesterov": outer.nesterov}
    blocks = [gradient(99, i, shape, dtype).flatten() for i, shape in enumerate(SHAPES)]
    expected = [block.clone() for block in blocks]
    velocities: list[Tensor | None] = [None] * len(blocks)
    ours = new_optimizer(to_spec("outer", settings), 0, blocks)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for step in range(NUM_STEPS):
        moved = [gradient(step, i, shape, dtype).flatten() for i, shape in enumerate(SHAPES)]
        ours.step(range(len(blocks)), moved, outer.lr)
        for i, value in enumerate(expected):
            change, velocities[i] = outer.change(-moved[i].to(wide), velocities[i])
            value.copy_(value.to(wide) + change)
    for seen, wanted in zip(blocks, expected, strict=True):
        assert torch.equal(seen, wanted)


TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 0.04, torch.float16: 0.004}


@pytest.mark.parametrize(
    ("kind", "settings", "dtype"),
    [
        (kind, settings, dtype)
        for kind, settings in CASES
        for dtype in TOLERANCES
        # torch's default computes Adam in float16 itself, where squares vanish: no reference.
        if kind == "sgd" or dtype != torch.float16
    ],
)
def test_results_equal_those_of_unfused_torch_up_to_rounding(
    kind: str, settings: dict[str, object], dtype: torch.dtype
) -> None:
    """torch's default on CPU is not fused, and rounds differently."""
    expected = train_torch(kind, settings, dtype, fused=None)
    tolerance = TOLERANCES[dtype]
    for seen, wanted in zip(train_sharded(kind, settings, dtype), expected, strict=True):
        torch.testing.assert_close(seen, wanted, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("spec", "kind", "fragment"),
    [
        (OptimizerSpec(kind="lbfgs"), UnsupportedOptimizer, "lbfgs"),
        (OptimizerSpec(kind="sgd"), InvalidSpec, "0 groups"),
        (to_spec("sgd", SGD | {"lr": -1.0}), InvalidSpec, "lr"),
        (to_spec("sgd", SGD | {"lr": float("nan")}), InvalidSpec, "nan"),
        (to_spec("sgd", SGD | {"lr": 1e39}), InvalidSpec, "lr"),
        (to_spec("sgd", SGD | {"nesterov": True}), InvalidSpec, "nesterov"),
        (to_spec("adam", ADAM | {"betas": (1.0, 0.9)}), InvalidSpec, "beta1"),
        (to_spec("adamw", ADAM | {"weight_decay": float("inf")}), InvalidSpec, "weight_decay"),
        (to_spec("adagrad", ADAGRAD | {"lr_decay": -0.1}), InvalidSpec, "lr_decay"),
        (to_spec("adagrad", ADAGRAD | {"eps": -1.0}), InvalidSpec, "eps"),
        (to_spec("outer", {"lr": 0.7, "momentum": 1.0}), InvalidSpec, "momentum"),
        (to_spec("outer", {"lr": 0.7, "nesterov": True}), InvalidSpec, "nesterov"),
    ],
)
def test_bad_settings_are_refused(
    spec: OptimizerSpec, kind: type[ShoalError], fragment: str
) -> None:
    """The settings are unknown, out of range or contradictory; the error names one of them."""
    with pytest.raises(kind, match=fragment):
        check_spec(spec, 1)
