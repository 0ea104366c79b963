"""One shard of a table: its rows, its version and its memory of pushes, as one unit.

Every method is atomic: it holds one of the shard's locks from beginning to end. Nothing here waits
for a network or an event loop.
"""

import threading
from collections.abc import Callable

import torch
from google.protobuf.message import DecodeError

from shoal_proto.errors import InternalError, MalformedMessage, WrongEpoch
from shoal_proto.pieces import Buffer
from shoal_proto.v1.parameters_pb2 import ShardState
from shoal_proto.v1.replication_pb2 import PushRecord, TableShardSpec
from shoal_proto.v1.shards_pb2 import Shard
from shoal_proto.v1.tables_pb2 import TableSpec
from shoal_server.parameters.shard.dense import STALENESS_BUCKETS
from shoal_server.parameters.shard.gradients import DTYPES
from shoal_server.parameters.shard.image import Image, UpdateListener, UpdateRecord
from shoal_server.parameters.shard.sessions import RememberedOutcome, SessionTable
from shoal_server.parameters.shard.step_scope import Scope, to_message
from shoal_server.parameters.tables.answers import Answers
from shoal_server.parameters.tables.batch import RowBatch, read_batch, read_ids
from shoal_server.parameters.tables.content import Counts, TableContent
from shoal_server.parameters.tables.pushes import LookedUp, TableOutcome, TablePush

KIND = "table"


def _unlimited(num_bytes: int) -> None:
    """Where memory has no limit."""


class TableShard:
    def __init__(self, spec: Shard, table: TableSpec, content: TableContent | None = None) -> None:
        """Without rows, or with `content`, which it takes over."""
        self.spec = spec
        self.table = table
        self._content = TableContent(table) if content is None else content
        self._sessions = SessionTable()
        self._answers = Answers()
        self._version = 1
        self._pushes = self._duplicates = self._refused = 0
        self._staleness_counts = [0] * STALENESS_BUCKETS
        self._keeper: UpdateListener | None = None
        self._content_lock = threading.Lock()
        """For what reads or writes rows; taken before the other one. An image holds it for as long
        as a gigabyte takes to be copied."""
        self._lock = threading.Lock()
        """For all else. It is never held for long."""

    @property
    def shard_id(self) -> int:
        return self.spec.shard_id

    @property
    def version(self) -> int:
        return self._version

    @property
    def sessions(self) -> SessionTable:
        return self._sessions

    @property
    def num_bytes(self) -> int:
        """Bytes of memory; a shard of a table takes as much as its rows do."""
        return self._content.num_bytes

    @property
    def memory_bytes(self) -> int:
        return self._content.num_bytes + self._answers.num_bytes

    def regrown_bytes(self, num_rows: int) -> int:
        """What is copied, at most, to make room for so many more rows. Takes no lock."""
        return self._content.regrown_bytes(num_rows)

    @property
    def row_bytes(self) -> int:
        """Of one row's values."""
        return self.table.dim * DTYPES[self.table.dtype].itemsize

    @property
    def num_rows(self) -> int:
        return len(self._content)

    @property
    def row_counts(self) -> Counts:
        """Rows made, taken out and not admitted since this server has the shard."""
        return self._content.counts

    @property
    def table_step(self) -> int:
        """Steps of the table that this shard knows of."""
        return self._content.table_step

    def wrong_epoch(self, epoch: int) -> WrongEpoch:
        """The error for a sender whose view of this shard is not the current one."""
        return WrongEpoch(
            f"shard {self.spec.shard_id} has another epoch",
            seen=str(epoch),
            expected=str(self.spec.epoch),
            fix="Fetch the shard map and retry.",
        )

    def look_up(self, row_ids: bytes) -> LookedUp:
        """Rows as they are now. Raises MalformedMessage for ids that are not this shard's."""
        ids = read_ids(self.table, self.spec.table_index, row_ids)
        with self._content_lock:
            births, values_rc = self._content.look_up(ids)
            version, step = self._version, self._content.table_step
        values = values_rc.view(torch.uint8).numpy().tobytes() if len(ids) else b""
        return LookedUp(version=version, births=births.tobytes(), values=values, table_step=step)

    def push(
        self,
        push: TablePush,
        is_live: Callable[[str], bool],
        take_memory: Callable[[int], None] = _unlimited,
    ) -> TableOutcome:
        """Apply gradients once; a repeated (session, sequence) gets its first outcome.

        `take_memory` is told how many bytes the shard may be about to grow by, and raises
        Overloaded where it must not. Raises WrongEpoch, ForgottenPush, NonFiniteGradient,
        ShapeMismatch, MalformedMessage or Overloaded, and then nothing has changed.
        """
        with self._content_lock, self._lock:
            try:
                return self._push(push, is_live, take_memory)
            except Exception:
                self._refused += 1
                raise

    def _push(
        self,
        push: TablePush,
        is_live: Callable[[str], bool],
        take_memory: Callable[[int], None],
    ) -> TableOutcome:
        if push.epoch != self.spec.epoch:
            raise self.wrong_epoch(push.epoch)
        first = self._sessions.recall(push.session, push.sequence)
        if first is not None:
            self._duplicates += 1
            return TableOutcome(
                version=first.version,
                staleness=first.staleness,
                fates=self._answers.recall(push.session, push.sequence),
                is_duplicate=True,
            )
        staleness = self._staleness(push)
        batch = self._read(push.row_ids, push.births, push.gradient)
        take_memory(self._content.growth_bytes(batch, push.at_unix_s))
        record = PushRecord(
            session=push.session,
            sequence=push.sequence,
            version=self._version + 1,
            staleness=staleness,
            lr=self.table.optimizer.lr if push.lr is None else push.lr,
            row_ids=push.row_ids,
            row_births=push.births,
            table_step=push.step,
            at_unix_s=push.at_unix_s,
            forgotten_sessions=self._sessions.make_room(push.session, is_live),
            step=to_message(push.scope),
        )
        return self._apply(record, batch, push.gradient)

    def _read(self, row_ids: bytes, births: bytes, gradient: Buffer) -> RowBatch:
        return read_batch(self.table, self.spec.table_index, row_ids, births, gradient)

    def _staleness(self, push: TablePush) -> int:
        """How many updates of the shard the gradients do not know of."""
        if push.base_version <= self._version:
            return self._version - push.base_version
        if 0 < push.base_epoch < push.epoch:
            # That version died with a primary before anybody else had it.
            return 0
        raise MalformedMessage(
            f"the gradients for shard {self.spec.shard_id} have a base that does not exist",
            seen=f"base version {push.base_version}",
            expected=f"at most {self._version}",
            fix="Look the rows up again.",
        )

    def _apply(self, record: PushRecord, batch: RowBatch, data: Buffer) -> TableOutcome:
        """All that a push changes, on the primary and on every copy alike: nothing in here may
        depend on anything but the shard and the record."""
        self._sessions.forget(record.forgotten_sessions)
        self._answers.forget(record.forgotten_sessions)
        fates = self._content.push(
            batch,
            version=record.version,
            at_unix_s=record.at_unix_s,
            step=record.table_step,
            lr=record.lr,
        )
        outcome = TableOutcome(
            version=record.version,
            staleness=record.staleness,
            fates=batch.as_they_came(fates),
        )
        self._version = record.version
        self._sessions.remember(
            record.session,
            record.sequence,
            RememberedOutcome(record.version, record.staleness),
            Scope.from_message(record.step),
        )
        if outcome.fates:
            self._answers.remember(record.session, record.sequence, outcome.fates)
        self._pushes += 1
        self._staleness_counts[min(outcome.staleness, STALENESS_BUCKETS - 1)] += 1
        if self._keeper is not None:
            self._keeper(UpdateRecord(record, data))
        return outcome

    def replay(self, record: UpdateRecord) -> None:
        """Apply what the primary applied; the keeper, if there is one, is told of it too.

        Raises InternalError if it is not the next version, ShapeMismatch or MalformedMessage if it
        is not a push of this shard; then nothing has changed.
        """
        push = record.push
        with self._content_lock, self._lock:
            if push.version != self._version + 1:
                raise InternalError(
                    f"shard {self.spec.shard_id} was told of an update out of order",
                    seen=f"version {push.version}",
                    expected=f"version {self._version + 1}",
                )
            batch = self._read(push.row_ids, push.row_births, record.data)
            self._apply(push, batch, record.data)

    def keep(self, keeper: UpdateListener | None) -> None:
        """From now on `keeper` is told of every push, in place of the keeper before it."""
        with self._lock:
            self._keeper = keeper

    def enter_epoch(self, epoch: int) -> None:
        """Pushes of any other epoch are refused from now on, with WrongEpoch."""
        with self._lock:
            self.spec.epoch = epoch

    def image(self, keeper: UpdateListener | None = None) -> Image:
        """A copy of all of it as of one version; `keeper`, if given, is told of every push after
        exactly that version, in place of the keeper before it."""
        with self._content_lock:
            with self._lock:
                if keeper is not None:
                    self._keeper = keeper
                spec = TableShardSpec(shard=self.spec, table=self.table)
            sessions = self._sessions.export()
            return Image(
                kind=KIND,
                shard_id=self.spec.shard_id,
                version=self._version,
                spec=spec.SerializeToString(deterministic=True),
                tensors=self._content.tensors() | self._answers.tensors(sessions),
                sessions=sessions,
            )

    @classmethod
    def from_image(cls, image: Image) -> "TableShard":
        """The same shard once more, to the last bit; its counters start from 0. Takes the image's
        tensors over.

        Raises InternalError if the image is not whole or not of a table's shard.
        """
        try:
            if image.kind != KIND:
                raise KeyError(image.kind)
            spec = TableShardSpec.FromString(image.spec)
            shard = cls(spec.shard, spec.table, TableContent(spec.table, image.tensors))
            lengths, answers = image.tensors["answer_lengths"], image.tensors["answers"]
        except (KeyError, DecodeError) as error:
            raise InternalError(
                f"the image of shard {image.shard_id} is not that of a table's shard",
                seen=repr(error),
                expected=f"kind {KIND!r} and all its tensors",
            ) from error
        shard._sessions.restore(image.sessions)
        shard._answers.load(image.sessions, lengths, answers)
        shard._version = image.version
        return shard

    def describe(self, job: str) -> ShardState:
        """Counters and sizes, for people; without the lock, so that nobody waits for it."""
        return ShardState(
            job=job,
            shard_id=self.spec.shard_id,
            epoch=self.spec.epoch,
            version=self._version,
            num_bytes=self.num_bytes,
            pushes=self._pushes,
            duplicates=self._duplicates,
            refused=self._refused,
            staleness_counts=self._staleness_counts,
        )
