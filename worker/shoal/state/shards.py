"""State shards: the parts of a state that one rank holds.

A state is a set of named tensors; each rank holds chunks of some of them. Names and whole shapes
are the same in every layout, so that one layout can read the state of another:

    model.<parameter or buffer>            optim.<parameter>/<key of the optimizer's state>
    registered.<name>/<path>               registered state of the script; whole on every rank
    transient.<buffer>                     buffer outside of the model's state_dict
    setting.<group>/<key>                  setting of an optimizer's group that is a tensor

The last two exist only where every rank holds the whole model, and never in a checkpoint.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from shoal.state.host_copies import copy_staged
from shoal_proto.errors import InternalError

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

MODEL = "model."
OPTIM = "optim."
REGISTERED = "registered."
TRANSIENT = "transient."
SETTING = "setting."

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}


def name_of(dtype: torch.dtype) -> str:
    """Return the dtype's name, as in DTYPES."""
    return str(dtype).removeprefix("torch.")


def outline_of(tensor: Tensor) -> str:
    """Return the tensor's shape and dtype as text."""
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


@dataclass(frozen=True, kw_only=True, order=True)
class Chunk:
    """Part of a tensor: its offset and its size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...] | torch.Size) -> "Chunk":
        return cls(offsets=(0,) * len(shape), sizes=tuple(shape))

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, other: "Chunk") -> "Chunk | None":
        """Return the intersection; None if it is empty."""
        offsets, sizes = [], []
        for a, a_size, b, b_size in zip(
            self.offsets, self.sizes, other.offsets, other.sizes, strict=True
        ):
            start, stop = max(a, b), min(a + a_size, b + b_size)
            if start >= stop:
                return None
            offsets.append(start)
            sizes.append(stop - start)
        return Chunk(offsets=tuple(offsets), sizes=tuple(sizes))

    def slices_in(self, outer: "Chunk") -> tuple[slice, ...]:
        """Return the slices that cut this chunk out of a tensor that holds `outer`."""
        return tuple(
            slice(own - base, own - base + size)
            for own, base, size in zip(self.offsets, outer.offsets, self.sizes, strict=True)
        )


Needs = Callable[[str, tuple[int, ...], torch.dtype], Chunk | None]
"""Function of (name, whole shape, dtype) of a tensor that returns the needed chunk, if any.

Called once for every tensor of a state; may raise ShapeMismatch or DtypeMismatch.
"""


def whole_chunk(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Chunk:
    """Return the whole tensor as a chunk, for a rank that needs all tensors."""
    return Chunk.whole(shape)


@dataclass(frozen=True, kw_only=True)
class TensorShard:
    """Chunk of one tensor, with its contents."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    chunk: Chunk
    tensor: Tensor
    """Contents, of shape `chunk.sizes`; any strides, any device."""

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != self.chunk.sizes:
            raise InternalError(
                "a shard's tensor does not have the size of its chunk",
                seen=f"a tensor of {tuple(self.tensor.shape)}",
                expected=f"{self.chunk.sizes}",
            )

    @classmethod
    def whole(cls, tensor: Tensor) -> "TensorShard":
        return cls(shape=tuple(tensor.shape), chunk=Chunk.whole(tensor.shape), tensor=tensor)


@dataclass(frozen=True, kw_only=True)
class StateShard:
    """The part of the state after `step` committed steps that one rank holds."""

    step: int
    shards: Mapping[str, TensorShard]
    """A rank holds at most one chunk of a tensor."""
    values: Mapping[str, Json] = field(default_factory=dict)
    """Settings and counters; the same on all ranks, except `slots`."""
    elsewhere: frozenset[str] = frozenset()
    """Names of tensors that exist at this step on any rank; empty if they are unknown."""

    def copied(self) -> "StateShard":
        """Return a copy in host memory."""
        shards = {
            name: replace(shard, tensor=torch.empty(shard.chunk.sizes, dtype=shard.tensor.dtype))
            for name, shard in self.shards.items()
        }
        copy_staged(
            [shard.tensor for shard in shards.values()],
            [shard.tensor for shard in self.shards.values()],
        )
        return StateShard(
            step=self.step, shards=shards, values=self.values, elsewhere=self.elsewhere
        )

    @property
    def num_bytes(self) -> int:
        return sum(shard.tensor.nbytes for shard in self.shards.values())


Names = tuple[str, ...]


class GroupedChunks(Mapping[str, Chunk]):
    """Chunks by the name of their tensor, stored in groups of tensors with the same chunk.

    A thousand ranks may hold three million chunks in a few groups each.
    """

    def __init__(self, groups: Sequence[tuple[Chunk, Names]]) -> None:
        self.groups = groups

    @cached_property
    def _by_name(self) -> dict[str, Chunk]:
        return {name: chunk for chunk, names in self.groups for name in names}

    def __getitem__(self, name: str) -> Chunk:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)


def groups_of(chunks: Mapping[str, Chunk]) -> Sequence[tuple[Chunk, Names]]:
    """Return the distinct chunks, each with the names of its tensors."""
    if isinstance(chunks, GroupedChunks):
        return chunks.groups
    found: dict[Chunk, list[str]] = {}
    for name, chunk in chunks.items():
        found.setdefault(chunk, []).append(name)
    return [(chunk, tuple(names)) for chunk, names in found.items()]


def partition_names(groups: Iterable[Names]) -> Mapping[Names, Sequence[Names]]:
    """Split each group into sets of names, so that any group has all names of a set or none."""
    distinct = list(dict.fromkeys(groups))
    found_in: dict[str, list[int]] = {}
    for number, names in enumerate(distinct):
        for name in names:
            found_in.setdefault(name, []).append(number)
    sets: dict[tuple[int, ...], list[str]] = {}
    for name, numbers in found_in.items():
        sets.setdefault(tuple(numbers), []).append(name)
    parts: list[list[Names]] = [[] for _ in distinct]
    for holders, members in sets.items():
        together = tuple(members)
        for holder in holders:
            parts[holder].append(together)
    return dict(zip(distinct, parts, strict=True))
