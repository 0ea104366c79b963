"""Segments of published weights made of shards as a cut has taken them.

Of a shard of parameters a segment has the values; of a shard of a table ids, births and values of
its rows. A row is at the position that it has in the shard, and the number of positions grows in
steps: from version to version the same rows lie at the same bytes, so that the difference between
two versions is as small as what changed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from shoal_proto.v1 import weights_pb2 as pb
from shoal_proto.v1.replication_pb2 import DenseSpec, TableShardSpec
from shoal_server.parameters.cuts.shard_cut import ShardCut
from shoal_server.parameters.cuts.tensor_bytes import DTYPES, as_bytes
from shoal_server.parameters.shard.dense import VALUES, DenseBody
from shoal_server.parameters.tables.row_chunks import RowChunks
from shoal_server.parameters.tables.row_cut import BIRTHS, IDS

MIN_ROWS = 64
STEPS_A_DOUBLING = 8
"""Numbers of positions between one power of two and the next: an eighth of a segment at most has
no rows."""
ID_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class PlannedSegment:
    """A segment before it is made."""

    num_bytes: int
    described: pb.CutSegment
    """Description that lacks the segment's digest."""
    fill: Callable[[memoryview], None]
    """Writes the shard into the segment's memory, which is zero before. Waits for the shard's lock:
    not for the event loop."""


def planned(cut: ShardCut) -> PlannedSegment:
    """The segment of a shard as of a cut, which stays open until it is filled."""
    return _of_parameters(cut) if cut.kind == DenseBody.kind else _of_rows(cut)


def num_positions(num_rows: int) -> int:
    """The positions that a segment has for so many rows."""
    if num_rows <= MIN_ROWS:
        return MIN_ROWS
    step: int = 2 ** (num_rows - 1).bit_length() // (2 * STEPS_A_DOUBLING)
    return -(-num_rows // step) * step


def _of_parameters(cut: ShardCut) -> PlannedSegment:
    shard = DenseSpec.FromString(cut.spec).shard
    item_bytes = DTYPES[shard.dtype].itemsize
    described, at = pb.CutSegment(shard_id=cut.shard_id), 0
    for block in shard.blocks:
        described.blocks.add(
            parameter=block.parameter,
            offset=block.offset,
            num_elements=block.num_elements,
            at=at,
        )
        at += block.num_elements * item_bytes

    def fill(memory: memoryview) -> None:
        values = next(each for each in cut.streams() if each.described.name == VALUES)
        start = 0
        for piece in values.pieces:
            memory[start : start + piece.nbytes] = as_bytes(piece).numpy().data
            start += piece.nbytes

    return PlannedSegment(num_bytes=max(at, 1), described=described, fill=fill)


def _of_rows(cut: ShardCut) -> PlannedSegment:
    spec = TableShardSpec.FromString(cut.spec)
    table, dtype = spec.table, DTYPES[spec.table.dtype]
    num_rows = max((each.shape[0] for each in cut.header.tensors), default=0)
    count = num_positions(num_rows)
    births_at = count * ID_BYTES  # a multiple of the alignment, since the count is one of 8
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
        columns = {t.name: (t.shape[1:], DTYPES[t.dtype]) for t in cut.header.tensors}
        chunks = RowChunks(columns, num_rows, cut.header.chunk_bytes)
        first = cut.num_chunks - len(chunks)
        for index in range(len(chunks)):
            views, place = chunks.views(index, cut.chunk(first + index)), chunks.rows(index)
            is_live = views[BIRTHS] > 0
            # What a row that was evicted has left behind is not published.
            ids[place] = (views[IDS] * is_live).numpy()
            births[place] = (views[BIRTHS] * is_live).numpy()
            values[place] = torch.where(is_live.unsqueeze(1), views[VALUES], 0)
            cut.release(first + index)

    num_bytes = values_at + count * table.dim * dtype.itemsize
    described = pb.CutSegment(shard_id=cut.shard_id, rows=rows)
    return PlannedSegment(num_bytes=num_bytes, described=described, fill=fill)
