"""Bodies of members that train a generator and a discriminator, each with its own optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.models.seeding import seeded
from support.processes.ranks import Report
from support.training import elastic_bodies
from support.training.elastic_bodies import EPOCHS, Elastic, checkpoints_of, is_over, order
from support.training.rank_bodies import session_of
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from shoal.data.batches import Batch, Loader

NUM_SAMPLES = elastic_bodies.NUM_SAMPLES
WAYS = ("in turn", "at once", "by step")
"""Orders of updates in a step: the discriminator before the generator's loss; both at the end; or
only one of them, in turn."""


@dataclass(frozen=True, kw_only=True)
class Adversarial(Elastic):
    """A member's run."""

    way: str = "in turn"


@dataclass(frozen=True)
class Pair:
    """A generator and a discriminator with their optimizers."""

    generator: Any
    discriminator: Any
    of_generator: Optimizer
    of_discriminator: Optimizer


@dataclass(frozen=True)
class StepCalls:
    """Calls of one step: `backward(loss, optimizer)`, and `update(optimizer)` within the step."""

    backward: Callable[[Tensor, Optimizer], None]
    update: Callable[[Optimizer], None]


def pair() -> Pair:
    """Make both models and optimizers, which are the same on every member."""
    with seeded(8):
        generator = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 7))
        discriminator = nn.Sequential(
            *(nn.Linear(7, 11), nn.LayerNorm(11), nn.Tanh(), nn.Linear(11, 1))
        )
    return Pair(
        generator,
        discriminator,
        Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999), eps=1e-4),
        torch.optim.SGD(discriminator.parameters(), lr=0.02, momentum=0.9),
    )


def data() -> tuple[Tensor, Tensor]:
    """Return noise, and real samples for the discriminator."""
    generator = torch.Generator().manual_seed(17)
    noise = torch.randn(NUM_SAMPLES, 5, generator=generator)
    return noise, torch.randn(NUM_SAMPLES, 7, generator=generator).cumsum(1)


def learn(pair: Pair, batch: Batch, way: str, do: StepCalls) -> None:
    """Take one step, as GANs are commonly written."""
    noise, real, step = batch.inputs, batch.targets, batch.step
    fake = pair.generator(noise)

    def of_discriminator() -> Tensor:
        judged = pair.discriminator(real), pair.discriminator(fake.detach())
        return softplus(-judged[0]).mean() + softplus(judged[1]).mean()

    def of_generator() -> Tensor:
        return softplus(-pair.discriminator(fake)).mean()

    if way != "by step" or step % 2 == 0:
        do.backward(of_discriminator(), pair.of_discriminator)
    if way == "in turn":
        do.update(pair.of_discriminator)
    if way != "by step" or step % 2 == 1:
        do.backward(of_generator(), pair.of_generator)


def train(report: Report, run: Adversarial) -> None:
    """Train until the step in `stop_file`, and report both models."""
    made = pair()
    schedule = ExponentialLR(made.of_generator, 0.99)
    with session_of(run) as session:
        session.register("schedule", schedule)
        shown, _ = session.distribute(
            {"generator": made.generator, "discriminator": made.discriminator},
            [made.of_generator, made.of_discriminator],
            strategy=elastic_bodies.strategy_of(run),
            checkpoints=checkpoints_of(run),
        )
        held = Pair(
            shown["generator"],
            shown["discriminator"],
            made.of_generator,
            made.of_discriminator,
        )
        do = StepCalls(
            lambda loss, optimizer: session.backward(loss, optimizer=optimizer), session.update
        )
        last_share = elastic_bodies.noted_share(session)
        for batch in session.batches(data(), global_batch_size=run.batch_size, epochs=EPOCHS):
            if is_over(run.stop_file, batch.step):
                break
            tried = {"step": batch.step, "generation": session.generation}
            share = last_share()
            report("tried", **tried, share=share, epoch=batch.epoch, indices=batch.indices)
            with session.step() as step:
                learn(held, batch, run.way, do)
                schedule.step()
            if step.committed:
                report("committed", **tried)
        weights = {name: tensor.tolist() for name, tensor in session.state_dict().items()}
        report("finished", step=session.step_number, weights=weights)


def one_process(way: str, num_steps: int, batch_size: int) -> dict[str, Tensor]:
    """Train the same steps in plain torch; return both models."""
    made = pair()
    schedule = ExponentialLR(made.of_generator, 0.99)
    loader = Loader(data(), order(batch_size))
    due: list[Optimizer] = []

    def backward(loss: Tensor, optimizer: Optimizer) -> None:
        held = [one for group in optimizer.param_groups for one in group["params"]]
        loss.backward(inputs=held)  # type: ignore[no-untyped-call]
        due.append(optimizer)

    def update(optimizer: Optimizer) -> None:
        due.remove(optimizer)
        optimizer.step()

    for step in range(num_steps):
        batch = loader.synchronous(step, 0, 1)
        made.of_generator.zero_grad()
        made.of_discriminator.zero_grad()
        learn(made, batch, way, StepCalls(backward, update))
        while due:
            due.pop(0).step()
        schedule.step()
    both = nn.ModuleDict({"generator": made.generator, "discriminator": made.discriminator})
    return {name: tensor.detach() for name, tensor in both.state_dict().items()}
