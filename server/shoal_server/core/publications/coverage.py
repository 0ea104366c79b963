"""Merging of ranks' layouts, and the check that they cover each element exactly once."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PublishedTensor:
    """A tensor of the model, with its global shape."""

    name: str
    dtype: str
    shape: Numbers
    item_bytes: int


@dataclass(frozen=True, slots=True)
class PublishedSlice:
    """A rectangular part of a tensor, row-major and contiguous in a segment."""

    tensor: int
    """Index into the layout's tensors."""
    offsets: Numbers
    """Offset per dimension, in elements. Empty `offsets` and `sizes`: the whole tensor."""
    sizes: Numbers
    segment: int
    at: int
    """Offset in the segment, in bytes."""


@dataclass(frozen=True, slots=True)
class PublishedLayout:
    """Position of each element of a version in its segments."""

    tensors: tuple[PublishedTensor, ...]
    slices: tuple[PublishedSlice, ...]
    segment_bytes: Numbers


class NotCovered(Exception):
    """Raised for parts that are not one whole model."""

    def __init__(self, what: str, seen: str, expected: str) -> None:
        super().__init__(f"{what}: {seen}; expected {expected}")
        self.what, self.seen, self.expected = what, seen, expected


def merged(parts: Sequence[PublishedLayout]) -> PublishedLayout:
    """Merge the ranks' parts, in the order of ranks, to the layout of a version.

    Raises NotCovered if ranks disagree on a tensor, if a part does not have exactly one segment, or
    if a slice is in another rank's segment or of an unlisted tensor.
    """
    indices: dict[str, int] = {}
    tensors: list[PublishedTensor] = []
    slices: list[PublishedSlice] = []
    for rank, part in enumerate(parts):
        if len(part.segment_bytes) != 1:
            raise NotCovered(
                f"the part of rank {rank} has no segment of its own",
                seen=f"{len(part.segment_bytes)} segments",
                expected="exactly one segment",
            )
        tensor_indices: list[int] = []
        for tensor in part.tensors:
            index = indices.setdefault(tensor.name, len(tensors))
            if index == len(tensors):
                tensors.append(tensor)
            elif tensors[index] != tensor:
                raise NotCovered(
                    f"ranks disagree on tensor {tensor.name}",
                    seen=f"{_kind(tensor)} on rank {rank}",
                    expected=_kind(tensors[index]),
                )
            tensor_indices.append(index)
        for each in part.slices:
            if each.segment != rank or each.tensor >= len(tensor_indices):
                raise NotCovered(
                    f"the part of rank {rank} has a slice that is not its own",
                    seen=f"tensor {each.tensor} in segment {each.segment}",
                    expected=f"one of its {len(tensor_indices)} tensors, in segment {rank}",
                )
            slices.append(
                PublishedSlice(tensor_indices[each.tensor], each.offsets, each.sizes, rank, each.at)
            )
    sizes = tuple(part.segment_bytes[0] for part in parts)
    return PublishedLayout(tuple(tensors), tuple(slices), sizes)


def check_cover(layout: PublishedLayout) -> None:
    """Raise NotCovered unless the slices cover each element exactly once, within their segments."""
    of_tensor: dict[int, list[PublishedSlice]] = defaultdict(list)
    for each in layout.slices:
        of_tensor[each.tensor].append(_whole(each, layout))
    for index, tensor in enumerate(layout.tensors):
        slices = of_tensor[index]
        for each in slices:
            _check_bounds(each, tensor, layout)
        boxes = [each for each in slices if prod(each.sizes)]
        if pair := _overlapping(boxes):
            raise NotCovered(
                f"tensor {tensor.name} has elements twice",
                seen=" and ".join(map(_shown, pair)),
                expected="each element once",
            )
        covered, wanted = sum(prod(each.sizes) for each in boxes), prod(tensor.shape)
        if covered != wanted:
            raise NotCovered(
                f"tensor {tensor.name} is not whole",
                seen=f"{covered} of {wanted} elements, in {len(boxes)} slices",
                expected="each element once",
            )


def _whole(each: PublishedSlice, layout: PublishedLayout) -> PublishedSlice:
    if each.sizes or each.offsets:
        return each
    shape = layout.tensors[each.tensor].shape
    return PublishedSlice(each.tensor, (0,) * len(shape), shape, each.segment, each.at)


def _check_bounds(each: PublishedSlice, tensor: PublishedTensor, layout: PublishedLayout) -> None:
    shape = tensor.shape
    fits = len(each.offsets) == len(each.sizes) == len(shape) and all(
        start + size <= length
        for start, size, length in zip(each.offsets, each.sizes, shape, strict=True)
    )
    if not fits:
        raise NotCovered(
            f"a slice reaches beyond tensor {tensor.name}",
            seen=_shown(each),
            expected=f"within shape {list(shape)}",
        )
    stop = each.at + prod(each.sizes) * tensor.item_bytes
    if stop > layout.segment_bytes[each.segment]:
        raise NotCovered(
            f"a slice of tensor {tensor.name} reaches beyond its segment",
            seen=f"bytes up to {stop} of segment {each.segment}",
            expected=f"at most {layout.segment_bytes[each.segment]}",
        )


def _overlapping(boxes: Sequence[PublishedSlice]) -> tuple[PublishedSlice, PublishedSlice] | None:
    """Return two boxes with a common element, if any. Sweeps along the dimension with the most
    distinct offsets, so that few boxes are open at once."""
    if len(boxes) < 2:
        return None
    num_dims = len(boxes[0].sizes)
    if not num_dims:
        return boxes[0], boxes[1]
    along = max(range(num_dims), key=lambda d: len({box.offsets[d] for box in boxes}))
    still_open: list[PublishedSlice] = []
    for box in sorted(boxes, key=lambda each: each.offsets[along]):
        start = box.offsets[along]
        still_open = [b for b in still_open if b.offsets[along] + b.sizes[along] > start]
        for other in still_open:
            if _meet(box, other):
                return other, box
        still_open.append(box)
    return None


def _meet(one: PublishedSlice, other: PublishedSlice) -> bool:
    pairs = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in pairs)


def _shown(each: PublishedSlice) -> str:
    spans = ", ".join(f"{a}:{a + n}" for a, n in zip(each.offsets, each.sizes, strict=False))
    return f"[{spans}] of segment {each.segment}"


def _kind(tensor: PublishedTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
