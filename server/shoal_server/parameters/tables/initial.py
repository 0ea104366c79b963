"""Initial values of a row: a function of seed, table name, row id and column alone, to the last
bit.

So only operations are used whose rounding IEEE 754 defines, and no logarithm or cosine.
"""

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal_proto.errors import InternalError
from shoal_proto.v1.tables_pb2 import Initialiser
from shoal_server.parameters.tables.hashing import Ids, mix64

_COLUMN_STEP = np.uint64(0xD1342543DE82EF95)
_UNIFORM_BITS = 53
_NUM_ADDENDS = 8
_ADDEND_BITS = 16


class InitialRows:
    """Makes rows of `dim` columns, by the table's initialiser."""

    def __init__(
        self, initialiser: Initialiser, *, table: str, seed: int, dim: int, dtype: torch.dtype
    ) -> None:
        self._initialiser = initialiser
        self._dim = dim
        self._dtype = dtype
        digest = hashlib.sha256(f"{seed} {table}".encode()).digest()
        self._key = np.frombuffer(digest[:8], "<u8")
        with np.errstate(over="ignore"):
            self._columns = np.arange(1, dim + 1, dtype=np.uint64) * _COLUMN_STEP

    def make(self, ids: Ids) -> Tensor:
        """Make one row for each id: (len(ids), dim)."""
        kind, center = self._initialiser.kind, self._initialiser.center
        if kind == "constant":
            return torch.full((len(ids), self._dim), center, dtype=self._dtype)
        words = mix64(mix64(ids.view(np.uint64) ^ self._key)[:, None] + self._columns)
        if kind == "uniform":
            unit = _uniform(words)
        elif kind == "normal":
            unit = _normal(words)
        else:
            raise InternalError(
                "an initialiser that no table has", seen=kind, expected="as checked by Place"
            )
        unit *= self._initialiser.spread
        unit += center
        return torch.from_numpy(unit).to(self._dtype)


def _uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    unit = (words >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float64)
    unit *= 2.0 ** (1 - _UNIFORM_BITS)
    unit -= 1.0
    return unit


def _normal(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Sum of eight uniform integers (Irwin and Hall): close to a normal distribution of mean 0 and
    variance 1."""
    total = np.zeros(words.shape, np.uint64)
    mask = np.uint64(2**_ADDEND_BITS - 1)
    for each in (words, mix64(words)):
        for shift in range(0, 64, _ADDEND_BITS):
            total += (each >> np.uint64(shift)) & mask
    unit = total.astype(np.float64)
    unit -= _NUM_ADDENDS * (2**_ADDEND_BITS - 1) / 2
    # A uniform integer below n has variance (n * n - 1) / 12.
    unit /= (_NUM_ADDENDS * (4**_ADDEND_BITS - 1) / 12) ** 0.5
    return unit
