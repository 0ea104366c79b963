"""BatchNorm over all members: the results of one process with the whole batch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives.late_groups import late_groups
from support.collectives.strategy_runs import (
    Rank,
    Run,
    by_a_rank,
    by_one_process,
    difference,
    take_step,
)
from support.models.seeding import draw_parameters
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from shoal.backends.in_memory.run import run_in_memory
from shoal.data.batches import Batch, Loader
from shoal.data.order import Order
from shoal.layouts.synced_batchnorm import sync_batchnorm
from shoal.session.micro_batches import loss_to_backward
from shoal.step_context import BatchNormMembers, StepContext, set_current
from shoal.strategies import find_strategy
from shoal_proto.errors import InvalidSpec

TOLERANCE = 1e-5
SIZE, NUM_STEPS = 7, 6


def model_of(kind: str) -> nn.Module:
    layers: dict[str, list[nn.Module]] = {
        "1d": [nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 4)],
        "2d": [
            nn.Unflatten(1, (1, 2, 3)),
            nn.Conv2d(1, 5, 2),
            nn.BatchNorm2d(5, momentum=None),
            nn.Flatten(),
            nn.Linear(10, 4),
        ],
        "no weights": [nn.Linear(6, 9), nn.BatchNorm1d(9, affine=False), nn.Linear(9, 4)],
    }
    model = nn.Sequential(*layers[kind])
    draw_parameters(model, 4)
    return model


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = 3.0 + 2.0 * torch.randn(23, 6, generator=generator)
    return inputs, torch.randn(23, 4, generator=generator)


def loader() -> Loader:
    return Loader(data(), Order(num_samples=23, global_batch_size=SIZE, num_epochs=9))


def run_of(kind: str, *, synced: bool) -> Run:
    def build(_: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = model_of(kind)
        assert not synced or sync_batchnorm(model, every=True) == 1
        return model, SGD(model.parameters(), lr=0.05, momentum=0.9)

    return Run(build=build, loader=loader, loss=nn.functional.mse_loss, num_steps=NUM_STEPS)


def take(rank: Rank, batch: Batch) -> None:
    """Take a step as a session does."""
    members = rank.strategy.batchnorm_members(has_samples=bool(batch.indices))
    set_current(StepContext(batchnorm=members))
    take_step(rank.strategy, batch, nn.functional.mse_loss)
    set_current(StepContext())


def trained(strategy: str, kind: str) -> dict[str, Tensor]:
    return by_a_rank(run_of(kind, synced=True), partial(find_strategy, strategy), take)


@pytest.mark.parametrize(
    ("strategy", "world_size", "kind"),
    [
        *(("ddp", 3, "1d"), ("ddp", 2, "2d"), ("ddp", 1, "1d"), ("ddp", 3, "no weights")),
        *(("zero1", 3, "2d"), ("zero2", 2, "1d"), ("fsdp", 3, "2d")),
    ],
)
def test_members_normalise_the_whole_batch(strategy: str, world_size: int, kind: str) -> None:
    """Shares differ in size; in the last batch of an epoch one of three members has no samples."""
    assert any(loader().order.span(step)[2] % SIZE for step in range(NUM_STEPS))
    expected = by_one_process(run_of(kind, synced=False))
    for ours in run_in_memory(trained, world_size, strategy, kind):
        assert difference(ours, expected) < TOLERANCE


IGNORED = -100


class Unlabelled(Loader):
    """A loader of class numbers, of which the first half of each batch has none."""

    def synchronous(self, step: int, index: int, count: int) -> Batch:
        batch = super().synchronous(step, index, count)
        start, stop = self.order.span(step)[1:]
        places = range(batch.first, batch.first + len(batch.targets))
        labels = [IGNORED if each < (stop - start + 1) // 2 else each % 4 for each in places]
        return replace(batch, targets=torch.tensor(labels))


class Recomputed(nn.Module):
    """The model of kind "1d", whose last layers run within a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model_of("1d")

    def forward(self, inputs: Tensor) -> Any:
        first, *rest = self.layers.children()
        return checkpoint(nn.Sequential(*rest), first(inputs), use_reentrant=True)


def labelled_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, ignore_index=IGNORED)


def by_labels(strategy: str, run: Run) -> dict[str, Tensor]:
    """Return the weights of a rank whose losses are weighted by their number of labels."""

    def take(rank: Rank, batch: Batch) -> None:
        members = rank.strategy.batchnorm_members(has_samples=bool(batch.indices))
        set_current(StepContext(batchnorm=members))
        rank.strategy.begin_step()
        loss = labelled_loss(rank.strategy.module(batch.inputs), batch.targets)
        num_labels = int((batch.targets != IGNORED).sum()) if batch.indices else 0
        with loss_to_backward(loss, num_labels) as counts:
            rank.strategy.backward_by_weight(counts, num_labels)
        rank.strategy.end_step(lambda: None)
        set_current(StepContext())

    return by_a_rank(run, partial(find_strategy, strategy), take)


@pytest.mark.parametrize(
    ("strategy", "make"),
    [("ddp", partial(model_of, "1d")), ("fsdp", partial(model_of, "1d")), ("ddp", Recomputed)],
)
def test_samples_of_a_loss_without_weight_count_in_the_statistics(
    strategy: str, make: Callable[[], nn.Module]
) -> None:
    """Regression: other members' gradients of these samples were dropped."""

    def build(synced: bool, _: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make()
        assert not synced or sync_batchnorm(model, every=True) == 1
        return model, SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loader() -> Loader:
        return Unlabelled(data(), Order(num_samples=23, global_batch_size=SIZE, num_epochs=9))

    run = Run(build=partial(build, False), loader=loader, loss=labelled_loss, num_steps=NUM_STEPS)
    expected = by_one_process(run)
    for ours in run_in_memory(by_labels, 2, strategy, replace(run, build=partial(build, True))):
        assert difference(ours, expected) < TOLERANCE


def _gradients(sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compute a rank's share of a mean loss over all samples: return its outputs and its gradients
    of the inputs."""
    inputs = data()[0][: sum(sizes)].clone().requires_grad_()
    factors = torch.arange(1.0, inputs.numel() + 1).view_as(inputs).sin()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert sum(sizes) == len(inputs)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    layer = nn.BatchNorm1d(6)
    sync_batchnorm(layer, every=True)
    group = dist.group.WORLD
    assert group is not None
    rows = inputs[own] if sizes[rank] else inputs[:1]
    members = BatchNormMembers(group, has_samples=bool(sizes[rank]))
    set_current(StepContext(batchnorm=members))
    outputs = layer(rows)
    counted = factors[own] if sizes[rank] else torch.zeros_like(rows)
    (outputs * counted).sum().backward()
    set_current(StepContext())
    assert inputs.grad is not None
    assert world_size == len(sizes)
    return outputs.detach()[: sizes[rank]], inputs.grad


@pytest.mark.parametrize("sizes", [[3, 4], [5, 0, 2]])
def test_outputs_and_gradients_are_those_of_the_whole(sizes: Sequence[int]) -> None:
    """Holds if a member has no samples: the sample with which it computes does not count."""
    inputs = data()[0][: sum(sizes)].clone().requires_grad_()
    factors = torch.arange(1.0, inputs.numel() + 1).view_as(inputs).sin()
    expected = nn.BatchNorm1d(6)(inputs)
    (expected * factors).sum().backward()
    found = run_in_memory(_gradients, len(sizes), sizes)
    assert torch.allclose(torch.cat([outputs for outputs, _ in found]), expected, atol=1e-5)
    assert inputs.grad is not None
    summed = torch.stack([gradient for _, gradient in found]).sum(0)
    assert torch.allclose(summed, inputs.grad, atol=1e-5)


def test_gradients_of_gradients_through_synced_layers_are_refused() -> None:
    """Regression: they took the normalised values for constants, also with one member."""

    def body() -> None:
        group = dist.group.WORLD
        assert group is not None
        layer = nn.BatchNorm1d(6)
        sync_batchnorm(layer, every=True)
        inputs = data()[0].requires_grad_()
        set_current(StepContext(batchnorm=BatchNormMembers(group, has_samples=True)))
        outputs = layer(inputs)
        with pytest.raises(InvalidSpec, match=r"differentiated again.*sync_batchnorm"):
            torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
        set_current(StepContext())

    run_in_memory(body, 1)


class Scaled(nn.BatchNorm1d):
    """A layer with a forward pass of its own."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name for it
        return 2.0 * super().forward(input)


class ScaledSync(nn.SyncBatchNorm):
    """A layer that a script has made to synchronise."""


def parametrized() -> nn.Module:
    layer = nn.BatchNorm1d(3)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


@pytest.mark.parametrize(
    ("layer", "every", "name"),
    [
        (Scaled(3), True, "Scaled"),
        (parametrized(), True, "ParametrizedBatchNorm1d"),
        (nn.LazyBatchNorm1d(affine=False), True, "LazyBatchNorm1d"),
        (ScaledSync(3), True, "ScaledSync"),
        (ScaledSync(3), False, "ScaledSync"),
    ],
)
def test_layers_of_other_classes_are_refused_before_any_change(
    layer: nn.Module, every: bool, name: str
) -> None:
    """Regression: they went on normalising over each member's own samples, without a word."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), layer)
    with pytest.raises(InvalidSpec, match=rf"saw 2 \({name}\)") as refused:
        sync_batchnorm(model, every=every)
    assert ("leave sync_batchnorm out" in str(refused.value)) == every, "advice to drop no option"
    assert type(model[0]) is nn.BatchNorm1d


def test_other_layers_are_not_refused() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), Scaled(3), nn.InstanceNorm1d(3))
    assert sync_batchnorm(model, every=False) == 0
    assert sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3), nn.InstanceNorm1d(3)), every=True) == 1


def test_synced_layers_outside_a_step_compute_what_plain_layers_do() -> None:
    plain, synced = nn.BatchNorm1d(6), nn.SyncBatchNorm(6)
    assert sync_batchnorm(plain, every=False) == 0
    assert sync_batchnorm(synced, every=False) == 1
    inputs = data()[0]
    assert torch.equal(plain(inputs), synced(inputs))
    assert torch.equal(plain.running_var, synced.running_var)  # type: ignore[arg-type]
    assert torch.equal(plain.eval()(inputs), synced.eval()(inputs))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_synced_layers_wait_for_the_results_of_collectives(strategy: str) -> None:
    """Holds if collectives seem done before their values arrive, as with NCCL."""
    expected = run_in_memory(trained, 3, strategy, "2d")
    with late_groups():
        late = run_in_memory(trained, 3, strategy, "2d")
    for ours, theirs in zip(late, expected, strict=True):
        assert difference(ours, theirs) == 0
