"""A GradScaler registered with the session works as in torch's own loop, on all members
together."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from support.collectives.strategy_runs import entered, weights_of
from support.members.thread_members import lone
from support.training import equality
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shoal
from shoal.backends.in_memory.run import run_in_memory
from shoal.data.batches import Batch
from shoal.session.session import Session
from shoal.state.registered.objects import RegisteredState
from shoal.strategies.base import Strategy
from shoal.strategies.synchronous.loss_scale import update
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec

TOLERANCE = 1e-5
NUM_STEPS = 14
CLIP_VALUE = 1e-3
OVERFLOWS = (0, 6, 7)
"""Steps in which one sample's loss is infinite."""


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)


def loss_of(outputs: Tensor, batch: Batch) -> Tensor:
    """Return a loss with infinite gradients on the one member that has the batch's second
    sample."""
    loss = cross_entropy(outputs, batch.targets)
    place = 1 - batch.first
    if batch.step in OVERFLOWS and 0 <= place < len(batch.indices):
        loss = loss + outputs[place, 0] * torch.tensor(float("inf"))
    return loss


def by_torch(max_norm: float) -> tuple[dict[str, Tensor], float]:
    """Train by torch's own loop in one process; return weights and scale."""
    model, optimizer = equality.build("sgd", 0)
    own, loader = scaler(), equality.loader()
    for step in range(NUM_STEPS):
        batch = loader.synchronous(step, 0, 1)
        optimizer.zero_grad()
        own.scale(loss_of(model(batch.inputs), batch)).backward()
        own.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        own.step(optimizer)
        own.update()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}, own.get_scale()


def by_a_rank(
    made: Callable[[], Strategy], max_norm: float
) -> tuple[dict[str, Tensor], float, int]:
    strategy, registered = made(), RegisteredState()
    assert isinstance(strategy, SynchronousStrategy)
    own = scaler()
    registered.add("scaler", own)
    strategy.carry(registered)
    share, loader = entered(equality.run_of("sgd"), strategy), equality.loader()
    for step in range(NUM_STEPS):
        batch = loader.synchronous(step, *share)
        strategy.between_steps()
        strategy.begin_step()
        loss = loss_of(strategy.module(batch.inputs), batch)
        strategy.backward(own.scale(loss), batch.weight)
        strategy.clip_grad_norm(max_norm)
        strategy.end_step(lambda: None)
    weights = weights_of(strategy)
    strategy.close()
    return weights, own.get_scale(), strategy.step


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("ddp", 2), ("ddp", 3), ("zero1", 3), ("zero2", 2), ("fsdp", 3), ("tensor", 2)],
)
def test_an_overflow_on_one_member_skips_the_step_on_all(strategy: str, world_size: int) -> None:
    """Weights and scale are those of torch's own loop."""
    expected, scale = by_torch(0.1)
    assert scale not in (1024.0, 128.0), "the scale has gone down and up"
    for weights, own_scale, step in run_in_memory(
        by_a_rank, world_size, equality.made(strategy, world_size), 0.1
    ):
        assert own_scale == scale
        assert step == NUM_STEPS
        for name, tensor in expected.items():
            assert torch.allclose(weights[name], tensor, rtol=0, atol=TOLERANCE), name


def test_without_an_overflow_the_scale_grows() -> None:
    own = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1)
    for expected in (2.0**127, 2.0**127):
        update(own, overflowed=False)
        assert own.get_scale() == expected, "a scale stays finite"
    update(own, overflowed=True)
    assert own.get_scale() == 2.0**126


Body = Callable[[Session, Any, Any, torch.amp.GradScaler, shoal.Batch], None]


def run(
    cluster: LocalCluster, strategy: Any, body: Body, own: torch.amp.GradScaler
) -> Mapping[str, Tensor]:
    """Take two steps as a lone member; return the weights."""
    model, optimizer = equality.build("sgd", 0)
    with lone(cluster) as session:
        session.register("scaler", own)
        model, optimizer = session.distribute(model, optimizer, strategy=strategy)
        for batch in session.batches(equality.samples(), global_batch_size=10):
            with session.step():
                body(session, model, optimizer, own, batch)
            if batch.step == 1:
                break
        return session.state_dict()


def scaled(
    session: Session, model: Any, optimizer: Any, own: torch.amp.GradScaler, batch: shoal.Batch
) -> None:
    for part in batch.parts(2):
        session.backward(own.scale(cross_entropy(model(part.inputs), part.targets)))
    session.clip_grad_norm(1.0)


def test_a_session_takes_scaled_losses_of_a_registered_scaler(cluster: LocalCluster) -> None:
    """The scale grows after each step."""
    own = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    run(cluster, "fsdp", scaled, own)
    assert own.get_scale() == 32.0


def steps(*args: Any) -> None:
    scaled(*args)
    args[3].step(args[2])


def unscales(*args: Any) -> None:
    scaled(*args)
    args[3].unscale_(args[2])


def updates(*args: Any) -> None:
    scaled(*args)
    args[3].update()


def does_not_scale(*args: Any) -> None:
    session, model, _, _, batch = args
    session.backward(cross_entropy(model(batch.inputs), batch.targets))


def clips_scaled_values(*args: Any) -> None:
    session, model, _, own, batch = args
    session.backward(own.scale(cross_entropy(model(batch.inputs), batch.targets)))
    nn.utils.clip_grad_value_(model.parameters(), CLIP_VALUE)


@pytest.mark.parametrize(
    "made", [partial(shoal.DDP, find_unused_parameters=True), shoal.FSDP], ids=["ddp", "fsdp"]
)
def test_values_are_clipped_once_gradients_are_unscaled(
    cluster: LocalCluster, made: Callable[[], Strategy]
) -> None:
    """Regression: scaled gradients were clipped, and then divided by the scale."""

    def clips(*args: Any) -> None:
        session, model, _, own, batch = args
        session.backward(own.scale(cross_entropy(model(batch.inputs), batch.targets)))
        session.clip_grad_norm(math.inf)
        nn.utils.clip_grad_value_(model.parameters(), CLIP_VALUE)
        batches.append(batch)

    batches: list[shoal.Batch] = []
    trained = run(cluster, made(), clips, scaler())
    model, optimizer = equality.build("sgd", 0)
    for batch in batches:
        optimizer.zero_grad()
        cross_entropy(model(batch.inputs), batch.targets).backward()
        nn.utils.clip_grad_value_(model.parameters(), CLIP_VALUE)
        optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(trained[name], tensor)
    with pytest.raises(InvalidSpec, match=r"clip_grad_value_ under .* has scaled.*math\.inf"):
        run(cluster, made(), clips_scaled_values, scaler())


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (steps, r"scaler\.step\(\) itself"),
        (unscales, r"scaler\.unscale_\(\) itself"),
        (updates, r"scaler\.update\(\) itself"),
        (does_not_scale, "did not scale"),
    ],
)
def test_unscaled_losses_and_calls_that_the_session_makes_itself_are_refused(
    cluster: LocalCluster, body: Body, text: str
) -> None:
    with pytest.raises(InvalidSpec, match=text):
        run(cluster, "fsdp", body, scaler())


@pytest.mark.parametrize("strategy", ["pipeline", "hybrid", "compressed"])
def test_strategies_that_do_not_unscale_are_refused(cluster: LocalCluster, strategy: Any) -> None:
    chosen = shoal.DDP(compression="int8") if strategy == "compressed" else strategy
    with pytest.raises(InvalidSpec, match=r"does not unscale.*zero3, fsdp or hsdp.*fsdp-tensor"):
        run(cluster, chosen, scaled, scaler())


def test_a_scaler_that_is_refused_is_not_registered() -> None:
    """The script may register another object under its name."""
    model, optimizer = equality.build("sgd", 0)
    with shoal.join() as session:
        session.distribute(model, optimizer, shoal.DDP(compression="int8"))
        with pytest.raises(InvalidSpec, match="does not unscale"):
            session.register("scaler", scaler())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert session.register("scaler", schedule) is schedule
