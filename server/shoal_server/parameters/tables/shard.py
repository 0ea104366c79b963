"""What a shard of a table consists of: its rows, and the fates of those in remembered pushes."""

import time
from collections.abc import Sequence
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
from shoal_server.parameters.cuts.shard_cut import OpenCuts
from shoal_server.parameters.shard.gradients import DTYPES
from shoal_server.parameters.shard.image import Image
from shoal_server.parameters.shard.versioned import AnyShard, Push, SmallTensors, VersionedShard
from shoal_server.parameters.tables.answers import Answers
from shoal_server.parameters.tables.batch import RowBatch, read_batch, read_ids
from shoal_server.parameters.tables.content import TableContent
from shoal_server.parameters.tables.row_cut import RowCut


@dataclass(frozen=True, kw_only=True)
class TablePush(Push):
    """Gradients for rows of one shard, as they came."""

    row_ids: bytes
    births: bytes
    step: int
    """Which step of the table the pusher takes it for."""
    codec: GradientCodec | None = None
    """How the gradients are written; None: in the table's dtype."""


@dataclass(frozen=True, kw_only=True)
class LookedUp:
    """Rows as of one version, in the order asked for."""

    version: int
    births: memoryview
    values: memoryview
    table_step: int


class TableBody:
    kind = "table"

    def __init__(
        self, table: TableSpec, table_index: int, content: TableContent, answers: Answers
    ) -> None:
        """Takes content and answers over."""
        self.table = table
        self.content = content
        self._table_index = table_index
        self._answers = answers
        self._ahead_s: float | None = None
        """Of the monotonic clock, since a push came here first."""

    def now_s(self) -> float:
        """The time of a push that comes now, in Unix seconds.

        It goes on from the newest push that is in the rows, as fast as the monotonic clock does: if
        the machine's clock is set, or that of the shard's last primary differed, no row is taken
        for older than it is. Of a new shard it begins as the machine's clock.
        """
        if self._ahead_s is None:
            self._ahead_s = (self.content.now_s or time.time()) - time.monotonic()
        return time.monotonic() + self._ahead_s

    @property
    def num_bytes(self) -> int:
        """Bytes of memory; a shard of a table takes as much as its rows do."""
        return self.content.num_bytes

    @property
    def memory_bytes(self) -> int:
        return self.content.num_bytes + self._answers.num_bytes

    @property
    def row_bytes(self) -> int:
        """Of one row's values."""
        return self.table.dim * DTYPES[self.table.dtype].itemsize

    def regrown_bytes(self, num_rows: int) -> int:
        return self.content.regrown_bytes(num_rows)

    def look_up(self, row_ids: bytes, version: int) -> LookedUp:
        """Rows as they are at this version. Raises MalformedMessage for ids that are not this
        shard's."""
        ids = read_ids(self.table, self._table_index, row_ids)
        births, values_rc = self.content.look_up(ids)
        return LookedUp(
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
        self._answers.forget(record.forgotten_sessions)
        fates = batch.as_they_came(
            self.content.push(
                batch,
                version=record.version,
                at_unix_s=record.at_unix_s,
                step=record.table_step,
                lr=record.lr,
            )
        )
        if fates:
            self._answers.remember(record.session, record.sequence, fates)
        return fates

    def fates(self, session: str, sequence: int) -> bytes:
        return self._answers.recall(session, sequence)

    def spec_message(self, spec: Shard) -> TableShardSpec:
        return TableShardSpec(shard=spec, table=self.table)

    @property
    def cuts(self) -> OpenCuts[RowCut]:
        return self.content.cuts

    def cut(self) -> tuple[RowCut, SmallTensors]:
        rows, small = self.content.cut()
        answers = self._answers.freeze()
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
    """A shard at version 1, without rows."""
    body = TableBody(table, spec.table_index, TableContent(table), Answers())
    return VersionedShard(spec, body)


def is_table(shard: AnyShard) -> TypeGuard[TableShard]:
    """Whether it is a shard of a table, and not of parameters."""
    return isinstance(shard.body, TableBody)


def table_from_image(image: Image) -> TableShard:
    """The shard that the image is of. Takes the image's tensors over.

    Raises InternalError if the image is not whole or not of a table's shard.
    """
    try:
        if image.kind != TableBody.kind:
            raise KeyError(image.kind)
        spec = TableShardSpec.FromString(image.spec)
        content = TableContent(spec.table, image.tensors)
        content.load(image.tensors)
        lengths, told = image.tensors["answer_lengths"], image.tensors["answers"]
    except (KeyError, DecodeError) as error:
        raise InternalError(
            f"the image of shard {image.shard_id} does not belong to a table's shard",
            seen=repr(error),
            expected=f"kind {TableBody.kind!r} and all its tensors",
        ) from error
    answers = Answers()
    answers.load(image.sessions, lengths, told)
    body = TableBody(spec.table, spec.shard.table_index, content, answers)
    return VersionedShard.restored(spec.shard, body, image.version, image.sessions)
