"""Segments of published weights, made from images of shards.

A segment of parameters has their blocks in order. A segment of rows has all ids (int64), all births
(int64), then all values. A row keeps its position, so that the difference between two versions has
only the changed rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from shoal_proto.v1 import weights_pb2 as pb
from shoal_proto.v1.replication_pb2 import DenseSpec, TableShardSpec
from shoal_server.parameters.images.shard_image import ShardImage
from shoal_server.parameters.images.tensor_bytes import DTYPES, as_bytes
from shoal_server.parameters.shard.dense import VALUES, DenseBody
from shoal_server.parameters.tables.row_chunks import RowChunks
from shoal_server.parameters.tables.row_image import BIRTHS, IDS

MIN_ROWS = 64
STEPS_A_DOUBLING = 8
"""Number of steps between one power of two and the next: at most an eighth of a large segment lies
after the last row."""
ID_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class PlannedSegment:
    """A segment before it is made."""

    num_bytes: int
    described: pb.CutSegment
    fill: Callable[[memoryview], None]
    """Writes the shard into memory that is all zeros. Waits for the shard's lock: do not call it on
    the event loop."""


def planned(image: ShardImage) -> PlannedSegment:
    """Plan the segment of a shard. The image must stay open until `fill` has returned."""
    return _of_parameters(image) if image.kind == DenseBody.kind else _of_rows(image)


def num_positions(num_rows: int) -> int:
    """Return the number of positions in a segment of `num_rows` rows."""
    if num_rows <= MIN_ROWS:
        return MIN_ROWS
    step: int = 2 ** (num_rows - 1).bit_length() // (2 * STEPS_A_DOUBLING)
    return -(-num_rows // step) * step


def _of_parameters(image: ShardImage) -> PlannedSegment:
    shard = DenseSpec.FromString(image.spec).shard
    item_bytes = DTYPES[shard.dtype].itemsize
    described, at = pb.CutSegment(shard_id=image.shard_id), 0
    for block in shard.blocks:
        described.blocks.add(
            parameter=block.parameter,
            offset=block.offset,
            num_elements=block.num_elements,
            at=at,
        )
        at += block.num_elements * item_bytes

    def fill(memory: memoryview) -> None:
        values = next(each for each in image.streams() if each.described.name == VALUES)
        start = 0
        for piece in values.pieces:
            memory[start : start + piece.nbytes] = as_bytes(piece).numpy().data
            start += piece.nbytes

    return PlannedSegment(num_bytes=max(at, 1), described=described, fill=fill)


def _of_rows(image: ShardImage) -> PlannedSegment:
    spec = TableShardSpec.FromString(image.spec)
    table, dtype = spec.table, DTYPES[spec.table.dtype]
    num_rows = max((each.shape[0] for each in image.header.tensors), default=0)
    count = num_positions(num_rows)
    births_at = count * ID_BYTES  # a multiple of the alignment: `count` is a multiple of 8
    values_at = 2 * births_at
    rows = pb.CutRows(
        table=table.name,
        index=spec.shard.table_index,
        dim=table.dim,
        dtype=table.dtype,
        num_rows=count,
        ids_at=0,
        births_at=births_at,
        values_at=values_at,
    )

    def fill(memory: memoryview) -> None:
        ids = np.frombuffer(memory, np.int64, count, 0)
        births = np.frombuffer(memory, np.int64, count, births_at)
        values = torch.frombuffer(
            memory, dtype=dtype, count=count * table.dim, offset=values_at
        ).view(count, table.dim)
        columns = {t.name: (t.shape[1:], DTYPES[t.dtype]) for t in image.header.tensors}
        chunks = RowChunks(columns, num_rows, image.header.chunk_bytes)
        first = image.num_chunks - len(chunks)
        for index in range(len(chunks)):
            views, span = chunks.views(index, image.chunk(first + index)), chunks.rows(index)
            is_live = views[BIRTHS] > 0
            # Data of evicted rows are not published.
            ids[span] = (views[IDS] * is_live).numpy()
            births[span] = (views[BIRTHS] * is_live).numpy()
            values[span] = torch.where(is_live.unsqueeze(1), views[VALUES], 0)
            image.release(first + index)

    num_bytes = values_at + count * table.dim * dtype.itemsize
    described = pb.CutSegment(shard_id=image.shard_id, rows=rows)
    return PlannedSegment(num_bytes=num_bytes, described=described, fill=fill)
