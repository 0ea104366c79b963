"""The sizes of a segment's elements, from the layout of its version."""

from collections.abc import Iterator
from math import prod

from shoal_proto.dtypes import ITEM_BYTES
from shoal_proto.v1.weights_pb2 import ElementRun, Layout, Slice


def elements_of(layout: Layout, segment: int) -> list[ElementRun]:
    """Runs of elements of equal size that make up a segment. Bytes of no tensor, and of unknown
    dtypes, count as elements of one byte."""
    runs: list[ElementRun] = []
    at = 0
    for start, stop, element_bytes in sorted(_spans(layout, segment)):
        _extend(runs, 1, start - at)
        _extend(runs, element_bytes, stop - max(start, at))
        at = max(stop, at)
    _extend(runs, 1, layout.segment_bytes[segment] - at)
    return runs


def _spans(layout: Layout, segment: int) -> Iterator[tuple[int, int, int]]:
    for each in layout.slices:
        if each.segment == segment:
            element_bytes = ITEM_BYTES.get(layout.tensors[each.tensor].dtype, 1)
            yield each.at, each.at + _num_elements(layout, each) * element_bytes, element_bytes


def _num_elements(layout: Layout, each: Slice) -> int:
    return prod(each.sizes or layout.tensors[each.tensor].shape)


def _extend(runs: list[ElementRun], element_bytes: int, num_bytes: int) -> None:
    if num_bytes <= 0:
        return
    if runs and runs[-1].element_bytes == element_bytes:
        runs[-1].num_bytes += num_bytes
    else:
        runs.append(ElementRun(element_bytes=element_bytes, num_bytes=num_bytes))
