"""Rows of a shard as chunks of bytes."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shoal_proto.errors import MalformedMessage
from shoal_proto.pieces import Buffer
from shoal_proto.v1.replication_pb2 import TensorImage
from shoal_server.parameters.images.tensor_bytes import from_bytes


class RowChunks:
    """The layout of `num_rows` rows in chunks, cut between rows. In a chunk, the columns follow
    each other, largest elements first, so that each is aligned."""

    def __init__(
        self,
        columns: Mapping[str, tuple[Sequence[int], torch.dtype]],
        num_rows: int,
        chunk_bytes: int,
    ) -> None:
        """`columns`: shape of one row of the column, and dtype, by name."""
        by_size = sorted(columns.items(), key=lambda item: (-item[1][1].itemsize, item[0]))
        self._columns = [(name, tuple(shape), dtype) for name, (shape, dtype) in by_size]
        self._row_bytes = sum(
            math.prod(shape) * dtype.itemsize for _, shape, dtype in self._columns
        )
        self.num_rows = num_rows
        self.rows_each = max(1, chunk_bytes // self._row_bytes)
        self.described: Sequence[TensorImage] = [
            TensorImage(
                name=name,
                dtype=str(dtype).removeprefix("torch."),
                shape=(num_rows, *shape),
                num_bytes=num_rows * math.prod(shape) * dtype.itemsize,
            )
            for name, shape, dtype in self._columns
        ]

    def __len__(self) -> int:
        return (self.num_rows + self.rows_each - 1) // self.rows_each

    def rows(self, index: int) -> slice:
        """Return the rows of a chunk."""
        start = index * self.rows_each
        return slice(start, min(start + self.rows_each, self.num_rows))

    def size_of(self, index: int) -> int:
        """Return the size of a chunk in bytes."""
        rows = self.rows(index)
        num_rows: int = rows.stop - rows.start
        return num_rows * self._row_bytes

    def views(self, index: int, data: Buffer) -> Mapping[str, Tensor]:
        """Return the columns as views of a chunk's bytes. Raises MalformedMessage for a wrong
        length."""
        if len(data) != self.size_of(index):
            raise MalformedMessage(
                "a chunk of a table's shard has another length",
                seen=f"{len(data)} bytes",
                expected=f"{self.size_of(index)} bytes",
            )
        rows, at, views = self.rows(index), 0, {}
        for name, shape, dtype in self._columns:
            views[name] = from_bytes(data, dtype, (rows.stop - rows.start, *shape), at)
            at += views[name].nbytes
        return views
