"""Table shards: rows, and the row fates of remembered pushes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import torch
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from torch import Tensor

from shoal_proto.errors import InternalError
from shoal_proto.pieces import Buffer
from shoal_proto.v1.codec_pb2 import GradientCodec
from shoal_proto.v1.replication_pb2 import PushRecord, TableShardSpec
from shoal_proto.v1.shards_pb2 import Shard
from shoal_proto.v1.tables_pb2 import TableSpec
from shoal_server.parameters.images.image import LoadedImage
from shoal_server.parameters.images.shard_image import OpenImages
from shoal_server.parameters.shard.gradients import DTYPES
from shoal_server.parameters.shard.versioned import AnyShard, Push, SmallTensors, VersionedShard
from shoal_server.parameters.tables.answers import RememberedFates
from shoal_server.parameters.tables.batch import RowBatch, read_batch, read_ids
from shoal_server.parameters.tables.content import TableContent
from shoal_server.parameters.tables.row_image import RowImage


@dataclass(frozen=True, kw_only=True)
class TablePush(Push):
    """Gradients for rows of one shard, in the sender's order."""

    row_ids: bytes
    births: bytes
    step: int
    """Step of the table, as counted by the sender."""
    codec: GradientCodec | None = None
    """Encoding of the gradients; None for the table's dtype."""


@dataclass(frozen=True, kw_only=True)
class LookupResult:
    """Rows at one version, in the order of the request."""

    version: int
    births: memoryview
    values: memoryview
    table_step: int


class TableBody:
    kind = "table"

    def __init__(
        self, table: TableSpec, table_index: int, content: TableContent, answers: RememberedFates
    ) -> None:
        """Takes ownership of content and answers."""
        self.table = table
        self.content = content
        self._table_index = table_index
        self.answers = answers
        self._ahead_s: float | None = None
        """Table time minus the monotonic clock; None before the first push to this server."""

    def now_s(self) -> float:
        """Return the table's time for a push that arrives now, in Unix seconds. It starts at the
        shard's newest push, or at the machine's clock for a new shard, and follows the monotonic
        clock. Time in which no push was applied counts as in `TableContent.time_of`; the rest of it
        is not made up for by later pushes."""
        steady_s = time.monotonic()
        if self._ahead_s is None:
            self._ahead_s = (self.content.now_s or time.time()) - steady_s
        # Bounded at each push: another primary may have led the shard since the last one.
        now_s = self.content.time_of(steady_s + self._ahead_s)
        self._ahead_s = now_s - steady_s
        return now_s

    @property
    def num_bytes(self) -> int:
        """Bytes of rows, optimizer state, index and admission gate."""
        return self.content.num_bytes

    @property
    def memory_bytes(self) -> int:
        return self.content.num_bytes + self.answers.num_bytes

    @property
    def row_bytes(self) -> int:
        """Size of one row's values."""
        return self.table.dim * DTYPES[self.table.dtype].itemsize

    def regrown_bytes(self, num_rows: int) -> int:
        return self.content.regrown_bytes(num_rows)

    def look_up(self, row_ids: bytes, version: int) -> LookupResult:
        """Return rows; `version` is the shard's. Raises MalformedMessage for ids of another
        shard."""
        ids = read_ids(self.table, self._table_index, row_ids)
        births, values_rc = self.content.look_up(ids)
        return LookupResult(
            version=version,
            births=births.view(np.uint8).data,
            values=values_rc.view(-1).view(torch.uint8).numpy().data,
            table_step=self.content.table_step,
        )

    def describe_push(self, push: TablePush, record: PushRecord) -> None:
        record.lr = self.table.optimizer.lr if push.lr is None else push.lr
        record.row_ids, record.row_births = push.row_ids, push.births
        record.table_step = push.step
        if push.codec is not None:
            record.codec.CopyFrom(push.codec)

    def read_batch(self, record: PushRecord, data: Buffer) -> RowBatch:
        return read_batch(self.table, self._table_index, record, data)

    def growth_bytes(self, batch: RowBatch, at_unix_s: float) -> int:
        return self.content.growth_bytes(batch, at_unix_s)

    def apply(self, record: PushRecord, batch: RowBatch) -> bytes:
        # Before any change: there may be no memory.
        self.content.reserve(batch, record.at_unix_s)
        self.answers.forget(record.forgotten_sessions)
        self.answers.forget(record.ended_sessions)
        fates = batch.fates_in_order(
            self.content.push(
                batch,
                version=record.version,
                at_unix_s=record.at_unix_s,
                step=record.table_step,
                lr=record.lr,
            )
        )
        if fates:
            self.answers.remember(record.session, record.sequence, fates)
        return fates

    def fates(self, session: str, sequence: int) -> bytes:
        return self.answers.recall(session, sequence)

    def ended_sessions(self, is_live: Callable[[str], bool]) -> Sequence[str]:
        return self.answers.ended_sessions(is_live)

    def spec_message(self, spec: Shard) -> TableShardSpec:
        return TableShardSpec(shard=spec, table=self.table)

    @property
    def images(self) -> OpenImages[RowImage]:
        return self.content.images

    def image(self) -> tuple[RowImage, SmallTensors]:
        rows, small = self.content.image()
        answers = self.answers.freeze()
        return rows, lambda sessions: {**small, **answers.tensors(sessions)}

    def flat_tensors(self) -> dict[str, Tensor]:
        return self.content.flat_tensors()

    def row_ids(self, start: int, num_bytes: int) -> tuple[bytes, int]:
        ids, stop = self.content.row_ids(start, num_bytes)
        return ids.tobytes(), stop

    def rows_of(self, row_ids: bytes) -> tuple[NDArray[np.int64], Sequence[Tensor]]:
        births, tensors = self.content.rows_of(np.frombuffer(row_ids, np.int64))
        return np.concatenate([[len(self.content)], births]), tensors


TableShard = VersionedShard[TableBody]


def new_table_shard(spec: Shard, table: TableSpec) -> TableShard:
    """Make a shard at version 1, without rows."""
    body = TableBody(table, spec.table_index, TableContent(table), RememberedFates())
    return VersionedShard(spec, body)


def is_table(shard: AnyShard) -> TypeGuard[TableShard]:
    """True for a shard of a table."""
    return isinstance(shard.body, TableBody)


def table_from_image(image: LoadedImage) -> TableShard:
    """Restore a shard from its image, and take ownership of the image's tensors. Raises
    InternalError if the image is inconsistent, and torch's and Python's errors for invalid
    values."""
    try:
        if image.kind != TableBody.kind:
            raise KeyError(image.kind)
        spec = TableShardSpec.FromString(image.spec)
        content = TableContent(spec.table, image.tensors)
        content.load(image.tensors)
        lengths, fates = image.tensors["answer_lengths"], image.tensors["answers"]
    except (KeyError, DecodeError) as error:
        raise InternalError(
            f"the image of shard {image.shard_id} does not belong to a table's shard",
            seen=repr(error),
            expected=f"kind {TableBody.kind!r} and all its tensors",
        ) from error
    answers = RememberedFates()
    answers.load(image.sessions, lengths, fates)
    body = TableBody(spec.table, spec.shard.table_index, content, answers)
    return VersionedShard.restored(spec.shard, body, image.version, image.sessions)
