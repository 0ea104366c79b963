"""Optimizer state of parameters that one member steps for all: none of it is lost unnoticed.

Ranks are threads; they go through generations in which some are lost or interrupted.
"""

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from support.collectives.generations import WAIT_S, JobRun, Lost, Member
from support.collectives.strategy_runs import Run, by_one_process, difference
from support.models.seeding import draw_parameters
from support.training import equality
from torch import Tensor, nn

import shoal
from shoal.data.batches import Batch
from shoal_proto.errors import GenerationBroken, StateLost

TOLERANCE = 1e-6
LATE_STEP = 4
"""The first step in which the late layer has gradients."""


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 4))
    draw_parameters(model, 0)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


RUN = Run(build=build, loader=equality.loader, loss=equality.loss, num_steps=8)


def drop(model: nn.Module, layer: str, step: int) -> None:
    """Drop the gradients of a layer before its first step."""
    if layer and step < LATE_STEP:
        for name, parameter in model.named_parameters():
            if name.startswith(layer):
                parameter.grad = None


def alone(layer: str = "") -> dict[str, Tensor]:
    """Return the weights that one process trains to."""

    def take(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        optimizer.zero_grad()
        equality.loss(model(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
        drop(model, layer, batch.step)
        optimizer.step()

    return by_one_process(RUN, take)


def zero1(copies: int = 1) -> shoal.Zero1:
    return shoal.Zero1(copies=copies, copy_every_steps=100)


def copied(member: Member, step: int) -> None:
    """Wait until the copy of the state after the step is complete, as peers know it."""
    copies = member.strategy._peer_checkpoints._copies
    give_up_s = time.monotonic() + 30.0
    while (copies.complete_step or 0) < step:
        assert time.monotonic() < give_up_s, "a copy is under way"
        time.sleep(0.001)


@pytest.mark.parametrize("lost", ["m0", "m1", "m2"])
@pytest.mark.parametrize("layer", ["0", "2", "4"])
def test_the_loss_of_a_late_layers_state_with_its_owner_is_noticed(layer: str, lost: str) -> None:
    """Regression: the others, which have its weights, trained the layer on with a new state, if the
    owner had no state of another layer."""
    together = threading.Barrier(3)

    def on_step(member: Member) -> None:
        if member.number == 1 and member.strategy.step == 3:
            copied(member, 1)
        if member.number == 1 and member.strategy.step == LATE_STEP + 1:
            together.wait(WAIT_S)
            raise Lost if member.name == lost else GenerationBroken("a peer is lost")

    def on_gradients(member: Member) -> None:
        drop(member.strategy.local_model, layer, member.strategy.step)

    job_run = JobRun(run=RUN, made=zero1, world_size=3, on_step=on_step, on_gradients=on_gradients)
    expected = alone(layer)
    for weights in job_run.weights():
        assert weights is None or difference(weights, expected) < TOLERANCE


def test_without_copies_the_job_ends_with_state_lost() -> None:
    together = threading.Barrier(3)

    def on_step(member: Member) -> None:
        if member.number == 2 and member.strategy.step == LATE_STEP + 1:
            together.wait(WAIT_S)
            raise Lost if member.name == "m1" else GenerationBroken("a peer is lost")
        if member.number == 1 and member.strategy.step == 2:
            together.wait(WAIT_S)
            raise GenerationBroken("all go on, and know what there is")

    def on_gradients(member: Member) -> None:
        drop(member.strategy.local_model, "0", member.strategy.step)

    job_run = JobRun(
        run=RUN,
        made=partial(zero1, 0),
        world_size=3,
        on_step=on_step,
        on_gradients=on_gradients,
    )
    with pytest.raises(StateLost, match=r"optim\.0\.weight"):
        job_run.weights()


@pytest.mark.parametrize("name", ["m0", "m1"])
@pytest.mark.parametrize("step", [0, 1, 2, 5])
def test_a_member_that_is_cut_within_its_update_lists_what_it_held(step: int, name: str) -> None:
    """Regression: in the first steps, before any member had learned the names, the others took what
    they had for the whole state. No member is lost here."""

    def cut_short(then: Callable[[], None]) -> None:
        then()
        raise GenerationBroken("the group is cut")

    def on_step(member: Member) -> None:
        if member.number == 1 and member.name == name and member.strategy.step == step:
            layout = member.strategy._binding.layout
            layout.stepped = partial(cut_short, layout.stepped)

    job_run = JobRun(run=RUN, made=zero1, world_size=2, on_step=on_step)
    expected = alone()
    for weights in job_run.weights():
        assert weights is not None and difference(weights, expected) < TOLERANCE
