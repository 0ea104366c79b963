"""The rows of one push as they come in, and what became of them as messages."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from shoal_proto.checksum import crc32
from shoal_proto.errors import (
    ChecksumMismatch,
    InvalidSpec,
    MalformedMessage,
    ShapeMismatch,
    ShoalError,
)
from shoal_proto.status import to_detail
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_proto.v1.tables_pb2 import (
    RowGradients,
    TablePushHeader,
    TablePushItem,
    TablePushOutcome,
)
from shoal_server.parameters.service.incoming_push import IncomingPush, check_sequence, guarded
from shoal_server.parameters.service.table_maker import TableMaker
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.shard.replica import ShardReplica
from shoal_server.parameters.shard.step_scope import Scope
from shoal_server.parameters.shard.versioned import PushResult
from shoal_server.parameters.shard.workers import Runner
from shoal_server.parameters.tables.batch import ID_BYTES
from shoal_server.parameters.tables.shard import TablePush, TableShard

MAX_PUSH_BYTES = 256 * 1024 * 1024
"""Of one shard in one push."""


@dataclass(kw_only=True)
class TablePushPart:
    """One shard's part of a push."""

    item: TablePushItem
    replica: ShardReplica
    shard: TableShard
    _ids: list[bytes] = field(default_factory=list)
    _births: list[bytes] = field(default_factory=list)
    _gradients: list[bytes] = field(default_factory=list)
    _num_rows: int = 0

    def __post_init__(self) -> None:
        """Raises Overloaded or InvalidSpec for a push that is not to be taken in at all."""
        self.replica.check_room()
        if self.num_bytes > MAX_PUSH_BYTES:
            raise InvalidSpec(
                f"a push names too many rows of shard {self.item.shard_id}",
                seen=f"{self.item.num_rows} rows",
                expected=f"at most {MAX_PUSH_BYTES} bytes of them",
                fix="Push smaller batches.",
            )

    @property
    def shard_id(self) -> int:
        return self.item.shard_id

    @property
    def num_bytes(self) -> int:
        """Of all of it once it is whole."""
        return self.item.num_rows * (2 * ID_BYTES + self.shard.body.row_bytes)

    @property
    def is_complete(self) -> bool:
        return self._num_rows == self.item.num_rows

    def take(self, rows: RowGradients) -> None:
        """Add the next rows. Raises ChecksumMismatch or ShapeMismatch."""
        seen = crc32(rows.gradients, crc32(rows.births, crc32(rows.ids)))
        if seen != rows.checksum:
            raise ChecksumMismatch(
                f"rows of shard {rows.shard_id} changed on the way",
                seen=f"CRC-32 {seen:#010x} of {len(rows.ids) // ID_BYTES} rows",
                expected=f"{rows.checksum:#010x}",
            )
        self._num_rows += len(rows.ids) // ID_BYTES
        if self._num_rows > self.item.num_rows or not rows.ids:
            raise ShapeMismatch(
                f"another number of rows for shard {rows.shard_id} than announced",
                seen=f"{self._num_rows} rows, {len(rows.ids)} bytes of ids in a message",
                expected=f"{self.item.num_rows} rows, some in each message",
            )
        self._ids.append(rows.ids)
        self._births.append(rows.births)
        self._gradients.append(rows.gradients)

    def truncated(self) -> ShapeMismatch:
        """The error of a stream that ended before the part was complete."""
        return ShapeMismatch(
            f"the stream ended within shard {self.item.shard_id}",
            seen=f"{self._num_rows} rows",
            expected=f"{self.item.num_rows} rows",
        )

    def push(self, session: str, sequence: int, at_unix_s: float, scope: Scope | None) -> TablePush:
        """All of it, as one push."""
        return TablePush(
            session=session,
            sequence=sequence,
            epoch=self.item.epoch,
            base_version=self.item.base_version,
            base_epoch=self.item.base_epoch,
            step=self.item.step,
            lr=self.item.lr if self.item.HasField("lr") else None,
            row_ids=b"".join(self._ids),
            births=b"".join(self._births),
            gradient=b"".join(self._gradients),
            at_unix_s=at_unix_s,
            scope=scope,
        )


def checked(header: TablePushHeader) -> Scope | None:
    """The step that a push is part of. Raises for what is wrong with the push as a whole."""
    check_sequence(header.sequence)
    shard_ids = [item.shard_id for item in header.shards]
    if len(set(shard_ids)) != len(shard_ids) or not set(shard_ids) <= set(header.all_shard_ids):
        raise MalformedMessage(
            "a push names a shard twice, or leaves one out of all its shards",
            seen=str(sorted(shard_ids))[:200],
            expected=f"each once, of {sorted(header.all_shard_ids)}"[:200],
        )
    for item in header.shards:
        if item.HasField("lr") and not 0.0 <= item.lr < float("inf"):
            raise InvalidSpec(
                "the learning rate of a push is out of range",
                seen=f"{item.lr:g}",
                expected="0 <= lr, finite",
            )
    return Scope.of(header.all_shard_ids, of_tables=not header.with_parameters)


IncomingTablePush = IncomingPush[TablePushPart, RowGradients, TablePushOutcome]


class TablePushKind:
    applies_at_once = True

    def __init__(
        self,
        header: TablePushHeader,
        session: str,
        is_live: Callable[[str], bool],
        *,
        maker: TableMaker,
        run: Runner,
        memory: Memory,
    ) -> None:
        self.scope = checked(header)
        self._header = header
        self._session = session
        self._is_live = is_live
        self._maker = maker
        self._run = run
        self._memory = memory

    async def open(self, push: IncomingTablePush) -> None:
        """Look up every shard that the header names, and make those that never were."""
        items = self._header.shards
        wanted = [(item.shard_id, item.epoch) for item in items]
        found = await self._maker.look_up(self._header.token.job, wanted)
        for item, shard in zip(items, found, strict=True):
            push.expect(item.shard_id, partial(self._part, item, shard))

    def _part(
        self, item: TablePushItem, found: tuple[ShardReplica, TableShard] | ShoalError
    ) -> TablePushPart:
        if isinstance(found, ShoalError):
            raise found
        part = TablePushPart(item=item, replica=found[0], shard=found[1])
        if self._header.acknowledgement == Acknowledgement.ACKNOWLEDGEMENT_DURABLE:
            part.replica.check_durable()
        return part

    def add(self, part: TablePushPart, piece: RowGradients) -> None:
        part.take(piece)

    def apply(self, part: TablePushPart) -> Awaitable[TablePushOutcome | ShoalError]:
        return asyncio.ensure_future(self._applied(part))

    async def _applied(self, part: TablePushPart) -> TablePushOutcome | ShoalError:
        """The answer, once what it tells of is as safe as was asked for."""
        self._memory.refresh()
        num_bytes = part.num_bytes + part.replica.copy_bytes
        num_bytes += part.shard.body.regrown_bytes(part.item.num_rows)
        push = partial(self._push, part, time.time())
        work = partial(guarded, push, part.replica.job, part.shard_id)
        result = await part.replica.in_turn(self._run, num_bytes, work)
        if isinstance(result, ShoalError):
            return result
        try:
            await part.replica.wait_acknowledged(result.version, self._header.acknowledgement)
        except ShoalError as error:
            return error
        return TablePushOutcome(
            shard_id=part.shard_id,
            version=result.version,
            staleness=result.staleness,
            duplicate=result.is_duplicate,
            fates=result.fates,
            step=part.shard.body.content.table_step,
        )

    def _push(self, part: TablePushPart, at_unix_s: float) -> PushResult[None]:
        push = part.push(self._session, self._header.sequence, at_unix_s, self.scope)
        part.replica.before_push()
        what = f"more rows in shard {part.shard_id} of job {part.replica.job}"
        return part.shard.push(push, self._is_live, partial(self._memory.take, what=what))

    def refusal(self, shard_id: int, error: ShoalError) -> TablePushOutcome:
        """The shard may have gone elsewhere while its rows came in."""
        epoch = next(item.epoch for item in self._header.shards if item.shard_id == shard_id)
        error = self._maker.with_route(error, self._header.token.job, shard_id, epoch)
        return TablePushOutcome(shard_id=shard_id, error=to_detail(error))
