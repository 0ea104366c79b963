"""Interface of every compression, and its guarantees.

A `Compression` is what a user chooses: a name and options, the same on all members. The
`Compressor` that it makes belongs to one member and holds what must outlive a step.

Every compressor promises:

- the averages are bit for bit the same on all ranks;
- a NaN or an infinity on any rank gives NaN or infinity on all of them;
- what it leaves out of a gradient is sent in later steps, if it keeps residuals: the sum of all
  averages, plus the mean of what the ranks still hold back, is the sum of all mean gradients.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.compression.push_encoder import PushEncoder
from shoal.compression.wire import Wire

Averaging = Generator[dist.Work, None, None]
"""An average under way: yields each collective, and is resumed when that has ended."""


@dataclass(frozen=True, kw_only=True)
class Compression(ABC):
    """A way to make gradients smaller, with its options."""

    name: ClassVar[str]

    @abstractmethod
    def compressor(self) -> "Compressor":
        """Make a member's compressor; it lives as long as the member trains."""

    @abstractmethod
    def push_encoder(self) -> PushEncoder:
        """The same for gradients that are not averaged, but pushed to parameter servers."""

    def __str__(self) -> str:
        """Name and every option, which members compare."""
        options = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))
        return f"{self.name}({options})"


@dataclass(frozen=True)
class PackedTensors:
    """Several tensors concatenated into a flat one."""

    flat: Tensor
    """Values of this rank; once averaged, the averages."""
    names: Sequence[str]
    shapes: Sequence[torch.Size]

    def slots(self) -> Iterator[tuple[str, slice]]:
        """Yield each name with the slice of its values in `flat`."""
        start = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            yield name, slice(start, start + shape.numel())
            start += shape.numel()


class Compressor(ABC):
    """Averages over a group what it can make smaller. See the head of this module."""

    def averaging(self, packed: PackedTensors, wire: Wire) -> Averaging:
        """Replace the values in `packed` by their mean over the ranks of `wire`.

        All ranks call this for the same names and shapes in the same order. On a single rank
        nothing is lost: the values come back with all that was held back before.
        """
        wire.traffic.count_plain(packed.flat, wire.world_size)
        if wire.world_size == 1:
            self._release(packed)
            return
        yield from self._average(packed, wire)

    def average(self, values: Mapping[str, Tensor], wire: Wire) -> dict[str, Tensor]:
        """The means of `values` over the ranks, as new tensors. Returns when they are there.

        All tensors have one dtype and device; all ranks call this with the same names and shapes.
        """
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in values.values()])
        packed = PackedTensors(flat, list(values), [tensor.shape for tensor in values.values()])
        for work in self.averaging(packed, wire):
            work.wait()
        return {name: flat[place].view_as(values[name]) for name, place in packed.slots()}

    @abstractmethod
    def _average(self, packed: PackedTensors, wire: Wire) -> Averaging:
        """Average as `averaging` does, for two ranks or more."""

    def _release(self, packed: PackedTensors) -> None:  # noqa: B027 - not all hold something back
        """Add to the values all that was held back of them."""

    def begin(self, step: int) -> None:  # noqa: B027 - not all keep something between steps
        """`step` steps are committed, and the next is about to be computed.

        What was kept in the step before counts if that is among them, else it is forgotten: the
        step did not happen and is computed again.
        """

    def regroup(self) -> None:  # noqa: B027 - not all have something in common with others
        """Other ranks than before take part from now on: forget what all must have in common."""
