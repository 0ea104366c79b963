"""A model in stages, which trains to the weights of one process."""

import copy
import functools
import gc
import threading
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.models import pipeline_models as models
from support.processes.worlds import (
    LaidOutTraining,
    Training,
    assemble,
    largest_difference,
    one_process,
    run_on_gloo,
    this_world,
    train_rank,
)
from torch import Tensor, nn

import shoal
from shoal import randomness
from shoal.layouts.base import World
from shoal.layouts.pipeline.layout import MAX_SHAPES, PipelineLayout, ScheduleSpec
from shoal.layouts.pipeline.schedules import num_microbatches
from shoal.layouts.pipeline.stage_splitter import StageSplitter
from shoal.randomness.dropout import key_dropout
from shoal_proto.errors import InvalidSpec

# Sums over micro-batches are taken in another order than over a batch: single roundings of fp32.
TOLERANCE = 1e-5
DATA = {
    models.perceptron: (models.numbers, models.squared),
    models.Counted: (models.numbers, models.squared),
    models.transformer: (models.tokens, models.next_token),
    models.tied_transformer: (models.tokens, models.next_token),
}


def in_stages(
    model: nn.Module, world: World, schedule: str = "1f1b", microbatches: int = 4
) -> PipelineLayout:
    splitter = StageSplitter()
    outline = splitter.outline(model, world.world_size)
    cut = outline, splitter.stage_of(outline, world.world_size)
    return PipelineLayout(
        model, world, cut, ScheduleSpec(schedule=schedule, microbatches=microbatches)
    )


def training(model, optimizer=models.momentum, **options) -> Training:
    data, loss = DATA[model]
    settings = {"num_steps": 6, "interleaved": True, **options}
    return Training(model=model, optimizer=optimizer, data=data, loss=loss, **settings)


def check_equal(done: Training, state_shards) -> None:
    ours, theirs = assemble(state_shards), one_process(done)
    model, _ = done.build()
    buffers = {name for name, _ in model.named_buffers()}
    assert set(ours) == {name for name, _ in model.named_parameters()} | buffers
    # One name of a tied parameter is enough; state_dict has both.
    theirs = {name: tensor for name, tensor in theirs.items() if name in ours}
    assert largest_difference(ours, theirs) <= TOLERANCE


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("model", "world_size", "schedule", "optimizer"),
    [
        (models.perceptron, 2, "gpipe", models.momentum),
        (models.perceptron, 3, "1f1b", models.adamw),
        (models.perceptron, 4, "1f1b", models.momentum),
        (models.transformer, 2, "1f1b", models.adamw),
        (models.transformer, 4, "gpipe", models.momentum),
        (models.transformer, 8, "1f1b", models.momentum),
        (models.tied_transformer, 2, "gpipe", models.adamw),
        (models.tied_transformer, 3, "1f1b", models.momentum),
    ],
)
def test_equals_one_process(model, world_size, schedule, optimizer):
    done = training(model, optimizer)
    lay_out = functools.partial(in_stages, schedule=schedule)
    check_equal(done, shoal.run_in_memory(train_rank, world_size, done, lay_out))


@pytest.mark.long
def test_equals_one_process_after_fifty_steps_of_gpipe():
    """1F1B is tested in `test_equality` of the strategies."""
    done = training(models.tied_transformer, models.adamw, num_steps=50)
    lay_out = functools.partial(in_stages, schedule="gpipe")
    check_equal(done, shoal.run_in_memory(train_rank, 3, done, lay_out))


def test_equals_one_process_over_gloo():
    done = training(models.tied_transformer, num_steps=3)
    check_equal(done, run_on_gloo(3, train_rank, done, in_stages))


@pytest.mark.parametrize(("batch_size", "count"), [(7, 1), (9, 3), (10, 2), (12, 4), (3, 3)])
def test_a_batch_that_the_microbatches_do_not_divide_is_cut_into_fewer(batch_size, count):
    assert num_microbatches(batch_size, 4) == count
    done = training(models.perceptron, batch_size=batch_size)
    check_equal(done, shoal.run_in_memory(train_rank, 2, done, in_stages))


def test_gradients_add_up_over_several_passes():
    done = training(models.tied_transformer, accumulate=3)
    check_equal(done, shoal.run_in_memory(train_rank, 3, done, in_stages))


def test_statistics_in_buffers_see_each_microbatch_once():
    """The probe of shapes leaves no trace, and the statistics are those of micro-batches."""

    def body() -> int:
        torch.manual_seed(0)
        layout = in_stages(models.Counted(), this_world(), microbatches=3)
        inputs, targets = models.numbers()
        for _ in range(2):
            layout.forward_backward(inputs[:12], targets[:12], models.squared, 1.0)
        found = {name: int(t) for name, t in layout.held.items() if name.endswith("tracked")}
        return found.get("norm.num_batches_tracked", -1)

    assert sorted(shoal.run_in_memory(body, 2)) == [-1, 6]


def test_a_parameter_without_a_gradient_stays_as_it_is():
    done = training(models.Counted, models.adamw)
    ours = assemble(shoal.run_in_memory(train_rank, 2, done, in_stages))
    assert torch.equal(ours["idle"], torch.ones(3, dtype=torch.float64))


def with_weights(make, world: World, **options) -> PipelineLayout:
    """Return a layout with the weights that the model was made with."""
    done = training(make)
    return LaidOutTraining(done, functools.partial(in_stages, **options), world).layout


@pytest.mark.long
def test_batches_of_changing_size_give_the_gradients_of_the_whole_batch():
    inputs, targets = models.tokens()

    def body() -> list[dict[str, Tensor]]:
        layout = with_weights(models.tied_transformer, this_world())
        found = []
        for size in (8, 6, 8, 5, *range(10, 10 + MAX_SHAPES), 8):
            for parameter in layout.parameters.values():
                parameter.grad = None
            layout.begin()
            layout.forward_backward(inputs[:size], targets[:size], models.next_token, 1.0)
            layout.reduce()
            found.append({n: p.grad.clone() for n, p in layout.parameters.items()})
        return found

    ranks = shoal.run_in_memory(body, 3)
    model, _ = training(models.tied_transformer).build()
    for turn, size in enumerate((8, 6, 8, 5, *range(10, 10 + MAX_SHAPES), 8)):
        model.zero_grad()
        models.next_token(model(inputs[:size]), targets[:size]).backward()
        for name, parameter in model.named_parameters():
            for found in (rank[turn][name] for rank in ranks if name in rank[turn]):
                torch.testing.assert_close(found, parameter.grad, rtol=0, atol=1e-6)


class Forgetful(nn.Module):
    """A model with dropout in every layer; the second layer's forward pass is recomputed in
    backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(5, 6), nn.Dropout(0.4)
        self.second = models.Recomputed(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)))
        self.third = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.third(self.second(self.drop(self.first(x))))
        return out


def test_dropout_masks_do_not_depend_on_stages_and_microbatches():
    inputs, targets = models.numbers()
    torch.manual_seed(0)
    model = Forgetful()
    key_dropout(model)
    weights = [parameter.detach().clone() for parameter in model.parameters()]

    def body() -> dict[str, Tensor]:
        layout = in_stages(copy.deepcopy(model).to("meta"), this_world())
        known = dict(zip(dict(model.named_parameters()), weights, strict=True))
        with torch.no_grad():
            for name, parameter in layout.parameters.items():
                parameter.copy_(known[name])
        with randomness.at(seed=3, step=2, first=4, count=12):
            layout.forward_backward(inputs[:12], targets[:12], models.squared, 1.0)
        return {name: p.grad for name, p in layout.parameters.items() if p.grad is not None}

    ranks = shoal.run_in_memory(body, 3)
    with randomness.at(seed=3, step=2, first=4, count=12):
        models.squared(model(inputs[:12]), targets[:12]).backward()
    found = {name: gradient for rank in ranks for name, gradient in rank.items()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_every_rank_gets_the_mean_loss_of_the_batch():
    inputs, targets = models.numbers()

    def body() -> float:
        layout = with_weights(models.perceptron, this_world())
        # The weight applies to gradients; the loss is that of the samples.
        return float(layout.forward_backward(inputs, targets, models.squared, 0.25))

    losses = shoal.run_in_memory(body, 3)
    model, _ = training(models.perceptron).build()
    expected = models.squared(model(inputs), targets).item()
    assert losses == pytest.approx([expected] * 3)


def test_evaluation_gives_every_rank_the_outputs_of_the_whole_model():
    inputs, _ = models.tokens()

    def body() -> tuple[Tensor, Tensor]:
        layout = with_weights(models.transformer, this_world())
        layout.plain.eval()
        with torch.no_grad():
            return layout.plain(inputs[:7]), layout.module(ids=inputs[:3])

    model, _ = training(models.transformer).build()
    for seven, three in shoal.run_in_memory(body, 4):
        torch.testing.assert_close(seven, model(inputs[:7]))
        torch.testing.assert_close(three, model(inputs[:3]))


def test_outputs_of_any_shape_come_back_and_go_into_the_loss():
    inputs, targets = models.numbers()

    def loss(outputs, expected: Tensor) -> Tensor:
        assert outputs["parts"][1:] == [7, None]
        return models.squared(outputs["out"], expected)

    def body():
        torch.manual_seed(1)
        layout = in_stages(models.ManyOutputs(), this_world())
        for parameter in layout.parameters.values():
            nn.init.constant_(parameter, 0.5)
        layout.forward_backward(inputs[:8], targets[:8], loss, 1.0)
        with torch.no_grad():
            return layout.module(inputs)

    for outputs in shoal.run_in_memory(body, 2):
        assert outputs["out"].shape == (30, 2)
        assert outputs["parts"][0].dtype == torch.int64
        assert outputs["parts"][1:] == [7, None]


def test_a_layout_can_be_released_twice():
    """Every layout allows it: the first release may have been that of a failed bring-up."""

    def body() -> None:
        layout = in_stages(models.perceptron(), this_world())
        layout.release()
        layout.release()

    shoal.run_in_memory(body, 2)


def test_a_released_layout_keeps_no_group_however_many_shapes_batches_had():
    """Regression: schedules that were given up for newer ones kept theirs in reference cycles."""
    inputs, targets = models.numbers()

    def body() -> bool:
        group = dist.new_group()
        alive = weakref.ref(group)
        layout = in_stages(models.perceptron(), replace(this_world(), group=group))
        for size in range(1, MAX_SHAPES + 2):
            layout.begin()
            layout.forward_backward(inputs[:size], targets[:size], models.squared, 1.0)
        layout.release()
        dist.destroy_process_group(group)
        del group
        return alive() is None

    gc.collect()
    gc.disable()
    try:
        assert shoal.run_in_memory(body, 1) == [True]
    finally:
        gc.enable()


def test_calling_the_model_with_gradients_names_what_to_call_instead():
    def body() -> list[str]:
        layout = in_stages(models.perceptron(), this_world())
        texts = []
        for attempt in (
            lambda: layout.module(torch.zeros(2, 5)),
            lambda: layout.plain(torch.zeros(2, 5)),
            lambda: layout.backward(torch.zeros(()), 1.0),
        ):
            with pytest.raises(InvalidSpec) as refused:
                attempt()
            texts.append(str(refused.value))
        return texts

    for messages in shoal.run_in_memory(body, 2):
        assert all("session.forward_backward" in each for each in messages)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), FailingLayer()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


class FailingLayer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            raise KeyError("the user's own")
        return super().forward(x)


def test_an_error_of_the_users_code_is_raised_unchanged_and_ends_the_other_ranks():
    """The layer fails at its third call."""
    met: list[str] = []
    lock = threading.Lock()

    def body() -> None:
        layout = in_stages(Failing(), this_world())
        inputs, targets = models.numbers()
        try:
            layout.forward_backward(inputs[:8], targets[:8], models.squared, 1.0)
        except Exception as error:
            with lock:
                met.append(type(error).__name__)
            raise

    with pytest.raises(KeyError, match="the user's own"):
        shoal.run_in_memory(body, 2, timeout_s=20)
    assert len(met) == 2


def test_a_value_between_stages_that_is_no_tensor_is_refused():
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:  # type: ignore[override]
            return super().forward(x), 3

    class Unpacks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = Pair(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            x, factor = self.first(x)
            out: Tensor = self.third(self.second(x)) * factor
            return out

    def body() -> None:
        layout = in_stages(Unpacks(), this_world())
        inputs, targets = models.numbers()
        layout.forward_backward(inputs[:8], targets[:8], models.squared, 1.0)

    with pytest.raises(
        InvalidSpec, match="stage 0 sends the next stage something that is not a tensor; saw int"
    ):
        shoal.run_in_memory(body, 2)
