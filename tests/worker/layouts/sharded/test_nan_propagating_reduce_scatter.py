"""Gradients that are not finite on one rank: all ranks that reduce them learn of it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes.worlds import LaidOutTraining, Losses, Training, this_world
from support.training.elastic_bodies import Explodes
from torch import Tensor, nn

from shoal.backends.in_memory.run import run_in_memory
from shoal.backends.process_group.reductions import add_up
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


def after_backward(
    faulty: int,
    shard: int | None = None,
    model: Callable[[int], nn.Module] = Scaled,
    loss: Losses = lambda outputs, targets: (outputs - targets).sum(),
) -> ShardedLayout:
    """Return the layout of this rank, which has computed the gradients of step 4."""
    group = dist.group.WORLD
    assert group is not None
    training = Training(
        model=partial(model, faulty),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=lambda: (torch.ones(12, 5), torch.zeros(12, 3)),
        loss=loss,
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


def test_a_sum_whose_overflows_make_one_parameter_nan_is_raised_on_its_rank_only() -> None:
    """Regression: a rank that held two elements of a parameter took them for a fault of another
    rank, and waited for a message of all."""

    def body() -> str:
        layout = after_backward(faulty=-1)
        gradient: Any = layout.parameters["layer.bias"].grad
        if layout.world.rank == 0:
            gradient.to_local().fill_(torch.nan)
        return raised_by(layout)

    assert run_in_memory(body, 4, timeout_s=20.0) == ["NonFiniteGradient", *["nothing"] * 3]


class Opposed(nn.Module):
    """A model with one parameter of two elements. The gradient of the first one overflows, to an
    infinity of another sign in the second half of the ranks."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor) -> Tensor:
        sign = 1.0 if 2 * dist.get_rank() < dist.get_world_size() else -1.0
        return self.weight * torch.tensor([sign * torch.finfo(torch.float32).max, 0.0])


@pytest.mark.parametrize("world_size", [4, 8])
def test_overflows_of_both_signs_are_raised_on_their_ranks_only(world_size: int) -> None:
    """Regression: copies averaged infinities of both signs to NaN, in all that a rank held of a
    parameter."""

    def body() -> str:
        return raised_by(after_backward(-1, 2, Opposed, lambda outputs, _: outputs.sum()))

    found = run_in_memory(body, world_size, timeout_s=20.0)
    assert found == ["NonFiniteGradient", "nothing"] * (world_size // 2)


@pytest.mark.parametrize("num_elements", [1, 2, 3, 16, 1023])
@pytest.mark.parametrize("num_ranks", [2, 8, 16, 32])
def test_finite_parts_do_not_add_up_to_nan(num_ranks: int, num_elements: int) -> None:
    """Regression: torch adds up in several sums, which overflowed to infinities of both signs."""
    generator = torch.Generator().manual_seed(num_ranks * num_elements)
    signs = torch.randint(0, 2, (num_ranks, num_elements), generator=generator) * 2 - 1
    total = torch.empty(num_elements)
    add_up(signs * torch.finfo(torch.float32).max, total)
    assert not total.isnan().any()
    numbers = torch.randn(num_ranks, num_elements, generator=generator)
    add_up(numbers, total)
    torch.testing.assert_close(total, numbers.sum(0))
