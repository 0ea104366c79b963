"""The compressions once more: all ranks in one process, in loops, without packing anything."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from zlib import crc32

import numpy as np
import torch

Array = np.ndarray
Values = Mapping[str, Array]


class Twin:
    """Averages of all ranks' values, with what each holds back."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.residuals: list[Array] = []

    def step(self, every: Sequence[Values]) -> dict[str, Array]:
        names = list(every[0])
        flats = [np.concatenate([each[name].reshape(-1) for name in names]) for each in every]
        if not self.residuals:
            self.residuals = [np.zeros_like(flat) for flat in flats]
        totals = [a + b for a, b in zip(flats, self.residuals, strict=True)]
        mean = self.average(totals, {name: every[0][name].shape for name in names})
        averages, start = {}, 0
        for name in names:
            size = every[0][name].size
            averages[name] = mean[start : start + size].reshape(every[0][name].shape)
            start += size
        return averages

    def average(self, totals: Sequence[Array], shapes: Mapping[str, tuple[int, ...]]) -> Array:
        """The mean; sets the residuals."""
        raise NotImplementedError


class Quantised(Twin):
    """Every value through `rounding` on its way to the rank that serves it, and once more back."""

    def __init__(self, world_size: int, rounding: Callable[[Array], Array], block: int) -> None:
        super().__init__(world_size)
        self.rounding, self.block = rounding, block
        self.debts: Array | None = None

    def average(self, totals: Sequence[Array], shapes: Mapping[str, tuple[int, ...]]) -> Array:
        size = totals[0].size
        share = ceil(size / self.world_size)
        block = min(self.block, ceil(share / 8) * 8)
        part = ceil(share / block) * block
        padded = [np.pad(total, (0, part * self.world_size - size)) for total in totals]
        sent = [self._round_blocks(total, block) for total in padded]
        self.residuals = [(a - b)[:size] for a, b in zip(padded, sent, strict=True)]
        # What was held back of the padding goes with it.
        owed = np.zeros_like(padded[0]) if self.debts is None else self.debts
        mean = sum(sent) / np.float32(self.world_size) + owed
        coded = self._round_blocks(mean, block)
        self.debts = mean - coded
        self.debts[size:] = 0
        return coded[:size]

    def _round_blocks(self, values: Array, block: int) -> Array:
        parts = [self.rounding(values[at : at + block]) for at in range(0, values.size, block)]
        return np.concatenate(parts)


def to_int8(block: Array) -> Array:
    scale = np.float32(max(abs(value) for value in block)) / np.float32(127)
    return np.array([round(float(v / scale)) * scale if scale else 0 for v in block], np.float32)


def to_sign(block: Array) -> Array:
    scale = np.float32(sum(abs(float(value)) for value in block) / len(block))
    return np.array([scale if value >= 0 else -scale for value in block], np.float32)


class TopK(Twin):
    """Each rank's largest values."""

    def __init__(self, world_size: int, ratio: float) -> None:
        super().__init__(world_size)
        self.ratio = ratio

    def average(self, totals: Sequence[Array], shapes: Mapping[str, tuple[int, ...]]) -> Array:
        mean = np.zeros_like(totals[0])
        self.residuals = [total.copy() for total in totals]
        for total, left in zip(totals, self.residuals, strict=True):
            number = ceil(self.ratio * total.size)
            for place in sorted(range(total.size), key=lambda i: -abs(total[i]))[:number]:
                mean[place] += total[place] / self.world_size
                left[place] = 0
        return mean


class PowerSGD(Twin):
    """One step of the power method on the mean of the matrices."""

    def __init__(self, world_size: int, rank: int) -> None:
        super().__init__(world_size)
        self.rank = rank
        self.factors: dict[str, Array] = {}

    def average(self, totals: Sequence[Array], shapes: Mapping[str, tuple[int, ...]]) -> Array:
        mean = sum(totals) / self.world_size
        self.residuals = [np.zeros_like(total) for total in totals]
        start = 0
        for name, shape in shapes.items():
            place = slice(start, start + int(np.prod(shape)))
            start = place.stop
            if len(shape) < 2 or self.rank * (shape[0] + np.prod(shape[1:])) >= np.prod(shape):
                continue
            rows = shape[0]
            matrix = mean[place].reshape(rows, -1)
            left, _ = np.linalg.qr(matrix @ self._factor(name, matrix.shape[1]))
            self.factors[name] = matrix.T @ left
            for total, residual in zip(totals, self.residuals, strict=True):
                own = total[place].reshape(rows, -1)
                residual[place] = (own - left @ (left.T @ own)).reshape(-1)
            mean[place] = (left @ self.factors[name].T).reshape(-1)
        return mean

    def _factor(self, name: str, columns: int) -> Array:
        if name not in self.factors:
            generator = torch.Generator().manual_seed(crc32(name.encode()))
            return torch.randn(columns, self.rank, generator=generator).numpy()
        return self.factors[name]


__all__ = ["PowerSGD", "Quantised", "TopK", "Twin", "to_int8", "to_sign"]
