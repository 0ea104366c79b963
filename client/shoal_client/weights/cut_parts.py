"""Layouts of the segments that parameter servers make from a cut. The columns of a table's shard
are tensors with reserved names: `shoal.tables/TABLE/SHARD/COLUMN`.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from shoal_proto import MAX_MESSAGE_BYTES
from shoal_proto.dtypes import ITEM_BYTES
from shoal_proto.errors import InvalidSpec, MalformedMessage
from shoal_proto.v1 import weights_pb2 as pb

TABLES = "shoal.tables/"
MAX_PART_LAYOUT_BYTES = MAX_MESSAGE_BYTES - 64 * 1024
"""Leaves space for the rest of the message."""
IDS, BIRTHS, VALUES = "ids", "births", "values"

Numbers = tuple[int, ...]


def cut_parts(cut: pb.CutTablesReply, tied: Mapping[str, str]) -> list[pb.CutPart]:
    """The parts of a cut, in the order of its shards, for ranks 1, 2, ...; the publisher's own part
    is of rank 0. `tied`: first names of parameters, by further name. Raises MalformedMessage for a
    block of an undescribed parameter.
    """
    specs = {each.name: each for each in cut.parameters}
    names: dict[str, list[str]] = {name: [name] for name in specs}
    for further, first in tied.items():
        if first in names:
            names[first].append(further)
    parts = []
    for rank, segment in enumerate(cut.segments, 1):
        layout = pb.Layout(segment_bytes=[segment.segment.num_bytes])
        if segment.HasField("rows"):
            _add_rows(layout, segment.rows, rank)
        numbers: dict[str, int] = {}
        for block in segment.blocks:
            spec = specs.get(block.parameter)
            if spec is None:
                raise MalformedMessage(
                    "a cut has a parameter that it does not describe", seen=block.parameter
                )
            for name in names[block.parameter]:
                if name not in numbers:
                    numbers[name] = len(layout.tensors)
                    layout.tensors.add(name=name, dtype=spec.dtype, shape=spec.shape)
                _add_run(layout, numbers[name], spec, block, rank)
        parts.append(pb.CutPart(segment=segment.segment, layout=layout))
    return parts


def check_layout(layout: pb.Layout) -> None:
    """Raise InvalidSpec if a tensor has a name that is reserved for tables, or the layout is too
    large for a message."""
    if (num_bytes := layout.ByteSize()) > MAX_PART_LAYOUT_BYTES:
        raise InvalidSpec(
            "the names, shapes and slices of a rank's tensors are too large for a publication",
            seen=f"{num_bytes} bytes for {len(layout.tensors)} tensors",
            expected=f"at most {MAX_PART_LAYOUT_BYTES}",
            fix="Publish fewer tensors with shorter names: join small tensors into larger ones.",
        )
    for each in layout.tensors:
        if each.name.startswith(TABLES):
            raise InvalidSpec(
                "names of this kind are reserved for embedding tables",
                seen=each.name,
                expected=f"a name that does not begin with {TABLES}",
            )


def _add_rows(layout: pb.Layout, rows: pb.CutRows, rank: int) -> None:
    count = rows.num_rows
    for column, dtype, shape, at in (
        (IDS, "int64", [count], rows.ids_at),
        (BIRTHS, "int64", [count], rows.births_at),
        (VALUES, rows.dtype, [count, rows.dim], rows.values_at),
    ):
        layout.slices.add(tensor=len(layout.tensors), segment=rank, at=at)
        name = f"{TABLES}{rows.table}/{rows.index:05d}/{column}"
        layout.tensors.add(name=name, dtype=dtype, shape=shape)


def _add_run(
    layout: pb.Layout, tensor: int, spec: pb.TensorSpec, block: pb.CutBlock, rank: int
) -> None:
    item_bytes = ITEM_BYTES[spec.dtype]
    for offsets, sizes, start in boxes(tuple(spec.shape), block.offset, block.num_elements):
        at = block.at + (start - block.offset) * item_bytes
        layout.slices.add(tensor=tensor, offsets=offsets, sizes=sizes, segment=rank, at=at)


def boxes(shape: Sequence[int], start: int, count: int) -> Iterator[tuple[Numbers, Numbers, int]]:
    """Split a run of elements of a flattened tensor into rectangular parts. Yields, in order, each
    part's offsets, sizes and first element.
    """
    if not shape:
        yield (), (), start
        return
    row = prod(shape[1:])
    end = start + count
    while start < end:
        index, within = divmod(start, row)
        num_rows = (end - start) // row
        if within == 0 and num_rows:
            zeros = (0,) * (len(shape) - 1)
            yield (index, *zeros), (num_rows, *shape[1:]), start
            start += num_rows * row
            continue
        length = min(row - within, end - start)
        for offsets, sizes, at in boxes(shape[1:], within, length):
            yield (index, *offsets), (1, *sizes), index * row + at
        start += length
