"""Tasks of bench/accuracy.py, for one process and for several workers, and their scores.

`digits`: scikit-learn's handwritten digits, a perceptron; every second image is held out.

`clicks`: a factorisation machine on generated clicks with 10 million ids, see clicks.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from clicks import FactorisationMachine, RowsInHand, clicks, rows_on_servers
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

NUM_CLICKS, NUM_HELD_OUT_CLICKS = 60_000, 20_000

Data = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(inputs, targets) to train on, and held-out (inputs, targets)."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data, and how it is trained: the same for one process as for several workers."""

    data: Callable[[], Data]
    new_model: Callable[[bool], nn.Module]
    """Called with True if its embeddings are on parameter servers."""
    lr: float
    """Initial learning rate of the parameters; it falls linearly to 0 at the last step. Rows of
    embeddings have a constant rate, which Adagrad scales."""
    momentum: float
    """Momentum of SGD; 0 for both tasks, because late gradients act like momentum. With 0.9 in
    addition, even four workers score three points less on `digits`."""
    batch_size: int
    """Samples of one step, and so of one push."""
    epochs: int
    num_seeds: int
    loss: Callable[[Tensor, Tensor], Tensor]
    right: Callable[[Tensor, Tensor], Tensor]


@cache
def digits() -> Data:
    found = load_digits()
    images = torch.tensor(found.data, dtype=torch.float32) / 16
    labels = torch.tensor(found.target)
    return (images[::2], labels[::2]), (images[1::2], labels[1::2])


def perceptron(on_servers: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


@cache
def some_clicks() -> Data:
    return clicks(NUM_CLICKS, NUM_HELD_OUT_CLICKS)


def factorisation_machine(on_servers: bool) -> nn.Module:
    if on_servers:
        return FactorisationMachine(rows_on_servers())
    return FactorisationMachine(RowsInHand(torch.cat([ids for ids, _ in some_clicks()])))


TASKS = {
    "digits": Task(
        data=digits,
        new_model=perceptron,
        lr=0.2,
        momentum=0.0,
        batch_size=32,
        epochs=20,
        num_seeds=3,
        loss=cross_entropy,
        right=lambda outputs, targets: outputs.argmax(1) == targets,
    ),
    "clicks": Task(
        data=some_clicks,
        new_model=factorisation_machine,
        lr=0.05,
        momentum=0.0,
        batch_size=128,
        epochs=1,
        num_seeds=3,
        loss=binary_cross_entropy_with_logits,
        right=lambda outputs, targets: (outputs > 0) == (targets > 0.5),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Score:
    """Score of a model on the held-out samples."""

    accuracy: float
    """Percent."""
    loss: float
    """Mean loss, in nats."""


@torch.no_grad()
def score(task: Task, model: nn.Module) -> Score:
    inputs, targets = task.data()[1]
    outputs = torch.cat([model(some) for some in inputs.split(4096)])
    return Score(
        accuracy=100 * task.right(outputs, targets).float().mean().item(),
        loss=task.loss(outputs, targets).item(),
    )


__all__ = ["TASKS", "Score", "Task", "score"]
