"""Models on the meta device get the weights that one process would give them, or are refused."""

import pytest
import torch
from torch import Tensor, nn

from shoal.model.devices import device_of
from shoal.model.initialisation import (
    give_buffers,
    initialise,
    initialised_copy,
    is_on_meta,
)
from shoal_proto.errors import InvalidSpec

SEED = 7


class Net(nn.Module):
    """A model whose layers are made in the order of their names; two names are one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6))
        self.norm = nn.BatchNorm1d(6)
        self.again = self.layers[2]


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight


class Rotary(nn.Module):
    """A module with a computed buffer that is not in the state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", torch.empty(4), persistent=False)
        self.scale = nn.Parameter(torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.rates.copy_(torch.arange(4.0))
        nn.init.normal_(self.scale)


class Unfilled(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class InitialisedAsAWhole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.ones_(self.layer.weight)


class Masked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))


class Loose(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.rates = torch.ones(2)


def on_meta(made: type[nn.Module], *given: int) -> nn.Module:
    with torch.device("meta"):
        return made(*given)


def made_at_once(made: type[nn.Module]) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return dict(made().state_dict())


def recipe(made: type[nn.Module]) -> dict[str, Tensor]:
    """Initialise a model as the docs say that one process does."""
    model = on_meta(made).to_empty(device="cpu")
    if isinstance(model, Tied):
        model.head.weight = model.embed.weight  # `to_empty` makes two of it
    torch.manual_seed(SEED)

    def reset(module: nn.Module) -> None:  # `apply` calls children first, and each once
        if id(module) not in known:
            known.add(id(module))
            for name in ("reset_parameters", "_reset_parameters"):
                if hasattr(module, name):
                    getattr(module, name)()
                    return

    known: set[int] = set()
    model.apply(reset)
    return dict(model.state_dict())


def check_equal(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("made", [Net, Rotary])
def test_the_weights_are_those_of_a_model_made_with_the_seed(made: type[nn.Module]) -> None:
    check_equal(initialised_copy(on_meta(made), SEED).state_dict(), made_at_once(made))


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("made", [Tied, attention])
def test_the_weights_are_those_of_the_recipe(made: type[nn.Module]) -> None:
    copied = initialised_copy(on_meta(made), SEED)
    check_equal(copied.state_dict(), recipe(made))
    if isinstance(copied, Tied):
        assert copied.head.weight is copied.embed.weight


def test_an_optimizer_keeps_the_parameters_and_generators_stay_as_they_are() -> None:
    model = on_meta(Tied)
    model.embed.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drawn = torch.get_rng_state()
    initialise(model, torch.device("cpu"), SEED)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not is_on_meta(model)
    check_equal(dict(model.state_dict()), dict(initialised_copy(on_meta(Tied), SEED).state_dict()))
    assert model.head.weight is model.embed.weight
    assert not model.embed.weight.requires_grad
    held = optimizer.param_groups[0]["params"]
    assert all(one is other for one, other in zip(held, model.parameters(), strict=True))


def test_the_generators_of_gpus_are_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    initialise(on_meta(Net), torch.device("cpu"), SEED)
    assert not seeds


def test_buffers_are_made_and_parameters_stay_on_meta() -> None:
    """Buffers that are in no state are made too: no other member could send them."""
    model = nn.Sequential(on_meta(Rotary), on_meta(nn.BatchNorm1d, 3))
    give_buffers(model)
    assert model[0].rates.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert model[1].running_var.tolist() == [1.0] * 3
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_model_that_is_on_a_device_is_left_alone() -> None:
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not is_on_meta(model)
    initialise(model, torch.device("cpu"), SEED)
    check_equal(dict(model.state_dict()), before)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (Bare, r"module '1', a Bare, cannot initialise .*; saw scale, and no method reset"),
        (InitialisedAsAWhole, r"module '1', a InitialisedAsAWhole, has .*; saw init_weights"),
        (Masked, r"module '1', a Masked, has a bool tensor on the meta device; saw mask"),
        (Loose, r"module '1', a Loose, has a tensor .*; saw the attribute rates"),
    ],
)
def test_modules_that_cannot_initialise_themselves_are_refused_by_name(
    made: type[nn.Module], text: str
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), on_meta(made))
    with pytest.raises(InvalidSpec, match=text):
        give_buffers(model)
    with pytest.raises(InvalidSpec, match=text):
        initialise(model, torch.device("cpu"), SEED)


def test_parameters_that_a_module_does_not_initialise_are_refused_by_name() -> None:
    model = nn.Sequential(on_meta(nn.Linear, 2, 2), on_meta(Unfilled, 3, 4))
    with pytest.raises(InvalidSpec, match=r"module '1' does not .*; saw 4 of 4 elements of bias"):
        initialised_copy(model, SEED)


def test_a_model_on_the_meta_device_trains_on_a_gpu_if_there_is_one() -> None:
    assert device_of(Net()) == torch.device("cpu")
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert device_of(on_meta(Net)).type == expected
