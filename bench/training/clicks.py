"""Generated clicks, and a factorisation machine (Rendle 2010) that learns to predict them.

Each of eight fields has a few frequent values and very many rare ones; field and value are hashed
to one of 10 million ids. Another factorisation machine, whose weights are a function of the ids,
decides whether there is a click; one result in twenty is inverted.
"""

import torch
from torch import Tensor, nn

import shoal

NUM_IDS = 10_000_000
NUM_FIELDS, VALUES_PER_FIELD = 8, 5_000_000
SKEW = 24
RANK = 8
TURNED_ROUND = 0.05
ROW_LR = 0.1
SPREAD = 0.05
NUM_SHARDS = 4
"""Shards of the table: few, since a step has few rows for each."""

Samples = tuple[Tensor, Tensor]


class FactorisationMachine(nn.Module):
    """Maps ids (B samples, F fields) to logits (B); each row holds a weight and a vector."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))
        self.rows = rows

    def forward(self, ids: Tensor) -> Tensor:
        return self.bias + interactions(self.rows(ids))


class RowsInHand(nn.Module):
    """Rows in this process, only of the ids that occur in the samples."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.ids = ids.unique()
        self.rows = nn.Embedding(len(self.ids), 1 + RANK)
        nn.init.uniform_(self.rows.weight, -SPREAD, SPREAD)

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(torch.searchsorted(self.ids, ids))


def rows_on_servers() -> nn.Module:
    """Return a table on parameter servers; the first push of an id creates its row."""
    return shoal.EmbeddingTable(
        1 + RANK,
        num_embeddings=NUM_IDS,
        optimizer=shoal.RowAdagrad(lr=ROW_LR),
        init=shoal.RowUniform(low=-SPREAD, high=SPREAD),
        num_shards=NUM_SHARDS,
    )


def interactions(rows: Tensor) -> Tensor:
    """Return the sum of weights and of products of all pairs of vectors; rows: (B, F, 1 + R)."""
    weights, vectors = rows[..., 0], rows[..., 1:]
    squared_sum = vectors.sum(1).square()
    return weights.sum(1) + 0.5 * (squared_sum - vectors.square().sum(1)).sum(1)


def clicks(num_training: int, num_held_out: int) -> tuple[Samples, Samples]:
    """Return samples (ids, clicked or not) to train on, and held-out ones; always the same."""
    generator = torch.Generator().manual_seed(11)
    number = num_training + num_held_out
    drawn = torch.rand((number, NUM_FIELDS), generator=generator, dtype=torch.float64)
    values = (drawn.pow(SKEW) * VALUES_PER_FIELD).long()
    ids = hashed(values * NUM_FIELDS + torch.arange(NUM_FIELDS))
    truth = interactions(_true_rows(ids))
    turned = torch.rand(number, generator=generator) < TURNED_ROUND
    clicked = ((truth > truth.median()) != turned).float()
    return (ids[:num_training], clicked[:num_training]), (
        ids[num_training:],
        clicked[num_training:],
    )


def hashed(numbers: Tensor) -> Tensor:
    """Return an id for each number, the same in every process; numbers may share an id."""
    mixed = (numbers + 1) * 0x2545F4914F6CDD1D  # The overflow is intended.
    mixed = (mixed ^ (mixed >> 32)) * 0x369DEA0F31A53F85
    return (mixed ^ (mixed >> 29)).remainder(NUM_IDS)


def _true_rows(ids: Tensor) -> Tensor:
    """Return pseudo-random numbers that depend on id and column only."""
    places = torch.arange(1, 2 + RANK, dtype=torch.float64)
    mixed = torch.sin(ids.double().unsqueeze(-1) * 12.9898 + places * 78.233) * 43758.5453
    scale = torch.tensor([1.0, *[0.25] * RANK], dtype=torch.float64)
    return ((mixed - mixed.floor()) * 2 - 1) * scale


__all__ = ["ROW_LR", "FactorisationMachine", "RowsInHand", "clicks", "rows_on_servers"]
