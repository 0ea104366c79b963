"""Batches with fewer samples than members, and shares with fewer samples than parts: a stand-in for
a sample has no effect, neither a gradient of zeros nor a count."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives.strategy_runs import (
    Run,
    StepOptions,
    by_a_rank,
    by_one_process,
    difference,
    entered,
    take_step,
)
from support.models.seeding import seeded
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import shoal
from shoal import randomness
from shoal.backends.in_memory.run import run_in_memory
from shoal.data.batches import Loader
from shoal.data.order import Order
from shoal.session.micro_batches import MicroBatches
from shoal.step_context import PresentSamples, StepContext, set_current
from shoal.strategies.base import Strategy
from shoal.strategies.synchronous.strategy import SynchronousStrategy

NUM_EXPERTS = 3
SAMPLES = torch.tensor([[0.0, 1.0], [1.0, 0.5], [2.0, -1.0], [0.0, 2.0]])
"""Samples; the first number chooses the expert."""


class Experts(nn.Module):
    """Computes each sample with one of its experts, and counts samples by expert. It is one layer,
    also for strategies that cut a model between layers."""

    hits: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        for number in range(NUM_EXPERTS):
            setattr(self, f"expert{number}", nn.Parameter(torch.randn(2, 2)))
        self.register_buffer("hits", torch.zeros(NUM_EXPERTS))
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.is_counting = False

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = torch.zeros_like(inputs)
        for number in range(NUM_EXPERTS):
            chosen = inputs[:, 0] == number
            if self.is_counting:
                self.hits[number] += chosen.sum()
            if chosen.any():
                outputs[chosen] = inputs[chosen] @ getattr(self, f"expert{number}")
        if self.is_counting:
            self.seen += len(inputs)
        return outputs


def build(optimizer: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    with seeded(seed):
        model = nn.Sequential(Experts(), nn.Linear(2, 1))
    if optimizer == "adamw":
        return model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)


def loader(batch_size: int) -> Loader:
    order = Order(num_samples=4, global_batch_size=batch_size, num_epochs=9, shuffle=False)
    return Loader((SAMPLES, torch.ones(4, 1)), order)


def run_of(optimizer: str, batch_size: int, step_options: StepOptions) -> Run:
    return Run(
        build=partial(build, optimizer),
        loader=partial(loader, batch_size),
        loss=mse_loss,
        num_steps=8,
        step_options=step_options,
    )


MADE: Mapping[str, Callable[..., Strategy]] = {
    "ddp": partial(shoal.DDP, find_unused_parameters=True),
    "zero1": partial(shoal.Zero1, find_unused_parameters=True, copies=0),
    "zero2": partial(shoal.Zero2, copies=0),
    "fsdp": partial(shoal.FSDP, copies=0),
    "hsdp": partial(shoal.HSDP, shard=2, copies=0),
    "tensor": partial(shoal.TensorParallel, copies=0),
    "fsdp-tensor": partial(shoal.FSDPTensor, copies=0),
    "pipeline": partial(shoal.Pipeline, microbatches=1, copies=0),
    "hybrid": partial(shoal.Hybrid, pipeline=2, tensor=1, copies=0, microbatches=1),
}
WORLDS = {"tensor": 2, "pipeline": 2, "hsdp": 4, "fsdp-tensor": 4, "hybrid": 4}


@pytest.mark.sampled()
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("parts", [1, 2], ids=["whole", "in parts"])
@pytest.mark.parametrize("strategy", MADE)
def test_parameters_that_only_stand_ins_would_use_do_not_change(
    strategy: str, parts: int, optimizer: str
) -> None:
    """Weight decay, momentum and Adam's averages do not change it, as in one process. Regression:
    members without samples computed the data set's first sample, whose expert got a gradient of
    zeros, or waited for other members at a layer that these had left out."""
    step_options = StepOptions(parts_of_session=(parts,)) if parts > 1 else StepOptions()
    expected = by_one_process(run_of(optimizer, 1, StepOptions()))
    for ours in run_in_memory(
        by_a_rank, WORLDS.get(strategy, 3), run_of(optimizer, 1, step_options), MADE[strategy]
    ):
        assert difference(ours, expected) < 1e-5


def gradients_of_a_step(made: Callable[[], Strategy], parts: int) -> dict[str, bool]:
    """Return, by parameter of the experts, if it has a gradient on this rank after the passes of
    the batch whose only sample is for expert 1."""
    run = run_of("sgd", 1, StepOptions())
    strategy = made()
    assert isinstance(strategy, SynchronousStrategy)
    share = entered(run, strategy)
    take_step(strategy, run.loader().synchronous(0, *share), run.loss)
    batch = run.loader().synchronous(1, *share)
    strategy.begin_step()
    of_step = MicroBatches(strategy, batch, 9)
    set_current(StepContext(parts=of_step))
    for part in batch.parts(parts):
        strategy.forward_backward(
            part.inputs, part.targets, lambda *given: run.loss(*given) / parts, batch.weight
        )
        of_step.begin_pass()
    set_current(StepContext())
    with torch.no_grad():
        held = dict(strategy.module.named_parameters())
    found = {name: each.grad is not None for name, each in held.items() if "expert" in name}
    strategy.end_step(lambda: None)
    strategy.close()
    return found


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("strategy", [*MADE, "local-sgd", "diloco"])
def test_a_parameter_that_no_sample_used_has_no_gradient_after_the_passes(
    strategy: str, parts: int
) -> None:
    made = {**MADE, "local-sgd": shoal.LocalSGD, "diloco": shoal.DiLoCo}[strategy]
    found = run_in_memory(gradients_of_a_step, WORLDS.get(strategy, 3), made, parts)
    for rank, held in enumerate(found):
        # Between two rounds, members without samples have no gradients.
        has_sample = rank == 0 or strategy not in ("local-sgd", "diloco")
        for name, has_gradient in held.items():
            is_of_another = strategy == "zero1" and not has_gradient
            assert has_gradient == ("expert1" in name and has_sample) or is_of_another, (rank, name)
    assert any(found[0].values()) or any(found[1].values())


def counts_of(made: Callable[[], Strategy], parts: int) -> tuple[list[float], float, list[float]]:
    """Return what a rank's model has counted after four steps of three samples: hits by expert and
    all samples; and the actual hits by expert."""
    run = run_of("sgd", 3, StepOptions(parts_of_session=(parts,)))
    strategy = made()
    assert isinstance(strategy, SynchronousStrategy)
    share = entered(run, strategy)
    experts: Any = next(m for m in strategy.local_model.modules() if isinstance(m, Experts))
    experts.is_counting = True
    had = [0.0] * NUM_EXPERTS
    for step in range(4):
        batch = run.loader().synchronous(step, *share)
        for index in batch.indices:
            had[int(SAMPLES[index, 0])] += 1
        take_step(strategy, batch, run.loss, run.step_options)
    counted = experts.hits.tolist(), float(experts.seen)
    strategy.close()
    return *counted, had


@pytest.mark.parametrize("strategy", ["ddp", "local-sgd"])
def test_buffers_count_no_stand_ins(strategy: str) -> None:
    """Holds for an empty part, too. Under ddp all members have the first one's counts."""
    made = {**MADE, "local-sgd": partial(shoal.LocalSGD, every_steps=99)}[strategy]
    found = run_in_memory(counts_of, 4, made, 2)
    own = found[0][2]
    for hits, seen, had in found:
        assert hits == (own if strategy == "ddp" else had)
        assert strategy == "ddp" or seen == sum(had)
    assert found[0][1] == sum(own)


@pytest.mark.parametrize("strategy", ["tensor", "fsdp", "pipeline"])
def test_an_empty_part_leaves_running_statistics_as_they_are(strategy: str) -> None:
    """BatchNorm's statistics are those of the two parts that have samples."""
    found = run_in_memory(normalised, 2, MADE[strategy], (3 if strategy != "fsdp" else 2))
    for state in found:
        assert float(state["0.num_batches_tracked"]) == (2 if strategy != "fsdp" else 1)


def normalised(made: Callable[[], Strategy], parts: int) -> Mapping[str, Tensor]:
    """Return a rank's state after a step of two samples in `parts` parts, each normalised over its
    rows."""

    def build(_: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        with seeded(0):
            model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(5, 1))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def made_loader() -> Loader:
        inputs = torch.arange(40.0).view(2, 4, 5)
        return Loader((inputs, torch.ones(2, 4, 1)), Order(num_samples=2, global_batch_size=2))

    step_options = StepOptions(parts_of_session=(parts,))
    run = Run(
        build=build, loader=made_loader, loss=mse_loss, num_steps=1, step_options=step_options
    )
    return by_a_rank(run, made)


def test_a_stand_in_is_a_sample_of_the_same_batch() -> None:
    """The stand-in is the first member's sample, also with shuffled samples and in the last,
    smaller batch. It does not count."""
    order = Order(num_samples=7, global_batch_size=3, num_epochs=2)
    made = Loader((torch.arange(7),), order)
    for step in range(order.num_steps):
        batches = [made.synchronous(step, rank, 5) for rank in range(5)]
        for batch in batches:
            assert batch.is_stand_in == (not batch.indices) == (batch.weight == 0)
            assert batch.num_samples == len(batch.indices)
            expected = batch.indices or batches[0].indices
            assert batch.inputs.tolist() == expected


def drawn_in_parts(num_parts: int, size: int) -> list[tuple[float, float]]:
    """Return what the passes of each part draw from torch's generator, and from the one keyed by
    sample."""
    order = Order(num_samples=8, global_batch_size=size)
    batch = Loader((SAMPLES[:, 0].repeat(2),), order).synchronous(0, 0, 1)
    model = nn.Linear(1, 1)
    strategy: Any = shoal.LocalSGD()
    strategy.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    # There is no generation in which members could vote on a part.
    strategy.begin_part = lambda index, num_parts: None
    randomness.seed_torch(1, 2, 3)
    of_step = MicroBatches(strategy, batch, 9)
    samples = PresentSamples(seed=1, step=2, first=0, count=size)
    set_current(StepContext(samples=samples, parts=of_step))
    found = []
    for _ in batch.parts(num_parts):
        keyed = torch.rand((), generator=randomness.sample_generator())
        found.append((float(torch.rand(())), float(keyed)))
        of_step.begin_pass()
    set_current(StepContext())
    return found


def test_an_empty_part_draws_what_the_first_one_drew() -> None:
    """A layer that is skipped at random is used by a stand-in only if a real sample uses it."""
    first, second, third, fourth = drawn_in_parts(4, 2)
    assert first == third == fourth
    assert first != second
    assert dist.is_initialized() is False
