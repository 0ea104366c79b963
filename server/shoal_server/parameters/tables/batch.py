"""The rows of one push as arrays: each id once, in rising order, with the sum of its gradients."""

import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal_proto.errors import InvalidSpec, MalformedMessage, NonFiniteGradient, ShapeMismatch
from shoal_proto.pieces import Buffer
from shoal_proto.v1.codec_pb2 import GradientCodec
from shoal_proto.v1.replication_pb2 import PushRecord
from shoal_proto.v1.tables_pb2 import TableSpec
from shoal_server.parameters.codecs.rows import decode_rows, row_bytes
from shoal_server.parameters.shard.gradients import DTYPES
from shoal_server.parameters.tables.hashing import Ids, shards_of
from shoal_server.parameters.tables.index import Rows

Fates = NDArray[np.uint8]

ID_BYTES = 8
# torch need not warn that gradients are not writable: they are only read.
warnings.filterwarnings("ignore", message="The given buffer is not writable", module=__name__)


@dataclass(frozen=True, kw_only=True)
class RowBatch:
    ids: Ids
    """Distinct ids, in rising order."""
    births: Ids
    """Version that made each row, as the sender looked it up; 0 without a row."""
    gradient_rc: Tensor
    """A row for each id; read-only."""
    positions: Rows | None
    """Position in `ids` of each row of the push; None: the ids are those of the push, in its
    order."""

    def fates_in_order(self, fates: Fates) -> bytes:
        """Return one fate for each row in the push's order; empty if all rows were applied."""
        if not fates.any():
            return b""
        return (fates if self.positions is None else fates[self.positions]).tobytes()


def read_ids(table: TableSpec, table_index: int, data: bytes) -> Ids:
    """Decode ids, in their order. Raises MalformedMessage for ids of another shard."""
    if len(data) % ID_BYTES:
        raise MalformedMessage(
            f"ids of table {table.name} are cut off",
            seen=f"{len(data)} bytes",
            expected=f"a multiple of {ID_BYTES}",
        )
    ids = np.frombuffer(data, "<i8")
    misrouted = np.flatnonzero(shards_of(ids, table.num_shards) != table_index)
    if misrouted.size:
        raise MalformedMessage(
            f"a row of table {table.name} was sent to another shard than its own",
            seen=f"row {ids[misrouted[0]]} at virtual shard {table_index}",
            expected=f"virtual shard {shards_of(ids[misrouted[:1]], table.num_shards)[0]}",
            fix="Route ids by shoal_proto.row_hash.",
        )
    return ids


def read_batch(
    table: TableSpec, table_index: int, record: PushRecord, gradient: Buffer
) -> RowBatch:
    """Decode the rows of a push. Raises ShapeMismatch, MalformedMessage or InvalidSpec, or
    NonFiniteGradient with the row's id."""
    row_ids, births = record.row_ids, record.row_births
    ids = read_ids(table, table_index, row_ids)
    dtype = DTYPES[table.dtype]
    codec = record.codec if record.HasField("codec") else None
    num_bytes = len(ids) * gradient_row_bytes(table, codec)
    if len(births) != len(row_ids) or len(gradient) != num_bytes:
        raise ShapeMismatch(
            f"a push to table {table.name} has another length than its ids say",
            seen=f"{len(births)} bytes of births, {len(gradient)} bytes of gradients",
            expected=f"{len(row_ids)} and {num_bytes} bytes for {len(ids)} rows",
        )
    if not len(ids):
        empty = torch.zeros((0, table.dim), dtype=dtype)
        return RowBatch(ids=ids, births=ids, gradient_rc=empty, positions=None)
    if codec is not None:
        gradient_rc = decode_rows(codec, gradient, table.dim).to(dtype)
    else:
        gradient_rc = torch.frombuffer(gradient, dtype=dtype).view(len(ids), table.dim)
    _check_finite(table, ids, gradient_rc)
    seen = np.frombuffer(births, "<i8")
    if np.all(ids[1:] > ids[:-1]):
        return RowBatch(ids=ids, births=seen, gradient_rc=gradient_rc, positions=None)
    return _coalesce(table, ids, seen, gradient_rc)


def gradient_row_bytes(table: TableSpec, codec: GradientCodec | None) -> int:
    """Return the size of one row's gradient as sent. Raises InvalidSpec for a codec that is not for
    rows, or does not make them smaller."""
    plain = table.dim * DTYPES[table.dtype].itemsize
    if codec is None:
        return plain
    encoded = row_bytes(codec, table.dim)
    if encoded >= plain:
        raise InvalidSpec(
            f"codec {codec.kind} does not make rows of table {table.name} smaller",
            seen=f"{encoded} bytes a row",
            expected=f"fewer than the {plain} of {table.dim} values in {table.dtype}",
            fix="Send these rows uncompressed.",
        )
    return encoded


def _coalesce(table: TableSpec, ids: Ids, births: Ids, gradient_rc: Tensor) -> RowBatch:
    distinct, first, positions = np.unique(ids, return_index=True, return_inverse=True)
    if np.any(births[first][positions] != births):
        raise MalformedMessage(
            f"a push to table {table.name} names a row twice, with different births",
            seen="two births of one id",
            expected="one for each id",
            fix="Look a row up once for each push.",
        )
    if len(distinct) == len(ids):
        total_rc = gradient_rc[torch.from_numpy(first)]
    else:
        # Adds rows in the order of the push, with any number of threads.
        total_rc = torch.ops.aten.embedding_dense_backward(
            gradient_rc, torch.from_numpy(positions), len(distinct), -1, False
        )
    return RowBatch(ids=distinct, births=births[first], gradient_rc=total_rc, positions=positions)


def _check_finite(table: TableSpec, ids: Ids, gradient_rc: Tensor) -> None:
    # A sum that is not finite may be an overflow.
    wide = max(gradient_rc.dtype, torch.float32, key=lambda dtype: dtype.itemsize)
    if math.isfinite(gradient_rc.sum(dtype=wide).item()):
        return
    is_finite = torch.isfinite(gradient_rc).all(dim=1)
    if not is_finite.all():
        row = int((~is_finite).nonzero()[0])
        raise NonFiniteGradient(
            f"the gradient of row {ids[row]} of table {table.name} is not finite",
            seen="NaN or Inf",
            expected="finite numbers",
            fix="Look for a division by zero, or lower the learning rate.",
            details={"parameter": table.name, "row": str(ids[row])},
        )
