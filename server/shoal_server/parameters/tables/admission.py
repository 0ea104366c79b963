"""Admission of ids: each id gets a row at its first push, or once it was pushed often enough, or
with a fixed probability at each push. Backups decide as the primary does."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal_proto.v1.tables_pb2 import Admission
from shoal_server.parameters.tables.hashing import Ids, hash_ids, mix64

Mask = NDArray[np.bool_]

SKETCH_ROWS = 4
SKETCH_WIDTH = 2**16
AGEING_PUSHES = SKETCH_WIDTH
"""Number of pushes of ids without a row after which all counts are halved."""
MAX_COUNT = 2**16 - 1


class RowGate(Protocol):
    """Decides if a pushed id without a row gets one. Called at most once per id and version."""

    def admit(self, ids: Ids, version: int) -> Mask: ...

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the gate's state by name; only the gate writes to it."""
        ...


class OpenRowGate:
    def admit(self, ids: Ids, version: int) -> Mask:
        return np.ones(len(ids), np.bool_)

    def tensors(self) -> Mapping[str, Tensor]:
        return {}


class ProbabilityRowGate:
    """Admits an id with a fixed probability at each push of it (McMahan et al. 2013)."""

    def __init__(self, probability: float) -> None:
        self._limit = np.uint64(min(int(probability * 2**64), 2**64 - 1))

    def admit(self, ids: Ids, version: int) -> Mask:
        return mix64(hash_ids(ids) ^ mix64(np.array([version], np.uint64))) <= self._limit

    def tensors(self) -> Mapping[str, Tensor]:
        return {}


class CountRowGate:
    """Admits an id from its `min_pushes`-th push on. A count-min sketch (Cormode and Muthukrishnan
    2005) keeps the counts, and ages as TinyLFU does (Einziger, Friedman, Manes 2017). When very
    many ids are pushed, a few are admitted early."""

    def __init__(self, min_pushes: int, held: Mapping[str, Tensor]) -> None:
        self._min_pushes = min_pushes
        shape = (SKETCH_ROWS, SKETCH_WIDTH)
        self._counts = held.get("admission_counts", torch.zeros(shape, dtype=torch.int32)).numpy()
        self._pushed = held.get("admission_pushed", torch.zeros(1, dtype=torch.int64)).numpy()

    def admit(self, ids: Ids, version: int) -> Mask:
        words = hash_ids(ids)
        least = np.full(len(ids), MAX_COUNT, np.int32)
        for counts in self._counts:
            words = mix64(words)
            counters = (words & np.uint64(SKETCH_WIDTH - 1)).view(np.int64)
            np.add.at(counts, counters, 1)
            np.minimum(counts, MAX_COUNT, out=counts)
            np.minimum(least, counts[counters], out=least)
        self._pushed += len(ids)
        if self._pushed[0] >= AGEING_PUSHES:
            self._counts //= 2
            self._pushed[0] = 0
        return least >= self._min_pushes

    def tensors(self) -> Mapping[str, Tensor]:
        return {
            "admission_counts": torch.from_numpy(self._counts),
            "admission_pushed": torch.from_numpy(self._pushed),
        }


def new_gate(admission: Admission, held: Mapping[str, Tensor]) -> RowGate:
    """Make the gate of a table's shard. Takes ownership of `held`, the tensors of an earlier gate;
    empty for a new shard."""
    if admission.kind == "count":
        return CountRowGate(admission.min_pushes, held)
    if admission.kind == "probability":
        return ProbabilityRowGate(admission.probability)
    return OpenRowGate()
