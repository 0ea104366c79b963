"""Changes that a script made to its model and its optimizer before it distributed them count."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.collectives.strategy_runs import StepOptions, by_a_rank, by_one_process, difference
from support.models.seeding import seeded
from support.training import equality
from torch import Tensor, nn

import shoal
from shoal.backends.in_memory.run import run_in_memory
from shoal.data.batches import Loader
from shoal.model.tied_tensors import give_own_memory
from shoal.strategies import find_strategy
from shoal.strategies.asynchronous.optimizer_spec import to_spec
from shoal.strategies.base import Strategy
from shoal_proto.errors import InvalidSpec, UnsupportedOptimizer

STRATEGIES = ("ddp", "zero1", "fsdp", "tensor", "pipeline", "hybrid", "zero2")
NUM_STEPS = 6


def weights_of(
    build: Callable[[int], tuple[nn.Module, torch.optim.Optimizer]],
    made: Callable[[], Strategy],
    *,
    loader: Callable[[], Loader] = equality.loader,
    step_options: StepOptions | None = None,
) -> tuple[Mapping[str, Tensor], list[Mapping[str, Tensor]]]:
    """Return the weights of one process, and of each of three ranks."""
    run = replace(equality.run_of("sgd"), build=build, loader=loader, num_steps=NUM_STEPS)
    run = replace(run, step_options=step_options or run.step_options)
    return by_one_process(run), run_in_memory(by_a_rank, 3, run, made)


def that_has_stepped(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build an optimizer with a state, as if plain torch had loaded it from a checkpoint."""
    model, optimizer = equality.build(kind, seed)
    state: dict[str, Tensor]
    for parameter in model.parameters():
        state = {"momentum_buffer": torch.ones_like(parameter)}
        if kind == "adamw":
            step = torch.tensor(9.0)
            state = {k: torch.full_like(parameter, 0.5) for k in ("exp_avg", "exp_avg_sq")}
            state |= {"step": step}
        optimizer.state[parameter] = state
    return model, optimizer


@pytest.mark.sampled("strategy")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_starts_from_the_state_that_the_optimizer_has(
    strategy: str, optimizer: str
) -> None:
    build = partial(that_has_stepped, optimizer)
    expected, ranks = weights_of(build, equality.made(strategy, 3))
    for ours in ranks:
        assert difference(ours, expected) < equality.TOLERANCE


def test_parameter_servers_refuse_an_optimizer_that_has_stepped() -> None:
    for kind in ("sgd", "adamw"):
        _, optimizer = that_has_stepped(kind, 0)
        with pytest.raises(UnsupportedOptimizer, match="has taken steps already"):
            to_spec(optimizer)
    to_spec(torch.optim.Adagrad(nn.Linear(2, 2).parameters()))


def of_the_last_layer(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build an optimizer of the last layer only; other layers require gradients too."""
    model, _ = equality.build("sgd", seed)
    layers = model.get_submodule("layers")
    assert isinstance(layers, nn.Sequential)
    return model, torch.optim.SGD(layers[-1].parameters(), lr=0.05)


class ForgetsAll(torch.optim.SGD):
    """An optimizer that drops all gradients of the model, as `session.step()` does at its
    beginning."""

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.05)
        self._model = model

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._model.zero_grad(set_to_none=set_to_none)


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_no_optimizer_takes_do_not_add_up(strategy: str) -> None:
    """Gradients without an optimizer count in the norm; a joining member has none of earlier
    steps."""

    def forgetting(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = of_the_last_layer(seed)
        return model, ForgetsAll(model, optimizer.param_groups[0]["params"])

    clipped = StepOptions(max_norm=0.05)
    run = replace(
        equality.run_of("sgd"), build=forgetting, num_steps=NUM_STEPS, step_options=clipped
    )
    expected = by_one_process(run)
    _, ranks = weights_of(of_the_last_layer, equality.made(strategy, 3), step_options=clipped)
    for ours in ranks:
        assert difference(ours, expected) < equality.TOLERANCE


class Odd(nn.Module):
    """A model with a parameter and a buffer without elements, and a buffer that expands one number
    to seven."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 7)
        self.outer = nn.Linear(7, 5)
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("mask", torch.ones(1).expand(7))

    def forward(self, inputs: Tensor) -> Tensor:
        mask = self.get_buffer("mask")
        outputs: Tensor = self.outer(torch.tanh(self.inner(inputs)) * mask) + self.none.sum()
        return outputs


@pytest.mark.parametrize("strategy", ["zero1", "tensor"])
def test_tensors_without_elements_are_in_the_state_dict(strategy: str) -> None:
    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        with seeded(seed):
            model = Odd()
        give_own_memory(model)
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    expected, ranks = weights_of(build, equality.made(strategy, 3))
    for ours in ranks:
        assert {name: each.shape for name, each in ours.items()} == {
            name: each.shape for name, each in expected.items()
        }


def test_a_session_gives_an_expanded_buffer_memory_of_its_own() -> None:
    """A state that a member takes over is written into the buffer."""
    model = Odd()
    model.register_buffer("tied", model.get_buffer("mask"))
    with shoal.join() as session:
        session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    mask = model.get_buffer("mask")
    mask.copy_(torch.arange(7.0))
    assert model.get_buffer("tied") is mask


def test_a_parameter_without_elements_cannot_be_cut() -> None:
    model = Odd()
    with pytest.raises(InvalidSpec, match="cannot cut the parameter none"):
        shoal.FSDP().distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("distribute", [shoal.distribute, None], ids=["torchrun", "session"])
@pytest.mark.parametrize(
    ("make", "name"),
    [(lambda: nn.LazyLinear(2), "weight"), (lambda: nn.LazyBatchNorm1d(affine=False), "mean")],
)
def test_a_lazy_layer_without_a_shape_is_refused_by_name(
    make: Callable[[], nn.Module], name: str, distribute: Any
) -> None:
    model = nn.Sequential(nn.Linear(2, 3), make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shoal.join() as session, pytest.raises(InvalidSpec, match=rf"1\..*{name}.*run one batch"):
        (distribute or session.distribute)(model, optimizer, strategy="ddp")


@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "hsdp", "fsdp-tensor", "zero1"])
def test_channels_last_weights_train_as_in_one_process(strategy: str) -> None:
    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        with seeded(seed):
            convolutions = (nn.Conv2d(1, 4, 2), nn.Tanh(), nn.Conv2d(4, 5, (1, 2)))
            model = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), *convolutions, nn.Flatten())
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    expected, ranks = weights_of(build, equality.STRATEGIES[strategy])
    for ours in ranks:
        assert difference(ours, expected) < equality.TOLERANCE


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "pipeline"])
def test_hooks_on_gradients_of_parameters_are_refused(strategy: str) -> None:
    """Clamping the gradient of one member's samples differs from clamping that of the batch."""
    model, optimizer = equality.build("sgd", 0)
    next(model.parameters()).register_hook(lambda gradient: gradient.clamp(-1, 1))
    with pytest.raises(InvalidSpec, match=r"hooks of the script's.* of idle"):
        equality.made(strategy, 2)().distribute(model, optimizer)


class Counting(torch.optim.SGD):
    """An optimizer whose steps depend on a number outside of its state."""

    count = 0

    def state_dict(self) -> dict[str, object]:
        return {**super().state_dict(), "count": self.count}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "local-sgd"])
def test_an_optimizer_with_a_state_of_its_own_is_refused(strategy: str) -> None:
    model, _ = equality.build("sgd", 0)
    with pytest.raises(UnsupportedOptimizer, match="in its state_dict: count"):
        find_strategy(strategy).distribute(model, Counting(model.parameters(), lr=0.1))


class WithExtraState(nn.Linear):
    """A layer whose state_dict holds a number that is not a tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"passes": 3}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "local-sgd"])
def test_modules_with_an_extra_state_are_refused(strategy: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), WithExtraState(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidSpec, match=r"get_extra_state of 1;.*persistent buffer"):
        find_strategy(strategy).distribute(model, optimizer)
