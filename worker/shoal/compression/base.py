"""Interface of every compression, and its guarantees.

A `Compression` has a name and options, the same on all members. It makes each member's
`Compressor`, which holds the state that is kept between steps.

Every compressor promises:

- the averages are bit for bit the same on all ranks;
- a NaN or an infinity on any rank gives NaN or infinity on all of them;
- residuals and coding errors of averages, if it keeps any, are sent in later steps. The sum of all
  averages, plus the means of what is still kept, equals the sum of the mean gradients, except for
  rounding and for what lost ranks kept.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.compression.push_encoder import PushEncoder
from shoal.compression.wire import Wire
from shoal.model.several import SeveralModels
from shoal_proto.errors import InvalidSpec

Averaging = Generator[dist.Work, None, None]
"""An average in progress: yields each collective, and is resumed at its end."""


@dataclass(frozen=True, kw_only=True)
class Compression(ABC):
    """A method to compress gradients, with its options."""

    name: ClassVar[str]

    @abstractmethod
    def compressor(self) -> "Compressor":
        """Make a member's compressor, for all its steps."""

    @abstractmethod
    def push_encoder(self) -> PushEncoder:
        """Make a member's encoder for pushes to parameter servers."""

    def __str__(self) -> str:
        """Return name and options, a text that members compare."""
        options = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))
        return f"{self.name}({options})"


def refuse_loss_weights(compression: Compression | None) -> None:
    """Raise InvalidSpec for weighted losses with compressed gradients."""
    if compression is not None:
        raise InvalidSpec(
            "losses with weights of their own are not trained with compressed gradients",
            seen=f"session.backward(loss, weight=...) and compression {compression}",
            expected="one of the two: values that compression leaves out of a step are added to the"
            " next step, which is divided by another sum of weights",
        )


def refuse_several_models(compression: Compression | None, model: nn.Module) -> None:
    """Raise InvalidSpec for several models with compressed gradients."""
    if compression is not None and isinstance(model, SeveralModels):
        raise InvalidSpec(
            "several models are not trained with compressed gradients",
            seen=f"{len(model)} models and compression {compression}",
            expected="one of the two",
        )


def real_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of a tensor's real numbers: a complex tensor has twice as many in its last
    dimension."""
    if not tensor.is_complex():
        return tensor.shape
    return torch.Size([*tensor.shape[:-1], 2 * tensor.shape[-1]] if tensor.ndim else [2])


@dataclass(frozen=True)
class PackedTensors:
    """Several tensors, as real numbers, concatenated into a flat one."""

    flat: Tensor
    names: Sequence[str]
    shapes: Sequence[torch.Size]

    def __post_init__(self) -> None:
        total = sum(shape.numel() for shape in self.shapes)
        assert self.flat.numel() == total, f"{self.flat.numel()} numbers for shapes of {total}"

    def slots(self) -> Iterator[tuple[str, slice]]:
        """Yield each name with its slice in `flat`."""
        start = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            yield name, slice(start, start + shape.numel())
            start += shape.numel()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


class Compressor(ABC):
    """Averages compressed gradients over a group; see the module."""

    def averaging(self, packed: PackedTensors, wire: Wire) -> Averaging:
        """Replace the values in `packed` by their mean over the ranks of `wire`.

        All ranks must call this for the same names and shapes in the same order. A single rank
        compresses nothing, and adds the residuals of earlier steps to its values.
        """
        wire.traffic.count_plain(packed.flat, wire.world_size)
        if wire.world_size == 1:
            self._release(packed)
            return
        yield from self._average(packed, wire)

    def average(self, values: Mapping[str, Tensor], wire: Wire) -> dict[str, Tensor]:
        """Return the means of `values` over the ranks.

        All tensors must have one dtype and device. All ranks must call this with the same names and
        shapes.
        """
        flat = torch.cat([_real(tensor.detach()).reshape(-1) for tensor in values.values()])
        packed = PackedTensors(flat, list(values), list(map(real_shape, values.values())))
        for work in self.averaging(packed, wire):
            work.wait()
        return {
            name: flat[span].view(values[name].dtype).view_as(values[name])
            for name, span in packed.slots()
        }

    @abstractmethod
    def _average(self, packed: PackedTensors, wire: Wire) -> Averaging:
        """Average over two ranks or more."""

    def _release(self, packed: PackedTensors) -> None:  # noqa: B027 - not all keep residuals
        """Add the residuals to the values, and clear the residuals."""

    def begin(self, step: int) -> None:  # noqa: B027 - not all keep state between steps
        """Begin the next step; `step` steps are committed.

        The previous step's state is kept only if that step is committed.
        """

    def regroup(self) -> None:  # noqa: B027 - not all share state with other ranks
        """Discard state that all ranks must have alike: the set of ranks has changed."""
