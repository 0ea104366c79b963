"""What bench/accuracy.py trains, by one process and by several, and how well it then does.

`digits`: scikit-learn's handwritten digits, by a perceptron; every fifth image is held out.

`clicks`: a factorisation machine (Rendle 2010) on made-up clicks with 10 million ids in eight
fields, few of which are seen often. Whether there is a click is what another factorisation machine
says, whose weights are a function of the ids, but for one click in twenty, which is turned round.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import shoal

NUM_IDS = 10_000_000
NUM_FIELDS, RANK = 8, 8
NUM_CLICKS, NUM_HELD_OUT_CLICKS = 120_000, 20_000
SKEW = 24
ROW_LR = 0.1


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data, and how many of the held-out samples it gets right."""

    new_model: Callable[[bool], nn.Module]
    """Given whether its embeddings lie on parameter servers."""
    lr: float
    momentum: float
    batch_size: int
    epochs: int
    data: Callable[[], tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]
    """(inputs, targets) to train on, and those held out."""
    loss: Callable[[Tensor, Tensor], Tensor]
    right: Callable[[Tensor, Tensor], Tensor]


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    found = load_digits()
    images = torch.tensor(found.data, dtype=torch.float32) / 16
    labels = torch.tensor(found.target)
    held_out = torch.arange(len(images)) % 5 == 0
    return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])


def perceptron(on_servers: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


class Factorisation(nn.Module):
    """Ids (B samples, F fields) to logits (B): the rows hold a weight and a vector each."""

    def __init__(self, on_servers: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))
        self.rows: nn.Module
        if on_servers:
            self.rows = shoal.EmbeddingTable(
                1 + RANK,
                num_embeddings=NUM_IDS,
                optimizer=shoal.RowAdagrad(lr=ROW_LR),
                init=shoal.RowUniform(low=-0.01, high=0.01),
            )
        else:
            self.rows = nn.Embedding(NUM_IDS, 1 + RANK, sparse=True)
            nn.init.uniform_(self.rows.weight, -0.01, 0.01)

    def forward(self, ids: Tensor) -> Tensor:
        return self.bias + interactions(self.rows(ids))


def interactions(rows: Tensor) -> Tensor:
    """Rows (B, F, 1 + R): the sum of the weights, and of the products of each pair of vectors."""
    weights, vectors = rows[..., 0], rows[..., 1:]
    squared_sum = vectors.sum(1).square()
    return weights.sum(1) + 0.5 * (squared_sum - vectors.square().sum(1)).sum(1)


def clicks() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(11)
    number = NUM_CLICKS + NUM_HELD_OUT_CLICKS
    field_size = NUM_IDS // NUM_FIELDS
    drawn = torch.rand((number, NUM_FIELDS), generator=generator, dtype=torch.float64)
    ids = (drawn.pow(SKEW) * field_size).long() + torch.arange(NUM_FIELDS) * field_size
    truth = interactions(_weights_of(ids))
    turned = torch.rand(number, generator=generator) < 0.05
    targets = ((truth > truth.median()) != turned).float()
    return (
        (ids[:NUM_CLICKS], targets[:NUM_CLICKS]),
        (ids[NUM_CLICKS:], targets[NUM_CLICKS:]),
    )


def _weights_of(ids: Tensor) -> Tensor:
    """Numbers between -1 and 1 that look drawn at random, but follow from id and place alone."""
    places = torch.arange(1, 2 + RANK, dtype=torch.float64)
    mixed = torch.sin(ids.double().unsqueeze(-1) * 12.9898 + places * 78.233) * 43758.5453
    scale = torch.tensor([1.0, *[0.2] * RANK], dtype=torch.float64)
    return ((mixed - mixed.floor()) * 2 - 1) * scale


TASKS = {
    "digits": Task(
        new_model=perceptron,
        lr=0.05,
        momentum=0.9,
        batch_size=32,
        epochs=30,
        data=digits,
        loss=cross_entropy,
        right=lambda outputs, targets: outputs.argmax(1) == targets,
    ),
    "clicks": Task(
        new_model=Factorisation,
        lr=0.01,
        momentum=0.0,
        batch_size=256,
        epochs=2,
        data=clicks,
        loss=binary_cross_entropy_with_logits,
        right=lambda outputs, targets: (outputs > 0) == (targets > 0.5),
    ),
}


@torch.no_grad()
def accuracy(task: Task, model: nn.Module) -> float:
    """Percent of the held-out samples."""
    inputs, targets = task.data()[1]
    parts = [
        task.right(model(some), wanted)
        for some, wanted in zip(inputs.split(1024), targets.split(1024), strict=True)
    ]
    return 100 * torch.cat(parts).float().mean().item()


__all__ = ["ROW_LR", "TASKS", "Task", "accuracy"]
