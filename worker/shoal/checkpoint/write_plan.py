"""Who writes which part of a state. Each rank computes it for all, from what all of them hold."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.state.shards import Box, Holding
from shoal_proto.errors import DtypeMismatch, InvalidSpec, ShapeMismatch

CHUNK_BYTES = 64 * 1024 * 1024
"""Longer boxes are cut by rows: a reader has one chunk in memory beside what it needs of it."""


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A piece without what stands in it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box


def outlines_of(holding: Holding) -> list[Outline]:
    return [
        Outline(name=name, shape=piece.shape, dtype=piece.tensor.dtype, box=piece.box)
        for name, piece in holding.pieces.items()
    ]


def to_json(outlines: Sequence[Outline]) -> list[Any]:
    return [
        [
            outline.name,
            outline.shape,
            str(outline.dtype).removeprefix("torch."),
            outline.box.offsets,
            outline.box.sizes,
        ]
        for outline in outlines
    ]


def from_json(entries: Sequence[Any]) -> list[Outline]:
    return [
        Outline(
            name=name,
            shape=tuple(shape),
            dtype=getattr(torch, dtype),
            box=Box(offsets=tuple(offsets), sizes=tuple(sizes)),
        )
        for name, shape, dtype, offsets, sizes in entries
    ]


def shares(held: Sequence[Sequence[Outline]], known: Iterable[str] = ()) -> list[list[Outline]]:
    """The chunks that each rank writes, given what each holds: together every element once.

    What several ranks hold the lowest of them writes, so that a replicated state is that of one
    rank, not a mixture. `known` are names of tensors that must be among them. Raises InvalidSpec
    if elements are missing or boxes cross each other, ShapeMismatch or DtypeMismatch if ranks
    differ.
    """
    first: dict[str, Outline] = {}
    boxes: dict[str, set[Box]] = {}
    chunks: list[list[Outline]] = [[] for _ in held]
    for rank, outlines in enumerate(held):
        for outline in outlines:
            _check_same(first.setdefault(outline.name, outline), outline, rank)
            own = boxes.setdefault(outline.name, set())
            if outline.box not in own and _has_content(outline):
                own.add(outline.box)
                chunks[rank].extend(_cut(outline))
    missing = sorted(set(known) - set(first))
    if missing:
        raise InvalidSpec(f"no rank holds any of {missing[0]}", seen=f"{len(missing)} such tensors")
    for name, outline in first.items():
        _check_whole(name, Box.whole(outline.shape), sorted(boxes[name]))
    return chunks


def _has_content(outline: Outline) -> bool:
    """Whether there is something to write: elements, or a tensor that has none at all."""
    return outline.box.num_elements > 0 or outline.box == Box.whole(outline.shape)


def _cut(outline: Outline) -> Iterator[Outline]:
    box = outline.box
    num_bytes = box.num_elements * outline.dtype.itemsize
    if not box.sizes or num_bytes <= CHUNK_BYTES:
        yield outline
        return
    rows = max(1, CHUNK_BYTES * box.sizes[0] // num_bytes)
    for start in range(0, box.sizes[0], rows):
        part = Box(
            offsets=(box.offsets[0] + start, *box.offsets[1:]),
            sizes=(min(rows, box.sizes[0] - start), *box.sizes[1:]),
        )
        yield Outline(name=outline.name, shape=outline.shape, dtype=outline.dtype, box=part)


def _check_same(first: Outline, outline: Outline, rank: int) -> None:
    if first.shape != outline.shape:
        raise ShapeMismatch(
            f"rank {rank} holds another {outline.name} than the ranks before it",
            seen=str(outline.shape),
            expected=str(first.shape),
        )
    if first.dtype != outline.dtype:
        raise DtypeMismatch(
            f"rank {rank} holds another {outline.name} than the ranks before it",
            seen=str(outline.dtype),
            expected=str(first.dtype),
        )


def _check_whole(name: str, whole: Box, boxes: Sequence[Box]) -> None:
    """`boxes` are sorted by where they start, so only those still open can cross the next."""
    open_boxes: list[Box] = []
    for box in boxes:
        start = box.offsets[:1]
        open_boxes = [o for o in open_boxes if not start or o.offsets[0] + o.sizes[0] > start[0]]
        for other in open_boxes:
            if box.overlap(other) is not None:
                raise InvalidSpec(
                    f"two ranks hold parts of {name} that cross each other",
                    seen=f"{other} and {box}",
                    expected="boxes that are the same or apart",
                )
        open_boxes.append(box)
    held = sum(box.num_elements for box in boxes)
    if held != whole.num_elements:
        raise InvalidSpec(
            f"no rank holds all of {name}, nor do they together",
            seen=f"{held} elements",
            expected=f"{whole.num_elements}",
        )


__all__ = ["CHUNK_BYTES", "Outline", "from_json", "outlines_of", "shares", "to_json"]
