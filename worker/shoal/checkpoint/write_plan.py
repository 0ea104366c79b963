"""Plan of the parts of a state that each rank writes. Each rank computes the same plan from the
outlines of all ranks."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.state.optimizer_state import is_mark
from shoal.state.shards import Chunk, StateShard
from shoal_proto.errors import DtypeMismatch, InvalidSpec, ShapeMismatch

CHUNK_BYTES = 64 * 1024 * 1024
"""Limit of a chunk of several rows: a reader loads whole chunks."""


@dataclass(frozen=True, kw_only=True)
class PlannedChunk:
    """Tensor shard without its contents."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunk: Chunk


def items_of(state_shard: StateShard) -> list[PlannedChunk]:
    return [
        PlannedChunk(name=name, shape=shard.shape, dtype=shard.tensor.dtype, chunk=shard.chunk)
        for name, shard in state_shard.shards.items()
        if not is_mark(name)
    ]


def to_json(items: Sequence[PlannedChunk]) -> list[Any]:
    return [
        [
            item.name,
            item.shape,
            str(item.dtype).removeprefix("torch."),
            item.chunk.offsets,
            item.chunk.sizes,
        ]
        for item in items
    ]


def from_json(entries: Sequence[Any]) -> list[PlannedChunk]:
    return [
        PlannedChunk(
            name=name,
            shape=tuple(shape),
            dtype=getattr(torch, dtype),
            chunk=Chunk(offsets=tuple(offsets), sizes=tuple(sizes)),
        )
        for name, shape, dtype, offsets, sizes in entries
    ]


def plan_writes(
    held: Sequence[Sequence[PlannedChunk]], known: Iterable[str] = ()
) -> list[list[PlannedChunk]]:
    """Return the chunks that each rank writes, given the chunks that each rank holds.

    The lowest rank that holds a chunk writes it. `known`: names of tensors that some rank must
    hold. Raises InvalidSpec if elements or known tensors are missing or chunks overlap, and
    ShapeMismatch or DtypeMismatch if ranks differ.
    """
    first: dict[str, PlannedChunk] = {}
    chunks: dict[str, set[Chunk]] = {}
    planned: list[list[PlannedChunk]] = [[] for _ in held]
    for rank, items in enumerate(held):
        for item in items:
            _check_same(first.setdefault(item.name, item), item, rank)
            planned_chunks = chunks.setdefault(item.name, set())
            if item.chunk not in planned_chunks and _has_content(item):
                planned_chunks.add(item.chunk)
                planned[rank].extend(_cut(item))
    missing = sorted(name for name in set(known) - set(first) if not is_mark(name))
    if missing:
        raise InvalidSpec(f"no rank holds any of {missing[0]}", seen=f"{len(missing)} such tensors")
    for name, item in first.items():
        _check_whole(name, Chunk.whole(item.shape), sorted(chunks[name]))
    return planned


def _has_content(item: PlannedChunk) -> bool:
    """True if there is something to write: elements, or a whole tensor without elements."""
    return item.chunk.num_elements > 0 or item.chunk == Chunk.whole(item.shape)


def _cut(item: PlannedChunk) -> Iterator[PlannedChunk]:
    chunk = item.chunk
    num_bytes = chunk.num_elements * item.dtype.itemsize
    if not chunk.sizes or num_bytes <= CHUNK_BYTES:
        yield item
        return
    rows = max(1, CHUNK_BYTES * chunk.sizes[0] // num_bytes)
    for start in range(0, chunk.sizes[0], rows):
        part = Chunk(
            offsets=(chunk.offsets[0] + start, *chunk.offsets[1:]),
            sizes=(min(rows, chunk.sizes[0] - start), *chunk.sizes[1:]),
        )
        yield PlannedChunk(name=item.name, shape=item.shape, dtype=item.dtype, chunk=part)


def _check_same(first: PlannedChunk, item: PlannedChunk, rank: int) -> None:
    if first.shape != item.shape:
        raise ShapeMismatch(
            f"rank {rank} has {item.name} in another shape than the lower ranks",
            seen=str(item.shape),
            expected=str(first.shape),
        )
    if first.dtype != item.dtype:
        raise DtypeMismatch(
            f"rank {rank} has {item.name} in another dtype than the lower ranks",
            seen=str(item.dtype),
            expected=str(first.dtype),
        )


def _check_whole(name: str, whole: Chunk, chunks: Sequence[Chunk]) -> None:
    open_boxes: list[Chunk] = []
    for chunk in chunks:
        start = chunk.offsets[:1]
        open_boxes = [o for o in open_boxes if not start or o.offsets[0] + o.sizes[0] > start[0]]
        for other in open_boxes:
            if chunk.overlap(other) is not None:
                raise InvalidSpec(
                    f"two ranks hold parts of {name} that overlap each other",
                    seen=f"{other} and {chunk}",
                    expected="chunks that are equal or disjoint",
                )
        open_boxes.append(chunk)
    held = sum(chunk.num_elements for chunk in chunks)
    if held != whole.num_elements:
        raise InvalidSpec(
            f"the ranks together do not hold all of {name}",
            seen=f"{held} elements",
            expected=f"{whole.num_elements}",
        )
