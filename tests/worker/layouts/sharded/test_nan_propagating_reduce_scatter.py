"""Gradients that are not finite on one rank: all ranks that reduce them learn of it."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes.worlds import LaidOutTraining, Training, this_world
from support.training.elastic_bodies import Explodes
from torch import Tensor, nn

from shoal.backends.in_memory.run import run_in_memory
from shoal.layouts.sharded import nan_propagating_reduce_scatter
from shoal.layouts.sharded.layout import ShardedLayout, ShardedOptions
from shoal.layouts.sharded.nan_propagating_reduce_scatter import propagate_nan, spread_nan
from shoal.model.losses import PendingLosses
from shoal_proto.errors import GenerationBroken, NonFiniteGradient


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_non_finite_gradient_makes_all_nan(value: float, dtype: torch.dtype) -> None:
    gradients = torch.ones(7, dtype=dtype)
    gradients[3] = value
    assert propagate_nan(gradients, PendingLosses())
    assert bool(gradients.isnan().all())


@pytest.mark.parametrize("value", [1.0, torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_spread_nan_makes_gradients_nan_only_if_one_is_not_finite(
    value: float, dtype: torch.dtype
) -> None:
    """Finite numbers are left alone even if their sum is infinite."""
    gradients = torch.full((7,), torch.finfo(dtype).max, dtype=dtype)
    gradients[3] = value
    before = gradients.clone()
    excess = spread_nan(gradients, PendingLosses())
    assert excess.item() == 0.0 if value == 1.0 else bool(excess.isnan())
    assert torch.equal(gradients, before) if value == 1.0 else bool(gradients.isnan().all())
    spread_nan(torch.empty(0, dtype=dtype), PendingLosses())


def test_a_loss_that_is_not_finite_makes_all_nan() -> None:
    losses = PendingLosses()
    losses.note(torch.tensor(2.0))
    gradients = torch.ones(7, dtype=torch.bfloat16)
    spread_nan(gradients, losses)
    assert bool(gradients.eq(1).all())
    losses.note(torch.tensor(torch.inf))
    losses.note(torch.tensor(3.0))
    spread_nan(gradients, losses)
    assert bool(gradients.isnan().all())


def test_finite_numbers_whose_sum_is_not_are_left_alone() -> None:
    gradients = torch.full((3,), torch.finfo(torch.float32).max)
    before = gradients.clone()
    assert not propagate_nan(gradients, PendingLosses())
    assert torch.equal(gradients, before)


class Scaled(nn.Module):
    """A model whose scale has a gradient of 3 elements, so that the last of four ranks holds none
    of it."""

    def __init__(self, faulty: int) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 8)
        self.scale = nn.Parameter(torch.ones(3))
        self.faulty = faulty

    def forward(self, inputs: Tensor) -> Tensor:
        function: Any = Explodes
        exploding = function.apply(self.scale) if dist.get_rank() == self.faulty else self.scale
        outputs: Tensor = self.layer(inputs)[:, :3] * exploding
        return outputs


def after_backward(faulty: int, shard: int | None = None) -> ShardedLayout:
    """Return the layout of this rank, which has computed the gradients of step 4."""
    group = dist.group.WORLD
    assert group is not None
    training = Training(
        model=partial(Scaled, faulty),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=lambda: (torch.ones(12, 5), torch.zeros(12, 3)),
        loss=lambda outputs, targets: (outputs - targets).sum(),
    )
    world = this_world()
    options = ShardedOptions(min_group_bytes=1, shard=shard)
    layout = LaidOutTraining(training, lambda m, w: ShardedLayout(m, w, options), world).layout
    assert isinstance(layout, ShardedLayout)
    layout.step = 4
    inputs, targets = training.batch(0)
    layout.begin()
    layout.backward(training.loss(layout.module(inputs), targets), 1.0)
    return layout


def raised_by(layout: ShardedLayout) -> str:
    try:
        layout.check()
    except (NonFiniteGradient, GenerationBroken) as error:
        assert "at step 4" in str(error)
        return type(error).__name__
    return "nothing"


@pytest.fixture(params=["host", "device"])
def _examined_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tensors count as being on the host, or on a device that gradients may not wait for."""
    is_on_host = request.param == "host"
    monkeypatch.setattr(nan_propagating_reduce_scatter, "is_on_host", lambda _: is_on_host)


@pytest.mark.usefixtures("_examined_on")
def test_all_ranks_raise_also_one_that_holds_no_part_of_the_gradient() -> None:
    """Regression: a rank whose own rows were finite trained on, and waited for the others."""
    names = run_in_memory(lambda: raised_by(after_backward(faulty=1)), 4)
    assert names == ["GenerationBroken", "NonFiniteGradient", *["GenerationBroken"] * 2]


@pytest.mark.usefixtures("_examined_on")
def test_all_ranks_of_all_copies_raise() -> None:
    """The last rank of the other copy gets the error too, although it holds no element of the
    gradient."""
    names = run_in_memory(lambda: raised_by(after_backward(faulty=1, shard=4)), 8)
    assert names == ["GenerationBroken", "NonFiniteGradient", *["GenerationBroken"] * 6]


def test_a_sum_that_overflows_is_raised_on_its_rank_only() -> None:
    """The other ranks do not wait for a message at that point."""

    def body() -> str:
        layout = after_backward(faulty=-1)
        gradient: Any = layout.parameters["layer.weight"].grad
        if layout.world.rank == 0:
            gradient.to_local()[0, 0] = torch.inf
        return raised_by(layout)

    assert run_in_memory(body, 2) == ["NonFiniteGradient", "nothing"]
