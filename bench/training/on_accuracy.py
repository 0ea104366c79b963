"""Script of bench/accuracy.py: one worker of a training, or the single process."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import mean
from threading import Barrier

import structlog
import torch
from accuracy_tasks import TASKS, Score, Task, score
from clicks import ROW_LR
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler

import shoal
from shoal.data.batches import Loader
from shoal.data.order import Order

SSP_BOUND = 4
STRATEGIES: Mapping[str, Callable[[LRScheduler], shoal.AsyncSGD]] = {
    "async": lambda schedule: shoal.AsyncSGD(staleness="none", schedule=schedule),
    "ssp": lambda schedule: shoal.AsyncSGD(
        consistency="ssp", staleness_bound=SSP_BOUND, staleness="none", schedule=schedule
    ),
    "dc_asgd": lambda schedule: shoal.AsyncSGD(staleness="compensate", schedule=schedule),
}
MEETING_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Training:
    """A run with `num_workers` workers, or in a single process if the mode is `alone`."""

    task: str
    mode: str
    num_workers: int
    seed: int

    @property
    def job(self) -> str:
        return f"{self.task}-{self.mode}-{self.num_workers}-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Part:
    """Results of one worker."""

    score: Score | None
    """Score of the model after all updates; one worker reports it."""
    stalenesses: tuple[float, ...] = ()
    """Staleness of its pushes of parameters, in updates."""


_meetings: Mapping[int, Barrier] = {}


def prepare(meetings: Mapping[int, Barrier]) -> None:
    """Prepare this process to train. `meetings`: by number of workers, the barrier at which they
    wait for each other at the end of a training."""
    global _meetings  # noqa: PLW0603 - set once, as a process starts.
    _meetings = meetings
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


def train(training: Training, coordinator: str) -> Part:
    """Take part in a training; `coordinator` is host:port."""
    torch.manual_seed(training.seed)
    task = TASKS[training.task]
    if training.mode == "alone":
        return Part(score=alone(task, training.seed))
    meeting = _meetings[training.num_workers]
    try:
        return together(task, training, coordinator, meeting)
    except BaseException:
        meeting.abort()
        raise


def alone(task: Task, seed: int) -> Score:
    """Train in plain torch, with the same samples in the same order."""
    model = task.new_model(False)
    order = order_of(task, seed)
    optimizer = dense_optimizer(task, model)
    schedule = linear_decay(optimizer, order)
    optimizers: list[Optimizer] = [optimizer]
    optimizers += [Adagrad(rows.parameters(), lr=ROW_LR) for rows in embeddings(model)]
    loader = Loader(task.data()[0], order)
    for step in range(order.num_steps):
        batch = loader.synchronous(step, 0, 1)
        for each in optimizers:
            each.zero_grad()
        task.loss(model(batch.inputs), batch.targets).backward()
        for each in optimizers:
            each.step()
        schedule.step()
    return score(task, model)


def together(task: Task, training: Training, coordinator: str, meeting: Barrier) -> Part:
    """Train with the other workers until all samples are done."""
    number = training.num_workers
    stalenesses = []
    with shoal.join(
        training.job, coordinator=coordinator, min_members=number, desired_members=number
    ) as session:
        model = task.new_model(True)
        optimizer = dense_optimizer(task, model)
        schedule = linear_decay(optimizer, order_of(task, training.seed))
        session.distribute(model, optimizer, STRATEGIES[training.mode](schedule))
        for batch in session.batches(
            task.data()[0],
            global_batch_size=task.batch_size,
            epochs=task.epochs,
            seed=training.seed,
        ):
            with session.step():
                session.backward(task.loss(model(batch.inputs), batch.targets))
            stalenesses.append(session.strategy.metrics()["staleness"])
        # Once batches end, every sample is done and the model has all updates. The servers drop
        # parameters and rows when the last member leaves, so the model is measured before any does.
        is_first = meeting.wait(MEETING_S) == 0
        found = score(task, model) if is_first else None
        meeting.wait(MEETING_S)
    return Part(score=found, stalenesses=tuple(stalenesses))


def order_of(task: Task, seed: int) -> Order:
    (inputs, _), _ = task.data()
    return Order(
        num_samples=len(inputs),
        global_batch_size=task.batch_size,
        num_epochs=task.epochs,
        seed=seed,
    )


def linear_decay(optimizer: Optimizer, order: Order) -> LinearLR:
    """Return a schedule whose rate is 0 after the last step."""
    return LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=order.num_steps)


def embeddings(model: nn.Module) -> list[nn.Embedding]:
    return [module for module in model.modules() if isinstance(module, nn.Embedding)]


def dense_optimizer(task: Task, model: nn.Module) -> SGD:
    """Return the optimizer of all parameters that are not embeddings."""
    rows = {id(parameter) for each in embeddings(model) for parameter in each.parameters()}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in rows]
    return SGD(dense, lr=task.lr, momentum=task.momentum)


def combine_parts(parts: list[Part]) -> tuple[Score, float]:
    """Return the score of a training, and the mean staleness of the pushes of all workers."""
    (found,) = (part.score for part in parts if part.score is not None)
    return found, mean([s for part in parts for s in part.stalenesses] or [0.0])


__all__ = ["STRATEGIES", "Part", "Training", "combine_parts", "prepare", "train"]
