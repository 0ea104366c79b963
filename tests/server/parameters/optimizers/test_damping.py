"""Damping: how much smaller an optimizer's step on a stale gradient is."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.clusters.snapshot_world import loaded

from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec, StalenessPolicy
from shoal_proto.v1.parameters_pb2 import PushReply
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.parameters.optimizers.checks import check_spec
from shoal_server.parameters.optimizers.damping import damping
from shoal_server.parameters.shard.dense import DensePush, DenseShard, new_dense_shard
from shoal_server.parameters.shard.reply_writer import in_messages

SIZE = 64
LR = 0.1
DAMP = StalenessPolicy(kind="damp")


@given(
    momentum=st.floats(0.0, 0.99),
    staleness=st.integers(0, 1000),
)
def test_the_effective_rate_of_sgd_is_divided(momentum: float, staleness: int) -> None:
    """The effective rate lr / (1 - momentum) is divided by 2 s + 1, for any momentum and staleness
    s. Neither the rate nor the momentum is raised."""
    rate, left = damping("sgd", HyperParameters(momentum=momentum), staleness)
    assert rate <= 1
    assert left <= momentum
    effective = rate / (1 - left)
    expected = 1 / (1 - momentum) / (2 * staleness + 1)
    assert math.isclose(effective, expected, rel_tol=1e-5)


@given(
    lr=st.floats(0.01, 2.0),
    momentum=st.floats(0.0, 0.99),
    staleness=st.integers(1, 1000),
)
def test_a_stale_outer_step_moves_by_at_most_its_share(
    lr: float, momentum: float, staleness: int
) -> None:
    """The share is 1 / (s + 1) of the change, as of one of s + 1 members. Undamped, DiLoCo's
    settings would move by 7 times the change."""
    rate, left = damping("outer", HyperParameters(lr=lr, momentum=momentum), staleness)
    assert rate <= 1 + 1e-5
    assert left <= momentum
    undamped = lr / (1 - momentum)
    expected = min(undamped / (2 * staleness + 1), 1 / (1 + staleness))
    assert math.isclose(lr * rate / (1 - left), expected, rel_tol=1e-4)


@given(momentum=st.floats(0.0, 0.99), staleness=st.integers(1, 1000))
def test_an_outer_step_at_a_rate_of_0_is_damped_as_at_a_rate_near_0(
    momentum: float, staleness: int
) -> None:
    """A rate of 0 is allowed, as at the start of a warm-up."""
    at_0 = damping("outer", HyperParameters(lr=0.0, momentum=momentum), staleness)
    near_0 = damping("outer", HyperParameters(lr=1e-9, momentum=momentum), staleness)
    assert at_0 == pytest.approx(near_0, rel=1e-4)


def test_a_fresh_outer_step_is_not_damped() -> None:
    """The outer step of a single member is DiLoCo's."""
    assert damping("outer", HyperParameters(lr=0.7, momentum=0.9), 0) == (1.0, 0.9)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("num_members", [2, 8])
def test_stale_outer_steps_of_several_members_converge(num_members: int, nesterov: bool) -> None:
    """Members push in turn with DiLoCo's settings, each from the values after its own last push.
    The values reach the point to which every step leads."""
    shard = new_shard(HyperParameters(lr=0.7, momentum=0.9, nesterov=nesterov), "outer")
    bases = [(shard.version, torch.zeros(SIZE))] * num_members
    for turn in range(20 * num_members):
        base_version, base = bases[turn % num_members]
        push(shard, base_version, base - 1.0, turn + 1)
        values = loaded(shard).tensors["values"].clone()
        bases[turn % num_members] = shard.version, values
    torch.testing.assert_close(values, torch.ones(SIZE), atol=0.01, rtol=0)


@pytest.mark.parametrize("kind", ["adam", "adamw", "adagrad"])
def test_rates_of_adaptive_optimizers_are_divided_by_the_root_of_staleness(kind: str) -> None:
    """Steps of adaptive optimizers do not grow with the gradient, so that they need less
    damping."""
    assert damping(kind, HyperParameters(), 8).rate == pytest.approx(1 / 3)
    assert damping(kind, HyperParameters(), 0).rate == 1.0


def new_shard(hyper: HyperParameters, kind: str = "sgd") -> DenseShard:
    spec = Shard(
        shard_id=0, epoch=1, dtype="float32", blocks=[Block(parameter="w", num_elements=SIZE)]
    )
    optimizer = OptimizerSpec(kind=kind, groups=[hyper], staleness=DAMP)
    check_spec(optimizer, 1)
    return new_dense_shard(spec, optimizer, bytearray(4 * SIZE))


def push(shard: DenseShard, base_version: int, gradient: torch.Tensor, sequence: int) -> None:
    a_push = DensePush(
        session="s",
        sequence=sequence,
        epoch=1,
        base_version=base_version,
        lr=None,
        blocks=(0,),
        gradient=gradient.view(torch.uint8).numpy().tobytes(),
    )
    shard.push(
        a_push,
        lambda _: True,
        read=partial(shard.body.values, writer=in_messages(PushReply)),
    )


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_shard_steps_as_torch_does_with_less_momentum(nesterov: bool) -> None:
    """A fresh push has the full momentum of 0.9. With a staleness of 2 it is 0.5; with one of 12 it
    is nearly 0, and the rate is 10 / 25."""
    hyper = HyperParameters(lr=LR, momentum=0.9, nesterov=nesterov)
    shard = new_shard(hyper)
    ours = torch.nn.Parameter(torch.zeros(SIZE))
    torchs = torch.optim.SGD([ours], lr=LR, momentum=0.9, nesterov=nesterov, fused=True)
    stalenesses = [0] * 12 + [2, 12, 0]
    of = {0: (LR, 0.9), 2: (LR, 0.5), 12: (LR / 2.5, 1e-6)}
    for i, staleness in enumerate(stalenesses):
        gradient = torch.randn(SIZE, generator=torch.Generator().manual_seed(i))
        push(shard, i + 1 - staleness, gradient, i + 1)
        rate, momentum = of[staleness]
        torchs.param_groups[0].update(lr=rate, momentum=momentum)
        ours.grad = gradient
        torchs.step()
    assert torch.allclose(loaded(shard).tensors["values"], ours.detach(), rtol=1e-5, atol=1e-6)
