"""Parts of a version: the elements that a rank publishes, and their places in its segment.

Each rank works out its part from what it holds itself: no rank asks another one, and nothing is
gathered. Together the parts have each element exactly once, which the coordinator verifies.
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
"""Each piece begins at a multiple of it, so that it can be viewed in any dtype."""
_KEPT_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Floating point numbers that are codes of others: these are published as they are."""


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """Tensor of the model as a rank holds it."""

    shard: TensorShard
    replicas: Sequence[int]
    """Ranks that hold this chunk bit for bit and publish it in parts among them. Without this rank
    if others publish the chunk."""


@dataclass(frozen=True, kw_only=True)
class HeldWeights:
    """Tensors that a rank holds of the model after a committed step. Not copied: valid until
    the next step."""

    step: int
    rank: int
    world_size: int
    tensors: Mapping[str, HeldTensor]
    """Tensors by first name, in the same order on all ranks that hold the same."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """First name of a tensor by each further name."""


def held_in(
    layout: ModelLayout,
    *,
    step: int,
    tied: Mapping[str, str],
    without_elements: Mapping[str, Tensor],
) -> HeldWeights:
    """Weights that a rank holds of a model that is laid out over ranks."""
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


def held_by_all(
    tensors: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    *,
    step: int,
    rank: int,
    world_size: int,
    tied: Mapping[str, str],
) -> HeldWeights:
    """Weights that a rank holds of a model that all ranks have whole. Parameters are the same bit
    for bit; of buffers the first rank's are published."""
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
    """Position of the piece in the whole tensor."""
    tensor: Tensor
    """View of what the rank holds; its dtype may differ from the published one."""
    dtype: torch.dtype
    """The published one."""

    @property
    def num_bytes(self) -> int:
        return self.chunk.num_elements * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """Pieces of one rank, each with its place in the segment."""

    pieces: Sequence[PublishedPiece]
    places: Sequence[int]
    """Offset of each piece in the segment, in bytes."""
    layout: Layout
    """This rank's own: its tensors, its slices, the bytes of its one segment."""

    @property
    def num_bytes(self) -> int:
        """Size of the segment in bytes; at least one, since no memory is empty."""
        return int(self.layout.segment_bytes[0])

    @torch.no_grad()
    def copy_into(self, memory: Tensor) -> None:
        """Write the pieces into a segment's bytes, as they are at this moment."""
        targets = [
            memory[at : at + piece.num_bytes].view(piece.dtype).view(piece.chunk.sizes)
            for at, piece in zip(self.places, self.pieces, strict=True)
        ]
        copy_staged(targets, [piece.tensor for piece in self.pieces])


def part_of(held: HeldWeights, dtype: torch.dtype | None = None) -> RankPart:
    """Part of a version that this rank publishes, with floating point numbers in `dtype` if given.

    Raises InvalidSpec for a tensor whose dtype no reader knows.
    """
    specs = {name: _spec(name, each.shard, dtype) for name, each in held.tensors.items()}
    pieces = [piece for group in _by_replicas(held, dtype) for piece in group]
    places, end = [], 0
    for piece in pieces:
        places.append(end)
        end += -(-piece.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    further: dict[str, list[str]] = {}
    for name, first in held.tied.items():
        if first in specs:
            further.setdefault(first, []).append(name)
    numbers = {name: number for number, name in enumerate(specs)}
    layout = Layout(tensors=specs.values(), segment_bytes=[max(end, 1)])
    for first, names in further.items():
        for name in names:
            numbers[name] = len(layout.tensors)
            layout.tensors.append(_renamed(specs[first], name))
    for piece, at in zip(pieces, places, strict=True):
        own = _slice_of(piece, tuple(specs[piece.name].shape), segment=held.rank, at=at)
        for name in (piece.name, *further.get(piece.name, ())):
            # The same bytes under each name of a tied tensor.
            layout.slices.add(tensor=numbers[name]).MergeFrom(own)
    return RankPart(pieces=pieces, places=places, layout=layout)


def balanced(pieces: Sequence[PublishedPiece], index: int, count: int) -> Iterator[PublishedPiece]:
    """Share of the rank at `index` in pieces that `count` ranks hold. All shares have about as many
    bytes, and together they are the whole. Tensors are cut between rows only."""
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
    """Pieces of this rank. What the same ranks hold is laid in a line, and cut between them."""
    groups: dict[tuple[int, ...], list[PublishedPiece]] = {}
    for name, each in held.tensors.items():
        ranks = tuple(sorted(each.replicas))
        if held.rank in ranks and each.shard.chunk.num_elements:
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


def _rows_of(chunk: Chunk) -> tuple[int, int]:
    """The dimension along which a chunk can be cut into parts that lie in one piece, and its
    extent."""
    return next(((dim, size) for dim, size in enumerate(chunk.sizes) if size > 1), (0, 1))


def _narrowed(piece: PublishedPiece, dim: int, start: int, stop: int) -> PublishedPiece:
    offsets, sizes = list(piece.chunk.offsets), list(piece.chunk.sizes)
    offsets[dim] += start
    sizes[dim] = stop - start
    chunk = Chunk(offsets=tuple(offsets), sizes=tuple(sizes))
    return replace(piece, chunk=chunk, tensor=piece.tensor.narrow(dim, start, stop - start))


def published_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Dtype of a tensor as published: the wanted one for floating point numbers, otherwise its
    own."""
    casts = wanted is not None and own.is_floating_point and own not in _KEPT_DTYPES
    return wanted if casts and wanted is not None else own


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise InvalidSpec for a dtype that no weights can be published in."""
    if dtype is not None and not (name_of(dtype) in DTYPES and dtype.is_floating_point):
        raise InvalidSpec(
            "weights cannot be published in this dtype",
            seen=str(dtype),
            expected="a floating point dtype such as torch.bfloat16, or None: as they are",
        )


def _spec(name: str, shard: TensorShard, dtype: torch.dtype | None) -> TensorSpec:
    own = published_dtype(shard.tensor.dtype, dtype)
    if name_of(own) not in DTYPES:
        raise InvalidSpec(
            f"{name} cannot be published", seen=str(own), expected=f"one of {', '.join(DTYPES)}"
        )
    return TensorSpec(name=name, dtype=name_of(own), shape=shard.shape)


def _renamed(spec: TensorSpec, name: str) -> TensorSpec:
    return TensorSpec(name=name, dtype=spec.dtype, shape=spec.shape)


def _slice_of(piece: PublishedPiece, shape: tuple[int, ...], *, segment: int, at: int) -> Slice:
    if piece.chunk == Chunk.whole(shape):
        return Slice(segment=segment, at=at)
    return Slice(offsets=piece.chunk.offsets, sizes=piece.chunk.sizes, segment=segment, at=at)
