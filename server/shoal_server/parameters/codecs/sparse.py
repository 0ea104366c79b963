"""Sparse gradients: all sent values (float32), then their positions (int32, rising). Values at
other positions are 0."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal_proto.errors import MalformedMessage
from shoal_proto.pieces import Buffer
from shoal_proto.v1.codec_pb2 import GradientCodec

ENTRY_BYTES = 8


class SparseDecoder:
    def __init__(self, codec: GradientCodec, sizes: Sequence[int]) -> None:
        self._num_values = sum(sizes)
        self._num_sent = codec.num_bytes // ENTRY_BYTES
        self.num_bytes = self._num_sent * ENTRY_BYTES

    def decode(self, data: Buffer) -> Tensor:
        """Raises MalformedMessage for positions that are out of range, or do not rise."""
        values = torch.zeros(self._num_values)
        if not self._num_sent:
            return values
        sent = torch.frombuffer(data, dtype=torch.float32, count=self._num_sent)
        positions = torch.frombuffer(data, dtype=torch.int32, offset=4 * self._num_sent)
        self._check(positions)
        values[positions.to(torch.int64)] = sent
        return values

    def _check(self, positions: Tensor) -> None:
        first, last = int(positions[0]), int(positions[-1])
        is_rising = bool((positions[1:] > positions[:-1]).all())
        if first < 0 or last >= self._num_values or not is_rising:
            raise MalformedMessage(
                "the positions of a compressed gradient's values are out of range or order",
                seen=f"{len(positions)} positions from {first} to {last},"
                f" {'rising' if is_rising else 'not rising'}",
                expected=f"rising positions from 0 to {self._num_values - 1}",
            )
