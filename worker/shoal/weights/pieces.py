"""Parts of a version: the elements that each rank publishes, and their offsets in its segment.

Together the parts have each element exactly once, which the coordinator verifies.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shoal.layouts.base import Layout as ModelLayout
from shoal.state.host_copies import copy_staged
from shoal.state.shards import DTYPES, Chunk, TensorShard, name_of
from shoal_proto.errors import InvalidSpec
from shoal_proto.v1.weights_pb2 import Layout, Slice, TensorSpec

ALIGNMENT_BYTES = 64
"""Alignment of each piece in a segment, so that it can be viewed in any dtype."""
_KEPT_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Floating point dtypes of quantized values, which are published without conversion."""


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """Tensor of the model as a rank holds it."""

    shard: TensorShard
    replicas: Sequence[int]
    """Ranks that hold the same chunk, and divide its publication among them."""


@dataclass(frozen=True, kw_only=True)
class HeldWeights:
    """Tensors of a rank after a committed step, not copied: valid until the next step."""

    step: int
    rank: int
    world_size: int
    tensors: Mapping[str, HeldTensor]
    """Tensors by first name, in the same order on all ranks that hold the same tensors."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """First name of each tied tensor, by its other names."""


def sharded_weights(
    layout: ModelLayout,
    *,
    step: int,
    tied: Mapping[str, str],
    without_elements: Mapping[str, Tensor],
) -> HeldWeights:
    """Return a rank's weights of a model that is sharded over ranks."""
    tensors = {
        name: HeldTensor(shard=layout.shard(name, tensor), replicas=layout.replicas(name))
        for name, tensor in layout.held.items()
    }
    for name, tensor in without_elements.items():
        tensors.setdefault(name, HeldTensor(shard=TensorShard.whole(tensor), replicas=()))
    world = layout.world
    return HeldWeights(
        step=step, rank=world.rank, world_size=world.world_size, tensors=tensors, tied=tied
    )


def replicated_weights(
    tensors: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    *,
    step: int,
    rank: int,
    world_size: int,
    tied: Mapping[str, str],
) -> HeldWeights:
    """Return a rank's weights of a model that every rank holds as a whole.

    Parameters are the same on all ranks, bit for bit; the first rank publishes its buffers.
    """
    everybody = range(world_size)
    held = {
        name: HeldTensor(shard=TensorShard.whole(each.detach()), replicas=ranks)
        for group, ranks in ((tensors, everybody), (buffers, everybody[:1]))
        for name, each in group.items()
    }
    return HeldWeights(step=step, rank=rank, world_size=world_size, tensors=held, tied=tied)


@dataclass(frozen=True, kw_only=True)
class PublishedPiece:
    """A rectangular part of a tensor that this rank publishes."""

    name: str
    chunk: Chunk
    tensor: Tensor
    """View of the rank's tensor, whose dtype may differ from the published one."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.chunk.num_elements * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """Pieces of one rank, each with its offset in the segment."""

    pieces: Sequence[PublishedPiece]
    offsets: Sequence[int]
    layout: Layout

    @property
    def num_bytes(self) -> int:
        """Size of the segment in bytes; at least 1."""
        return int(self.layout.segment_bytes[0])

    @torch.no_grad()
    def copy_into(self, memory: Tensor) -> None:
        """Copy the pieces' present values into a segment's bytes."""
        targets = [
            memory[at : at + piece.num_bytes].view(piece.dtype).view(piece.chunk.sizes)
            for at, piece in zip(self.offsets, self.pieces, strict=True)
        ]
        copy_staged(targets, [piece.tensor for piece in self.pieces])


def part_of(held: HeldWeights, dtype: torch.dtype | None = None) -> RankPart:
    """Return the part of a version that this rank publishes; floats in `dtype`, if it is given.

    Raises InvalidSpec for a tensor that is sparse, has no values, or has an unsupported dtype.
    """
    specs = {name: _spec(name, each.shard, dtype) for name, each in held.tensors.items()}
    pieces = [piece for group in _by_replicas(held, dtype) for piece in group]
    offsets, end = [], 0
    for piece in pieces:
        offsets.append(end)
        end += -(-piece.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    other_names: dict[str, list[str]] = {}
    for name, first in held.tied.items():
        if first in specs:
            other_names.setdefault(first, []).append(name)
    numbers = {name: number for number, name in enumerate(specs)}
    layout = Layout(tensors=specs.values(), segment_bytes=[max(end, 1)])
    for first, names in other_names.items():
        for name in names:
            numbers[name] = len(layout.tensors)
            layout.tensors.append(specs[first])
            layout.tensors[-1].name = name
    for piece, at in zip(pieces, offsets, strict=True):
        piece_slice = _slice_of(piece, tuple(specs[piece.name].shape), segment=held.rank, at=at)
        for name in (piece.name, *other_names.get(piece.name, ())):
            # All names of a tied tensor refer to the same bytes.
            layout.slices.add(tensor=numbers[name]).MergeFrom(piece_slice)
    return RankPart(pieces=pieces, offsets=offsets, layout=layout)


def balanced(pieces: Sequence[PublishedPiece], index: int, count: int) -> Iterator[PublishedPiece]:
    """Yield the share of the rank at `index` among `count` ranks that hold the same pieces.

    Shares are disjoint and about equal in bytes. Tensors are cut only between rows.
    """
    if count == 1:
        yield from (piece for piece in pieces if piece.num_bytes)
        return
    total = sum(piece.num_bytes for piece in pieces)
    low, high = total * index // count, total * (index + 1) // count
    before = 0
    for piece in pieces:
        dim, rows = _rows_of(piece.chunk)
        if piece.num_bytes:
            start, stop = (
                min(max((bound - before) * rows // piece.num_bytes, 0), rows)
                for bound in (low, high)
            )
            if start < stop:
                yield piece if stop - start == rows else _narrowed(piece, dim, start, stop)
        before += piece.num_bytes


def _by_replicas(held: HeldWeights, dtype: torch.dtype | None) -> Iterator[list[PublishedPiece]]:
    groups: dict[tuple[int, ...], list[PublishedPiece]] = {}
    for name, each in held.tensors.items():
        ranks = tuple(sorted(each.replicas))
        if held.rank in ranks and each.shard.chunk.num_elements:
            _check_readable(name, each.shard.tensor)
            groups.setdefault(ranks, []).append(
                PublishedPiece(
                    name=name,
                    chunk=each.shard.chunk,
                    tensor=each.shard.tensor.detach(),
                    dtype=published_dtype(each.shard.tensor.dtype, dtype),
                )
            )
    for ranks, pieces in groups.items():
        yield list(balanced(pieces, ranks.index(held.rank), len(ranks)))


def _check_readable(name: str, tensor: Tensor) -> None:
    reason = ""
    if tensor.is_meta:
        reason = "it is on the meta device, which has no values"
    elif tensor.layout is not torch.strided:
        reason = f"it is {str(tensor.layout).removeprefix('torch.')}"
    if reason:
        raise InvalidSpec(
            f"{name} cannot be published: {reason}",
            seen=f"{tuple(tensor.shape)} on {tensor.device}",
            expected="a dense tensor with values",
        )


def _rows_of(chunk: Chunk) -> tuple[int, int]:
    """Return the dimension along which a chunk can be cut contiguously, and its size."""
    return next(((dim, size) for dim, size in enumerate(chunk.sizes) if size > 1), (0, 1))


def _narrowed(piece: PublishedPiece, dim: int, start: int, stop: int) -> PublishedPiece:
    offsets, sizes = list(piece.chunk.offsets), list(piece.chunk.sizes)
    offsets[dim] += start
    sizes[dim] = stop - start
    chunk = Chunk(offsets=tuple(offsets), sizes=tuple(sizes))
    return replace(piece, chunk=chunk, tensor=piece.tensor.narrow(dim, start, stop - start))


def published_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the published dtype: the wanted one for floating point tensors, else their own."""
    casts = wanted is not None and own.is_floating_point and own not in _KEPT_DTYPES
    return wanted if casts and wanted is not None else own


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise InvalidSpec for a dtype in which weights cannot be published."""
    if dtype is not None and not (name_of(dtype) in DTYPES and dtype.is_floating_point):
        raise InvalidSpec(
            "weights cannot be published in this dtype",
            seen=str(dtype),
            expected="a floating point dtype such as torch.bfloat16, or None: no conversion",
        )


def _spec(name: str, shard: TensorShard, dtype: torch.dtype | None) -> TensorSpec:
    own = published_dtype(shard.tensor.dtype, dtype)
    if name_of(own) not in DTYPES:
        raise InvalidSpec(
            f"{name} cannot be published", seen=str(own), expected=f"one of {', '.join(DTYPES)}"
        )
    return TensorSpec(name=name, dtype=name_of(own), shape=shard.shape)


def _slice_of(piece: PublishedPiece, shape: tuple[int, ...], *, segment: int, at: int) -> Slice:
    if piece.chunk == Chunk.whole(shape):
        return Slice(segment=segment, at=at)
    return Slice(offsets=piece.chunk.offsets, sizes=piece.chunk.sizes, segment=segment, at=at)
