"""Bodies of members whose steps differ: in the number of passes, the learning rate, or clipping."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from support.processes.ranks import Report
from support.training import elastic_bodies
from support.training.elastic_bodies import Elastic, build, is_over
from support.training.elastic_bodies import numbers as data
from support.training.rank_bodies import session_of
from torch import Tensor
from torch.nn.functional import cross_entropy

from shoal.data.batches import Batch, Loader
from shoal.data.order import Order
from shoal.layouts.base import LossFunction
from shoal.session.session import Session

EPOCHS = elastic_bodies.EPOCHS


@dataclass(frozen=True, kw_only=True)
class Steps(Elastic):
    """A member's run."""

    parts: str = ""
    """Division of a share into passes: "fixed size", "fixed number", "more on the first", "by the
    session"; empty: one pass."""
    dies_at: int = -1
    """Step in whose second part this member is killed."""
    scales: bool = False
    """True if losses are scaled by a registered GradScaler."""
    in_one_call: bool = True
    """True if both passes of a part use `forward_backward`."""
    rates: str = ""
    """Source of the learning rate: "schedule", "schedule if committed", "schedule by its own count,
    if committed", "step", "own" (the last member has another rate from step 5 on)."""
    clips: str = ""
    """Clipping of gradients from step 5 on: "own" (to another norm on the last member), "but one"
    (on all members but the last), "own by torch" (as "own", with torch's function), "asks for the
    norm" (the last member computes it), "drops" (the last member drops a gradient)."""


def rate(step: int) -> float:
    return 0.02 * 0.97**step


@dataclass
class Schedule:
    """A scheduler of the script, which is not registered."""

    optimizer: torch.optim.Optimizer
    counts: bool
    """True: the rate depends on the number of calls. False: each call lowers the current rate."""
    num_steps: int = 0

    def step(self) -> None:
        self.num_steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.num_steps) if self.counts else 0.97 * group["lr"]


def cut(run: Steps, batch: Batch, rank: int) -> Iterator[tuple[Batch, float]]:
    """Yield the parts of a batch, each with the fraction by which its loss is to be scaled."""
    if run.parts == "by the session":
        for index, part in enumerate(batch.parts(3)):
            if batch.step == run.dies_at and index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            yield part, 1.0
        return
    size = len(batch.inputs)
    if run.parts == "fixed size":
        lengths = [len(part) for part in batch.inputs.split(11)]
    elif run.parts:
        lengths = [len(part) for part in batch.inputs.tensor_split(4)]
    else:
        lengths = [size]
    parts = list(zip(batch.inputs.split(lengths), batch.targets.split(lengths), strict=True))
    if run.parts == "more on the first" and rank:
        parts.pop()
    for inputs, targets in parts:
        yield replace(batch, inputs=inputs, targets=targets), len(inputs) / size


def train(report: Report, run: Steps) -> None:
    """Train until the step in `stop_file`, and report the whole model."""
    model, optimizer = build(run.optimizer, "layers")
    schedule = Schedule(optimizer, counts="own count" in run.rates)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=20, enabled=run.scales)
    with session_of(run) as session:
        model, optimizer = session.distribute(
            model, optimizer, strategy=elastic_bodies.strategy_of(run)
        )
        if run.scales:
            session.register("scaler", scaler)
        for batch in session.batches(data(), global_batch_size=run.batch_size, epochs=EPOCHS):
            if is_over(run.stop_file, batch.step):
                break
            if run.rates == "step":
                for group in optimizer.param_groups:
                    group["lr"] = rate(batch.step)
            elif run.rates == "own" and batch.step >= 5 and session.rank == session.world_size - 1:
                optimizer.param_groups[0]["lr"] = 0.0125
            report_try(report, session, batch, optimizer)
            with session.step() as step:
                for part, fraction in cut(run, batch, session.rank):
                    take(session, model, part, partial(loss_of, fraction, scaler), run)
                if run.clips and batch.step >= 5:
                    clip(session, model, run.clips)
            if step.committed:
                report("committed", step=batch.step, generation=session.generation)
            if run.rates == "schedule" or (step.committed and "committed" in run.rates):
                schedule.step()
        weights = {name: tensor.tolist() for name, tensor in session.state_dict().items()}
        scale = scaler.get_scale()
        report("finished", step=session.step_number, weights=weights, scale=scale)


def report_try(
    report: Report, session: Session, batch: Batch, optimizer: torch.optim.Optimizer
) -> None:
    report(
        "tried",
        step=batch.step,
        generation=session.generation,
        lr=optimizer.param_groups[0]["lr"],
    )


def loss_of(
    fraction: float, scaler: torch.amp.GradScaler, outputs: Tensor, targets: Tensor
) -> Tensor:
    scaled: Tensor = scaler.scale(cross_entropy(outputs, targets) * fraction)
    return scaled


def take(
    session: Session, model: torch.nn.Module, part: Batch, loss: LossFunction, run: Steps
) -> None:
    if run.in_one_call:
        session.forward_backward(part, loss)
    else:
        session.backward(loss(model(part.inputs), part.targets))


def clip(session: Session, model: torch.nn.Module, clips: str) -> None:
    is_last = session.rank == session.world_size - 1
    norm = 0.25 if is_last else 0.5
    if clips == "own by torch":
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
    elif clips == "asks for the norm":
        if is_last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    elif clips == "drops":
        if is_last:
            next(iter(model.parameters())).grad = None
    elif not (is_last and clips == "but one"):
        session.clip_grad_norm(norm)


def one_process(batch_size: int, num_steps: int, *, scheduled: bool) -> dict[str, Tensor]:
    """Return the model after the same steps in one process."""
    model, optimizer = build("sgd", "layers")
    order = Order(
        num_samples=elastic_bodies.NUM_SAMPLES, global_batch_size=batch_size, num_epochs=EPOCHS
    )
    loader = Loader(data(), order)
    for step in range(num_steps):
        batch = loader.synchronous(step, 0, 1)
        if scheduled:
            optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.zero_grad()
        cross_entropy(model(batch.inputs), batch.targets).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}
