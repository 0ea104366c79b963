"""Effects of a trace on the process and the model, its cost, and its refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _device

from shoal.layouts.pipeline.outline import Outline
from shoal.layouts.pipeline.tracing import trace
from shoal_proto.errors import InvalidSpec


class Masked(nn.Module):
    """A model that makes a tensor on a device named by a context."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.device("cpu"):
            mask = torch.ones(2)
        return x * mask


def test_devices_named_by_a_context_hold_after_a_trace() -> None:
    """Holds too if the traced model uses the first such context of the process: torch then
    determines which functions make tensors."""
    _device._device_constructors.cache_clear()
    trace(Masked(), (), training=True)
    with torch.device("meta"):
        assert torch.ones(2).device.type == "meta"


class Scales(nn.Module):
    """A model with many parameters of its own, which it adds up beside its layers."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.full((2,), 1.0) for _ in range(num))
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, total = self.first(inputs), torch.zeros(2)
        for scale in self.scales:
            hidden, total = hidden * scale, total + scale
        outputs: Tensor = self.last(hidden) + total
        return outputs


@pytest.mark.long
def test_the_time_to_trace_a_model_grows_only_with_its_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the time grew with the square of their number, since all were searched for each.
    Sums of more than a thousand raised RecursionError."""
    model = Scales(1200)
    looks = []
    named_parameters = nn.Module.named_parameters

    def counted(self: nn.Module, *args: Any, **options: Any) -> Any:
        looks.append(self)
        return named_parameters(self, *args, **options)

    monkeypatch.setattr(nn.Module, "named_parameters", counted)
    outline = Outline(model)
    assert len(looks) < 10
    stages = [outline.function(True, [0, 1], stage) for stage in range(2)]
    inputs = torch.randn(3, 2)
    assert torch.equal(stages[1](model, inputs, *stages[0](model, inputs)), model(inputs))


class Counting(nn.Module):
    """A model that keeps a count beside its layers."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 2), 1.0
        self.register_buffer("count", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        self.count = self.count + 1
        self.scale *= 0.5
        outputs: Tensor = self.layer(inputs) * self.count * self.scale
        return outputs


def test_a_forward_pass_that_assigns_attributes_is_refused_and_leaves_none() -> None:
    """Regression: the buffer was replaced by a symbol, the member ended with KeyError, and the
    number had changed before the first step, also under `hybrid` of one stage."""
    model = Counting()
    count = model.count
    for training in (True, False):
        with pytest.raises(InvalidSpec, match=r"it assigns (scale, count|count, scale)"):
            trace(model, (), training)
    assert model.count is count
    assert model.scale == 1.0


class Mapped(nn.Module):
    """A model whose forward pass raises what torch raises on symbols."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.vmap(lambda each: each * 2)(inputs)


def test_any_error_of_a_traced_forward_pass_is_raised_as_invalid_spec() -> None:
    """Regression: an error of an unexpected class ended the member as an internal error."""
    with pytest.raises(InvalidSpec, match="ValueError: vmap"):
        trace(Mapped(), (), training=True)
