"""Slow second implementations of the compressions: all ranks in one process, in plain loops."""

import struct
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from zlib import crc32

import numpy as np
import torch

from shoal_proto.v1.codec_pb2 import GradientCodec

Array = np.ndarray
Values = Mapping[str, Array]


class Twin:
    """Averages of all ranks' values, with the residuals of each rank."""

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
        """Compute the mean, and set the residuals."""
        raise NotImplementedError


class Quantised(Twin):
    """Twin that rounds every value before the serving rank averages it, and the mean again."""

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
        # Residuals and debts of the padding are dropped.
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
    """Twin that averages each rank's largest values."""

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
    """Twin that takes one step of the power method on the mean of the matrices."""

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


def read_push(codec: GradientCodec, data: bytes, sizes: Sequence[int]) -> Array:
    """Decode a pushed gradient as `codec.proto` describes it."""
    num_values, at = sum(sizes), 0

    def floats(number: int) -> Array:
        nonlocal at
        at += 4 * number
        return np.array(struct.unpack(f"<{number}f", data[at - 4 * number : at]), np.float32)

    if codec.kind == "fp16":
        return np.array(struct.unpack(f"<{num_values}e", data), np.float32)
    if codec.kind == "bf16":
        halves = struct.unpack(f"<{num_values}H", data)
        return np.array([half << 16 for half in halves], np.uint32).view(np.float32)
    if codec.kind == "top-k":
        sent = floats(len(data) // 8)
        values = np.zeros(num_values, np.float32)
        for value, place in zip(sent, struct.unpack(f"<{len(sent)}i", data[at:]), strict=True):
            values[place] = value
        return values
    if codec.kind in ("int8", "one-bit"):
        scales = floats(ceil(num_values / codec.block))
        if codec.kind == "int8":
            codes = list(struct.unpack(f"<{len(data) - at}b", data[at:]))
        else:
            bits = "".join(f"{byte:08b}" for byte in data[at:])
            codes = [1 if bit == "1" else -1 for bit in bits]
        scaled = [np.float32(codes[i]) * scales[i // codec.block] for i in range(num_values)]
        return np.array(scaled, np.float32)
    parts: list[Array] = []
    for part, size in zip(codec.low_rank, sizes, strict=True):
        num_low = part.rows * codec.columns[part.matrix] if part.rows else 0
        parts.append(floats(part.lead))
        parts.append(floats(part.rows * codec.rank).reshape(-1, codec.rank))
        parts.append(floats(size - num_low - part.lead))
    rights = [floats(columns * codec.rank).reshape(-1, codec.rank) for columns in codec.columns]
    for at_part, part in enumerate(codec.low_rank):
        left = parts[3 * at_part + 1]
        product = np.zeros(0, np.float32)
        for i in range(codec.rank if part.rows else 0):
            term = np.outer(left[:, i], rights[part.matrix][:, i]).reshape(-1)
            product = product + term if i else term
        parts[3 * at_part + 1] = product
    return np.concatenate(parts)


__all__ = ["PowerSGD", "Quantised", "TopK", "Twin", "read_push", "to_int8", "to_sign"]
