"""Staleness policies: how a gradient is applied to values that have changed since it was
computed."""

import math
from functools import partial

import pytest
import torch
from support.clusters.snapshot_world import loaded
from torch import Tensor

from shoal.demo.data import load
from shoal_proto.errors import InvalidSpec, NonFiniteGradient, ShapeMismatch, StalePush
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec, StalenessPolicy
from shoal_proto.v1.parameters_pb2 import PushReply
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.parameters.optimizers.checks import check_spec
from shoal_server.parameters.shard.dense import DensePush, DenseShard, DenseValues, new_dense_shard
from shoal_server.parameters.shard.reply_writer import in_messages

SIZES = (130, 65)
LR = 0.5


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(SIZES), generator=generator, dtype=torch.float64).to(dtype)


def new_shard(
    policy: StalenessPolicy, dtype: torch.dtype = torch.float32, *, maximize: bool = False
) -> DenseShard:
    """Return a shard with plain SGD at version 2, after a first push by another session."""
    blocks = [Block(parameter=str(i), num_elements=size) for i, size in enumerate(SIZES)]
    spec = Shard(shard_id=7, epoch=1, dtype=str(dtype).removeprefix("torch."), blocks=blocks)
    hyper = HyperParameters(lr=LR, maximize=maximize)
    optimizer = OptimizerSpec(kind="sgd", groups=[hyper], staleness=policy)
    check_spec(optimizer, 1)
    shard = new_dense_shard(spec, optimizer, bytearray(raw(drawn(0, dtype))))
    push(shard, 1, drawn(1, dtype), base=drawn(0, dtype), session="other")
    return shard


def raw(tensor: Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def push(
    shard: DenseShard, base_version: int, gradient: Tensor, *, base: Tensor, session: str = "s"
) -> DenseValues:
    data = raw(gradient) + (raw(base) if shard.body.needs_base else b"")
    a_push = DensePush(
        session=session,
        sequence=1,
        epoch=1,
        base_version=base_version,
        lr=None,
        blocks=(0, 1),
        gradient=data,
    )
    values = shard.push(
        a_push,
        lambda _: True,
        read=partial(shard.body.values, writer=in_messages(PushReply)),
    ).values
    assert values is not None
    return values


def now(shard: DenseShard) -> Tensor:
    return loaded(shard).tensors["values"]


def test_without_a_policy_staleness_changes_nothing() -> None:
    """A stale gradient has the same step as a fresh one."""
    shard = new_shard(StalenessPolicy())
    before = now(shard)
    push(shard, 0, drawn(2), base=drawn(0))
    assert torch.equal(now(shard), before - LR * drawn(2))


@pytest.mark.parametrize(("base_version", "divisor"), [(2, 1), (1, 1), (0, 2)])
def test_the_rate_is_divided_by_the_staleness(base_version: int, divisor: int) -> None:
    """A staleness of 0 or 1 leaves the full rate."""
    shard = new_shard(StalenessPolicy(kind="scale"))
    before = now(shard)
    push(shard, base_version, drawn(2), base=drawn(0))
    assert torch.equal(now(shard), before - (LR / divisor) * drawn(2))


@pytest.mark.parametrize("kind", ["none", "scale", "compensate"])
def test_a_push_beyond_the_staleness_bound_is_refused(kind: str) -> None:
    """The push changes nothing, the same gradient is refused again, and a fresh one is applied."""
    shard = new_shard(StalenessPolicy(kind=kind, bound=1))
    before = now(shard)
    for _ in range(2):
        with pytest.raises(StalePush, match="saw a staleness of 2; expected at most 1"):
            push(shard, 0, drawn(2), base=drawn(0))
    assert shard.version == 2
    assert torch.equal(now(shard), before)
    push(shard, 1, drawn(2), base=before)
    assert shard.version == 3


def test_a_bound_of_0_accepts_only_fresh_gradients() -> None:
    """A bound of 0 is not the same as no bound."""
    shard = new_shard(StalenessPolicy(kind="none", bound=0))
    with pytest.raises(StalePush):
        push(shard, 1, drawn(2), base=drawn(0))
    push(shard, 2, drawn(2), base=now(shard))
    assert shard.version == 3


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_stale_gradient_is_compensated(dtype: torch.dtype, maximize: bool) -> None:
    """The gradient becomes g + lambda g g (w_now - w_base), bit for bit. With `maximize` lambda is
    negative."""
    shard = new_shard(StalenessPolicy(kind="compensate", strength=0.04), dtype, maximize=maximize)
    before, g = now(shard), drawn(2, dtype)
    push(shard, 1, g, base=drawn(0, dtype))
    wide = torch.promote_types(dtype, torch.float32)
    gone = before.to(wide) - drawn(0, dtype).to(wide)
    strength = -0.04 if maximize else 0.04
    corrected = (g.to(wide) + g.to(wide) * g.to(wide) * strength * gone).to(dtype)
    sign = 1 if maximize else -1
    expected = (before.to(wide) + sign * LR * corrected.to(wide)).to(dtype)
    assert torch.equal(now(shard), expected)
    assert not torch.equal(corrected, g)


def test_adaptive_compensation_divides_by_the_root_of_the_mean_square() -> None:
    """lambda is lambda_0 / sqrt(m + 1e-7), where m is a decaying mean over all applied pushes."""
    shard = new_shard(StalenessPolicy(kind="compensate", strength=2.0, adaptive=True, decay=0.9))
    mean = 0.9 * torch.zeros(sum(SIZES)) + drawn(1) * drawn(1) * (1 - 0.9)
    mean = 0.9 * mean + drawn(2) * drawn(2) * (1 - 0.9)
    before, g = now(shard), drawn(2)
    push(shard, 1, g, base=drawn(0))
    assert torch.equal(loaded(shard).tensors["staleness/mean_square"], mean)
    strength = 2.0 / (mean + 1e-7).sqrt()
    corrected = g + g * g * strength * (before - drawn(0))
    assert torch.equal(now(shard), before - LR * corrected)


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_fresh_gradient_needs_no_compensation(adaptive: bool) -> None:
    """The result equals plain SGD, whatever base is sent."""
    shard = new_shard(StalenessPolicy(kind="compensate", strength=1.0, adaptive=adaptive))
    before = now(shard)
    push(shard, 2, drawn(2), base=drawn(3))
    assert torch.equal(now(shard), before - LR * drawn(2))


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_gradient_whose_compensation_overflows_is_applied_as_it_is(adaptive: bool) -> None:
    """The values and the mean stay finite."""
    shard = new_shard(StalenessPolicy(kind="compensate", strength=1.0, adaptive=adaptive))
    before, g = now(shard), drawn(2)
    g[3] = 1e30
    push(shard, 1, g, base=drawn(0))
    assert now(shard).isfinite().all()
    assert now(shard)[3] == before[3] - LR * g[3]
    assert all(tensor.isfinite().all() for tensor in loaded(shard).tensors.values())


def test_an_invalid_base_is_refused() -> None:
    """A push whose base is missing, incomplete or not finite changes nothing."""
    shard = new_shard(StalenessPolicy(kind="compensate", strength=1.0))
    base = drawn(0)
    with pytest.raises(ShapeMismatch):
        push(shard, 1, drawn(2), base=base[:0])
    with pytest.raises(ShapeMismatch):
        push(shard, 1, drawn(2), base=base[:-1])
    base[130] = float("inf")
    with pytest.raises(NonFiniteGradient, match="parameter 1"):
        push(shard, 1, drawn(2), base=base)
    assert shard.version == 2


NUM_PUSHES = 600
SHAPES = ((64, 64), (64,), (64, 10), (10,))


def accuracy_of(policy: StalenessPolicy, num_members: int) -> float:
    """Return the accuracy on test digits of a small network. Its members push in turn, so that
    every gradient has a staleness of `num_members` - 1."""
    digits = load()
    images, targets = digits.train.tensors
    generator = torch.Generator().manual_seed(0)
    first = [
        torch.randn(s, generator=generator) / 8 if len(s) > 1 else torch.zeros(s) for s in SHAPES
    ]
    blocks = [Block(parameter=str(i), num_elements=t.numel()) for i, t in enumerate(first)]
    optimizer = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=0.25)], staleness=policy)
    values = torch.cat([t.flatten() for t in first])
    spec = Shard(shard_id=7, epoch=1, dtype="float32", blocks=blocks)
    shard = new_dense_shard(spec, optimizer, bytearray(raw(values)))
    replica = [(1, values)] * num_members
    for number in range(NUM_PUSHES):
        member = number % num_members
        version, base = replica[member]
        chosen = torch.randint(len(images), (32,), generator=generator)
        weights = base.clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(scores(weights, images[chosen]), targets[chosen])
        (gradient,) = torch.autograd.grad(loss, weights)
        a_push = DensePush(
            session=str(member),
            sequence=number + 1,
            epoch=1,
            base_version=version,
            lr=None,
            blocks=range(len(SHAPES)),
            gradient=raw(gradient) + (raw(base) if shard.body.needs_base else b""),
        )
        shard.push(a_push, lambda _: True)
        replica[member] = (shard.version, now(shard))
    right = scores(now(shard), digits.test_images).argmax(1) == digits.test_digits
    return float(right.float().mean())


def scores(weights: Tensor, images: Tensor) -> Tensor:
    parts = torch.split(weights, [math.prod(shape) for shape in SHAPES])
    first, first_bias, second, second_bias = (
        part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)
    )
    return torch.relu(images.flatten(1) @ first + first_bias) @ second + second_bias


@pytest.mark.long
def test_compensation_lets_eight_members_train_as_well_as_one() -> None:
    """Eight members without compensation fail to train at a rate that suits one."""
    adaptive = StalenessPolicy(kind="compensate", strength=2.0, adaptive=True, decay=0.95)
    alone = accuracy_of(StalenessPolicy(), 1)
    assert alone > 0.9
    assert accuracy_of(StalenessPolicy(), 8) < 0.5
    assert accuracy_of(adaptive, 8) > alone - 0.05


@pytest.mark.parametrize(
    "policy",
    [
        StalenessPolicy(kind="hope"),
        StalenessPolicy(kind="compensate", strength=-1.0),
        StalenessPolicy(kind="compensate", strength=float("inf")),
        StalenessPolicy(kind="compensate", decay=1.0),
    ],
)
def test_a_policy_out_of_range_is_refused(policy: StalenessPolicy) -> None:
    """The refusal comes before a shard is created."""
    spec = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)], staleness=policy)
    with pytest.raises(InvalidSpec):
        check_spec(spec, 1)
