"""Initial rows depend only on seed, table name, id and column, and are distributed as specified."""

import hashlib

import numpy as np
import pytest
import torch

from shoal_proto.row_hash import mix64
from shoal_proto.v1.tables_pb2 import Initialiser
from shoal_server.parameters.tables.initial import InitialRows

NORMAL = Initialiser(kind="normal", center=0.5, spread=0.1)
UNIFORM = Initialiser(kind="uniform", center=-1.0, spread=0.25)


def make(
    initialiser: Initialiser, ids: range, *, table: str = "users", seed: int = 7
) -> torch.Tensor:
    rows = InitialRows(initialiser, table=table, seed=seed, dim=8, dtype=torch.float32)
    return rows.make(np.array(ids, np.int64))


@pytest.mark.parametrize("initialiser", [NORMAL, UNIFORM], ids=lambda i: i.kind)
def test_a_row_has_the_same_initial_values_whenever_it_is_made(initialiser: Initialiser) -> None:
    """A row's values are the same alone or among others, and differ between seeds and tables."""
    many = make(initialiser, range(-5, 100))
    assert torch.equal(make(initialiser, range(40, 41))[0], many[45])
    for other in (
        make(initialiser, range(-5, 100), seed=8),
        make(initialiser, range(-5, 100), table="t"),
    ):
        assert not (other == many).any(dim=1).any()
    assert many.unique(dim=0).shape == many.shape


def test_initial_values_never_change_between_releases() -> None:
    """Rows without a push are computed again at each lookup, also by later releases. The test has
    the definition in integers."""
    key = int.from_bytes(hashlib.sha256(b"7 users").digest()[:8], "little")
    for row_id in (0, 5):
        words = [mix64((mix64(row_id ^ key) + c * 0xD1342543DE82EF95) % 2**64) for c in range(1, 9)]
        uniform = [-1.0 + 0.25 * ((word >> 11) / 2**52 - 1.0) for word in words]
        total = [
            sum((w >> s) % 2**16 for w in (word, mix64(word)) for s in (0, 16, 32, 48))
            for word in words
        ]
        normal = [0.5 + 0.1 * ((t - 4 * 65535) / (8 * (4**16 - 1) / 12) ** 0.5) for t in total]
        rows = range(row_id, row_id + 1)
        assert torch.equal(make(UNIFORM, rows)[0], torch.tensor(uniform, dtype=torch.float32))
        assert torch.equal(make(NORMAL, rows)[0], torch.tensor(normal, dtype=torch.float32))


def test_initial_values_have_the_specified_distribution() -> None:
    """Mean, deviation and bounds are the specified ones, and columns are not correlated."""
    normal, uniform = make(NORMAL, range(20_000)), make(UNIFORM, range(20_000))
    assert normal.mean().item() == pytest.approx(0.5, abs=0.002)
    assert normal.std().item() == pytest.approx(0.1, rel=0.01)
    assert uniform.mean().item() == pytest.approx(-1.0, abs=0.002)
    assert -1.25 <= uniform.min().item() < -1.249
    assert -0.751 < uniform.max().item() < -0.75
    for values in (normal, uniform):
        assert (torch.corrcoef(values.T) - torch.eye(8)).abs().max().item() < 0.05
    constant = make(Initialiser(kind="constant", center=3.0), range(2))
    assert torch.equal(constant, torch.full((2, 8), 3.0))
