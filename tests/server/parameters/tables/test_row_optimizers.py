"""Row optimizers: their results, compared with torch.optim for those that torch has."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.clusters.snapshot_world import loaded
from support.models.table_specs import OPTIMIZERS, live, look_up, new_push, new_shard, new_table
from torch import nn

from shoal_proto.v1.tables_pb2 import RowOptimizer
from shoal_server.parameters.tables.optimizers import StateColumn, new_rule

NUM_ROWS, DIM = 50, 7

TORCH: dict[str, Callable[[nn.Parameter], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD([p], lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad([p], lr=0.1),
    "sparse_adam": lambda p: torch.optim.SparseAdam([p], lr=0.01),
}


@pytest.mark.parametrize("kind", TORCH)
def test_rows_equal_those_of_torch_with_sparse_gradients(kind: str) -> None:
    """Values are equal bit for bit; each step pushes to some of the rows."""
    spec = RowOptimizer()
    spec.CopyFrom(OPTIMIZERS[kind])
    spec.weight_decay = 0.0
    shard = new_shard(new_table(dim=DIM, optimizer=spec))
    weight = nn.Parameter(torch.zeros(NUM_ROWS, DIM))
    optimizer = TORCH[kind](weight)
    random = np.random.default_rng(5)
    for step in range(1, 12):
        ids = np.sort(random.choice(NUM_ROWS, random.integers(1, NUM_ROWS), replace=False))
        gradient = random.standard_normal((len(ids), DIM), np.float32)
        births, _ = look_up(shard, ids)
        shard.push(new_push(ids, gradient, births=births, sequence=step, step=step), live)
        weight.grad = torch.sparse_coo_tensor(
            torch.from_numpy(ids)[None],
            torch.from_numpy(gradient),
            weight.shape,
            check_invariants=True,
        )
        optimizer.step()
        _, values = look_up(shard, np.arange(NUM_ROWS))
        assert torch.equal(torch.from_numpy(values.copy()), weight.detach()), step


def states(rule_columns: dict[str, StateColumn], num_rows: int) -> dict[str, torch.Tensor]:
    return {
        name: torch.full((num_rows, DIM) if c.is_per_element else (num_rows,), c.fill)
        for name, c in rule_columns.items()
    }


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_row_does_not_depend_on_its_neighbours(kind: str) -> None:
    """A row has the same values trained alone or among others, up to rounding."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(NUM_ROWS, DIM, generator=generator)
    gradients = torch.randn(3, NUM_ROWS, DIM, generator=generator)
    together, alone = values.clone(), values.clone()
    rule = new_rule(OPTIMIZERS[kind])
    state = states(dict(rule.columns()), NUM_ROWS)
    if hasattr(rule, "table_step"):
        rule.table_step = 3
    for gradient in gradients:
        rule.step(together, gradient.clone(), state, 0.1)
    for row in range(NUM_ROWS):
        state = states(dict(rule.columns()), 1)
        for gradient in gradients:
            rule.step(alone[row : row + 1], gradient[row : row + 1].clone(), state, 0.1)
    torch.testing.assert_close(together, alone)
    assert not torch.equal(together, values)


def test_adam_counts_the_steps_of_each_row() -> None:
    """The first step of a row is as long as the learning rate, however late it is."""
    shard = new_shard(new_table(optimizer=OPTIMIZERS["adam"]))
    for step in range(1, 6):
        births, _ = look_up(shard, [1])
        shard.push(new_push([1], [[1.0, 1.0]], births=births, sequence=step), live)
    shard.push(new_push([2], [[-3.0, 0.5]], sequence=6), live)
    _, values = look_up(shard, [2])
    np.testing.assert_allclose(values, [[0.01, -0.01]], rtol=1e-5)


def test_rowwise_adagrad_has_one_accumulator_for_each_row() -> None:
    """The accumulator is the mean of the squares: the first step has length lr * sqrt(dim)."""
    shard = new_shard(new_table(optimizer=OPTIMIZERS["rowwise_adagrad"]))
    shard.push(new_push([5], [[3.0, 4.0]]), live)
    _, values = look_up(shard, [5])
    np.testing.assert_allclose(values, [[-0.1 * 3 / 12.5**0.5, -0.1 * 4 / 12.5**0.5]], rtol=1e-6)
    image = loaded(shard)
    assert image.tensors["optimizer/sum"].tolist() == [12.5]


def test_rows_of_16_bits_have_optimizer_state_of_32() -> None:
    """Small changes of an average would be rounded away in 16 bits."""
    shard = new_shard(new_table(dtype="float16", optimizer=OPTIMIZERS["adam"]))
    for step in range(1, 4):
        births, _ = look_up(shard, [1])
        push = new_push([1], [[1.0, -1.0]], births=births, sequence=step, dtype=np.float16)
        shard.push(push, live)
    image = loaded(shard)
    assert image.tensors["values"].dtype == torch.float16
    assert image.tensors["optimizer/exp_avg"].dtype == torch.float32
    _, values = look_up(shard, [1])
    np.testing.assert_allclose(values, [[-0.03, 0.03]], rtol=2e-3)
