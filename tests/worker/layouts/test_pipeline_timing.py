"""Stages are balanced by time if the user asks for it, and all ranks cut alike."""

import copy

import pytest
import torch
from support.models import pipeline_models as models
from support.processes.worlds import this_world
from torch import nn

import shoal
from shoal.layouts.pipeline.layer_profiler import LayerProfiler, measured
from shoal.layouts.pipeline.stage_splitter import StageSplitter
from shoal.strategies.layout.pipeline import Pipeline
from shoal_proto.errors import InvalidSpec


class Slow(nn.Linear):
    """A small layer that takes long."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(100):
            x = torch.tanh(super().forward(x))
        return x


def lopsided() -> nn.Module:
    return nn.Sequential(Slow(4, 4), nn.Linear(4, 60), nn.Linear(60, 60), nn.Linear(60, 2))


def on_meta(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to("meta")


@pytest.mark.parametrize(
    ("make", "data"),
    [(lopsided, lambda: torch.randn(3, 4)), (models.transformer, lambda: models.tokens()[0][:3])],
)
def test_each_layer_has_a_time_and_the_model_stays_as_it_was(make, data):
    model = on_meta(make())
    outline = StageSplitter().outline(model, 1)
    costs = measured(model, outline, data(), torch.device("cpu"))
    assert len(costs) == len(outline.segments)
    assert all(cost > 0 for cost in costs)
    assert all(parameter.is_meta for parameter in model.parameters())


class Twice(nn.Module):
    """A model that normalises twice with one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.between = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.between(self.norm(x)))
        return out


def test_a_layer_with_statistics_that_is_called_twice_has_a_time_for_each_call():
    """A stage may hold both calls: only a cut between them is refused."""
    model = on_meta(Twice())
    outline = StageSplitter().outline(model, 1)
    assert [segment.name for segment in outline.segments] == ["norm", "between", "norm@2"]
    assert all(measured(model, outline, torch.randn(3, 4), torch.device("cpu")))


def test_the_first_ranks_times_hold_for_all_and_are_kept():
    def body() -> list[list[int]]:
        world = this_world()
        model = on_meta(lopsided())
        outline = StageSplitter().outline(model, 3)
        profiler = LayerProfiler(torch.randn(2, 4))
        return [profiler.costs(model, outline, world) for _ in range(2)]

    first, *others = shoal.run_in_memory(body, 3)
    assert first[0] == first[1]
    assert all(each == first for each in others)


def test_a_small_slow_layer_weighs_by_its_time_and_not_by_its_bytes():
    splitter = StageSplitter()
    outline = splitter.outline(on_meta(lopsided()), 2)
    assert splitter.stage_of(outline, 2) == [0, 0, 1, 1]
    assert splitter.stage_of(outline, 2, [900, 10, 20, 10]) == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": "time"}, "no example.*Give example="),
        ({"balance": "luck"}, "balance is unknown; saw 'luck'"),
        ({"schedule": "zigzag"}, "saw 'zigzag'; expected one of 'gpipe', '1f1b'"),
        ({"microbatches": 0}, "microbatches is out of range; saw 0"),
        ({"copies": -1}, "copies"),
    ],
)
def test_invalid_options_of_a_pipeline_are_refused_at_once(options, message):
    with pytest.raises(InvalidSpec, match=message):
        Pipeline(**options)


def test_members_agree_on_options_before_a_generation():
    ours = Pipeline(microbatches=8, split_at=["1"]).options()
    assert ours == Pipeline(microbatches=8, split_at=("1",)).options()
    assert ours != Pipeline(microbatches=4, split_at=["1"]).options()
