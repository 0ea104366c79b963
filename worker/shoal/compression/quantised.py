"""Gradients in 8 bits or 1 bit for each value.

Each rank receives one part of the values from all ranks, and sends the mean, coded again, to all
ranks. It keeps the error of the second coding for a later step. Tang et al., 1-bit Adam,
arXiv:2102.02888.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.compression.base import Averaging, Compression, Compressor, PackedTensors
from shoal.compression.codes import Code, Int8Code, OneBitCode
from shoal.compression.push_encoder import EncodedBlocks, PushBlock, PushEncoder, codec_of
from shoal.compression.residuals import Residuals, StepValues
from shoal.compression.wire import Wire
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import convert_fields


@dataclass(frozen=True, kw_only=True)
class Int8(Compression):
    """A byte for each value and a scale for each block of `block` values: about 1/4 of fp32's
    bytes. Raises InvalidSpec if `block` is not a positive multiple of 8."""

    name: ClassVar[str] = "int8"
    block: int = 256

    def __post_init__(self) -> None:
        convert_fields(self, indices=("block",))
        _check_block(self.block)

    def compressor(self) -> Compressor:
        return QuantisedCompressor(Int8Code(), self.block)

    def push_encoder(self) -> PushEncoder:
        return QuantisedEncoder(self.name, Int8Code(), self.block)


@dataclass(frozen=True, kw_only=True)
class OneBit(Compression):
    """A sign for each value and a scale for each block of `block` values: about 1/25 of fp32's
    bytes. Raises InvalidSpec if `block` is not a positive multiple of 8."""

    name: ClassVar[str] = "one-bit"
    block: int = 128

    def __post_init__(self) -> None:
        convert_fields(self, indices=("block",))
        _check_block(self.block)

    def compressor(self) -> Compressor:
        return QuantisedCompressor(OneBitCode(), self.block)

    def push_encoder(self) -> PushEncoder:
        return QuantisedEncoder(self.name, OneBitCode(), self.block)


def _check_block(block: int) -> None:
    if block < 8 or block % 8:
        raise InvalidSpec(
            "block is out of range", seen=str(block), expected="a multiple of 8, 8 or above"
        )


@dataclass(frozen=True)
class MeanError:
    """Coding error in the mean of a range of a parameter, kept by the serving rank."""

    start: int
    values: Tensor


class QuantisedCompressor(Compressor):
    """An all-to-all and an all-gather of coded parts.

    A rank sends 2 (n-1) B bytes for S values on n ranks. B is the size of a coded part, of
    ceil(S / n) values in whole blocks.
    """

    def __init__(self, code: Code, block: int) -> None:
        self._code = code
        self._block = block
        self._residuals = Residuals()
        self._mean_errors: StepValues[MeanError] = StepValues()

    def begin(self, step: int) -> None:
        self._residuals.begin(step)
        self._mean_errors.begin(step)

    def part(self, num_values: int, world_size: int) -> tuple[int, int]:
        """Return the number of values that each rank serves, and the block size."""
        share = -(-num_values // world_size)
        block = min(self._block, _round_up(share, 8))
        return _round_up(share, block), block

    def _average(self, packed: PackedTensors, wire: Wire) -> Averaging:
        size, num_ranks = packed.flat.numel(), wire.world_size
        length, block = self.part(size, num_ranks)
        values = self._residuals.compensate(packed, num_ranks * length)
        served = slice(wire.rank * length, (wire.rank + 1) * length)
        mean_errors = self._collect_mean_errors(packed, values, served, num_ranks)

        sent = self._code.encode(values.view(num_ranks, length), block)
        values -= self._code.decode(sent, block).view(-1)
        self._residuals.keep(packed, values)
        received = torch.empty_like(sent)
        yield wire.all_to_all(received, sent)

        mean = self._code.decode(received, block).mean(0).add_(mean_errors)
        coded = self._code.encode(mean.unsqueeze(0), block)
        mean -= self._code.decode(coded, block).view(-1)
        self._keep_mean_errors(packed, mean, served)
        yield wire.all_gather(received, coded)
        packed.flat.copy_(self._code.decode(received, block).view(-1)[:size])

    def _release(self, packed: PackedTensors) -> None:
        self._residuals.release(packed)
        self._collect_mean_errors(packed, packed.flat, slice(0, 0), 1)

    def _collect_mean_errors(
        self, packed: PackedTensors, values: Tensor, served: slice, num_ranks: int
    ) -> Tensor:
        """Return the kept mean errors of the values that this rank now serves, and clear them.

        Errors of values that another rank now serves are added to this rank's own values. They are
        multiplied by the number of ranks, because the mean divides by it.
        """
        sums = torch.zeros(served.stop - served.start, dtype=torch.float32, device=values.device)
        for name, span in packed.slots():
            error = self._mean_errors.get(name)
            if error is None:
                continue
            self._mean_errors.put(name, None)
            start = span.start + error.start
            stop = start + error.values.numel()
            before = min(max(served.start, start), stop)
            after = min(max(served.stop, before), stop)
            overlap = slice(before - served.start, after - served.start)
            if before < after:
                sums[overlap] += error.values[before - start : after - start]
            values[start:before] += error.values[: before - start] * num_ranks
            values[after:stop] += error.values[after - start :] * num_ranks
        return sums

    def _keep_mean_errors(self, packed: PackedTensors, errors: Tensor, served: slice) -> None:
        for name, span in packed.slots():
            start, stop = max(span.start, served.start), min(span.stop, served.stop)
            if start < stop:
                values = errors[start - served.start : stop - served.start]
                self._mean_errors.put(name, MeanError(start - span.start, values))


class QuantisedEncoder(PushEncoder):
    """Encodes blocks as one row, padded with zeros."""

    def __init__(self, name: str, code: Code, block: int) -> None:
        self._name = name
        self._code = code
        self._block = block

    def encode(self, values: Tensor, blocks: Sequence[PushBlock]) -> EncodedBlocks:
        size = values.numel()
        block = min(self._block, _round_up(max(size, 1), 8))
        filled = values.new_zeros(1, _round_up(size, block))
        filled[0, :size] = values
        data = self._code.encode(filled, block)
        codec = codec_of(self._name, data)
        codec.block = block
        decoded = self._code.decode(data, block).view(-1)[:size]
        return EncodedBlocks(codec=codec, data=data.view(-1), decoded=decoded)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
