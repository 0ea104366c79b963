"""Losses that are means over tokens train to the weights of one process, which takes the mean over
all tokens of the global batch, however these are distributed over members."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist
from support.collectives.strategy_runs import (
    Rank,
    StepOptions,
    by_a_rank,
    by_one_process,
    difference,
    enter,
)
from support.training import equality
from torch import Tensor, nn

import shoal
from shoal.backends.in_memory.run import run_in_memory
from shoal.data.batches import Batch, Loader
from shoal.layouts.base import LossFunction
from shoal.session.micro_batches import MicroBatches, loss_to_backward
from shoal.strategies.base import Strategy
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal_proto.errors import InvalidSpec

TOLERANCE = 1e-5
NUM_STEPS = 12
IGNORED = -100


class Padded(Loader):
    """A loader in which seven samples of ten are padding, and in one step all samples of a
    member."""

    def synchronous(self, step: int, index: int, count: int) -> Batch:
        batch = super().synchronous(step, index, count)
        places = range(batch.first, batch.first + len(batch.targets))
        for row, place in enumerate(places):
            if (place * 7 + step) % 10 < 7 or (step == 4 and place < 4):
                batch.targets[row] = IGNORED
        return batch


def loader() -> Loader:
    return Padded(equality.samples(), equality.loader().order)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, ignore_index=IGNORED)


def masked_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the same loss as scripts with a mask do: without tokens, forward and backward divide
    0 by 0."""
    mask = (targets != IGNORED).float()
    each = nn.functional.cross_entropy(outputs, targets.clamp(min=0), reduction="none")
    return (each * mask).sum() / mask.sum()


RUN = replace(equality.run_of("sgd", num_steps=NUM_STEPS), loader=loader, loss=loss)


def by_tokens(
    made: Callable[[], Strategy], num_parts: int, max_norm: float, loss: LossFunction = loss
) -> dict[str, Tensor]:
    """Return the weights of a rank after training."""

    def take(rank: Rank, batch: Batch) -> None:
        strategy = rank.strategy
        strategy.begin_step()
        of_step = MicroBatches(strategy, batch, 100)
        for part in of_step.parts(batch, num_parts):
            of_step.begin_pass(by_weight=True)
            found = loss(strategy.module(part.inputs), part.targets)
            num_tokens = of_step.counted((part.targets != IGNORED).sum())
            with loss_to_backward(found, num_tokens) as counts:
                strategy.backward_by_weight(counts, num_tokens)
        if math.isfinite(max_norm):
            strategy.clip_grad_norm(max_norm)
        strategy.end_step(lambda: None)

    return by_a_rank(RUN, made, take)


@pytest.mark.sampled()
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize(
    ("strategy", "world_size", "max_norm"),
    [
        *(("ddp", 2, math.inf), ("ddp", 3, 0.1), ("zero1", 3, 0.1), ("fsdp", 3, math.inf)),
        *(("zero2", 2, 0.1), ("tensor", 2, 0.1), ("fsdp-tensor", 4, 0.1)),
        ("hybrid", 2, math.inf),
    ],
)
def test_each_token_counts_alike(
    strategy: str, world_size: int, max_norm: float, num_parts: int
) -> None:
    expected = by_one_process(replace(RUN, step_options=StepOptions(max_norm=max_norm)))
    made = equality.made(strategy, world_size)
    for ours in run_in_memory(by_tokens, world_size, made, num_parts, max_norm):
        assert difference(ours, expected) < TOLERANCE


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "tensor"])
def test_a_loss_over_no_tokens_counts_for_nothing(strategy: str) -> None:
    world_size = 2 if strategy == "tensor" else 3
    made, expected = equality.made(strategy, world_size), by_one_process(RUN)
    for ours in run_in_memory(by_tokens, world_size, made, 3, math.inf, masked_loss):
        assert difference(ours, expected) < TOLERANCE


def refused(made: Callable[[], Strategy], weights: list[float | None]) -> str:
    """Return the refusal of a rank whose loss has its weight of `weights`."""
    strategy = made()
    assert isinstance(strategy, SynchronousStrategy)
    share = enter(equality.run_of("sgd"), strategy).share
    batch, weight = equality.loader().synchronous(0, *share), weights[dist.get_rank()]
    strategy.begin_step()
    found = equality.loss(strategy.module(batch.inputs), batch.targets)
    if weight is None:
        strategy.backward(found, batch.weight)
    else:
        strategy.backward_by_weight(found, weight)
    try:
        strategy.end_step(lambda: None)
    except InvalidSpec as error:
        dist.barrier()
        return str(error)
    finally:
        strategy.close()
    raise AssertionError(f"committed step {strategy.step}")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("weights", "words"),
    [([3.0, None], "have a weight, others have none"), ([0.0, 0.0], "all have weight 0")],
)
def test_weights_that_do_not_go_together_are_refused_on_all(
    strategy: str, weights: list[float | None], words: str
) -> None:
    found = run_in_memory(refused, 2, equality.made(strategy, 2), weights)
    assert len(set(found)) == 1
    assert words in found[0]


@pytest.mark.parametrize("strategy", [shoal.DDP, shoal.Zero1])
def test_compressed_gradients_are_refused(strategy: Callable[..., Strategy]) -> None:
    model, optimizer = equality.build("sgd", 0)
    made = strategy(compression="int8")
    made.distribute(model, optimizer)
    with pytest.raises(InvalidSpec, match="compress"):
        made.backward_by_weight(model.idle.sum(), 3.0)  # type: ignore[operator,union-attr]


@pytest.mark.parametrize("strategy", [shoal.LocalSGD, shoal.AsyncSGD])
def test_weights_of_losses_are_refused_under_local_sgd_and_async_sgd(
    strategy: Callable[..., Strategy],
) -> None:
    model, _ = equality.build("sgd", 0)
    with pytest.raises(
        InvalidSpec, match=r"only.*zero3, fsdp, hsdp, tensor, fsdp-tensor, or hybrid without stages"
    ):
        strategy().backward_by_weight(model.idle.sum(), 3.0)  # type: ignore[operator,union-attr]
