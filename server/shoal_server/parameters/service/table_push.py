"""Pushes to tables: the rows of each shard are received, applied and answered."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from shoal_proto.errors import InvalidSpec, MalformedMessage, ShoalError
from shoal_proto.status import to_detail
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_proto.v1.codec_pb2 import GradientCodec
from shoal_proto.v1.tables_pb2 import (
    TablePushHeader,
    TablePushItem,
    TablePushOutcome,
)
from shoal_server.parameters.service.incoming_push import IncomingPush, check_sequence, guarded
from shoal_server.parameters.service.incoming_rows import (
    IncomingRows,
    RowMessages,
    RowPieces,
    RowsPiece,
)
from shoal_server.parameters.service.table_maker import TableMaker
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.shard.replica import ShardReplica
from shoal_server.parameters.shard.step_scope import Scope
from shoal_server.parameters.shard.versioned import ShardPushResult
from shoal_server.parameters.shard.workers import INLINE_BYTES, ROWS_COST, Runner
from shoal_server.parameters.tables.batch import ID_BYTES, gradient_row_bytes
from shoal_server.parameters.tables.shard import TablePush, TableShard

MAX_PUSH_BYTES = 256 * 1024 * 1024
"""Bound on one shard's part of one push."""


@dataclass(frozen=True, kw_only=True)
class TablePushPart:
    """One shard's part of a push."""

    item: TablePushItem
    replica: ShardReplica
    shard: TableShard
    incoming: IncomingRows

    def __post_init__(self) -> None:
        """Raise Overloaded, Unavailable or InvalidSpec if the part may not be received."""
        self.replica.check_capacity()
        if self.codec is not None:
            gradient_row_bytes(self.shard.body.table, self.codec)
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
        """Size of the complete part, with its gradients decoded."""
        return self.item.num_rows * (2 * ID_BYTES + self.shard.body.row_bytes)

    @property
    def codec(self) -> GradientCodec | None:
        """The encoding of the gradients; None: the table's dtype."""
        return self.item.codec if self.item.HasField("codec") else None

    @property
    def is_complete(self) -> bool:
        return self.incoming.is_complete

    def truncated(self) -> ShoalError:
        return self.incoming.truncated()

    def push(self, session: str, sequence: int, at_unix_s: float, scope: Scope | None) -> TablePush:
        """Make the push of a complete part."""
        rows = self.incoming.joined()
        return TablePush(
            session=session,
            sequence=sequence,
            epoch=self.item.epoch,
            base_version=self.item.base_version,
            base_epoch=self.item.base_epoch,
            step=self.item.step,
            codec=self.codec,
            lr=self.item.lr if self.item.HasField("lr") else None,
            row_ids=rows.ids,
            births=rows.births,
            gradient=rows.gradient,
            is_borrowed=rows.is_borrowed,
            at_unix_s=at_unix_s,
            scope=scope,
        )


def checked(header: TablePushHeader) -> Scope | None:
    """Check a push's header, and return the scope of its step. Raises MalformedMessage or
    InvalidSpec."""
    check_sequence(header.sequence)
    shard_ids = [item.shard_id for item in header.shards]
    if len(set(shard_ids)) != len(shard_ids) or not set(shard_ids) <= set(header.all_shard_ids):
        raise MalformedMessage(
            "a push names a shard twice, or a shard that is not in the list of all its shards",
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


IncomingTablePush = IncomingPush[TablePushPart, RowsPiece, TablePushOutcome]


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
        is_in_pieces: bool,
    ) -> None:
        """`is_in_pieces`: the rows are received in pieces, over a bulk connection."""
        self.scope = checked(header)
        self._is_in_pieces = is_in_pieces
        self._header = header
        self._session = session
        self._is_live = is_live
        self._maker = maker
        self._run = run
        self._memory = memory

    async def open(self, push: IncomingTablePush) -> None:
        """Look up every shard that the header names, and make those that never existed."""
        items = self._header.shards
        wanted = [(item.shard_id, item.epoch) for item in items]
        shards = await self._maker.look_up(self._header.token.job, wanted)
        for item, shard in zip(items, shards, strict=True):
            push.expect(item.shard_id, partial(self._part, item, shard))

    def _part(
        self, item: TablePushItem, looked_up: tuple[ShardReplica, TableShard] | ShoalError
    ) -> TablePushPart:
        if isinstance(looked_up, ShoalError):
            raise looked_up
        replica, shard = looked_up
        incoming: IncomingRows
        if self._is_in_pieces:
            codec = item.codec if item.HasField("codec") else None
            row_bytes = gradient_row_bytes(shard.body.table, codec)
            incoming = RowPieces(item.shard_id, item.num_rows, row_bytes)
        else:
            incoming = RowMessages(item.shard_id, item.num_rows)
        part = TablePushPart(item=item, replica=replica, shard=shard, incoming=incoming)
        if self._header.acknowledgement == Acknowledgement.ACKNOWLEDGEMENT_DURABLE:
            part.replica.check_durable()
        return part

    def add(self, part: TablePushPart, piece: RowsPiece) -> None:
        part.incoming.take(piece)

    def apply(self, part: TablePushPart) -> Awaitable[TablePushOutcome | ShoalError]:
        return asyncio.ensure_future(self._applied(part))

    async def _applied(self, part: TablePushPart) -> TablePushOutcome | ShoalError:
        """Apply the part, and return its answer once the update is as safe as the push demands."""
        self._memory.refresh()
        body = part.shard.body
        num_bytes = ROWS_COST * part.num_bytes + body.regrown_bytes(part.item.num_rows)
        if part.codec is not None:
            # Too much for the event loop: decoding takes longer than applying as many bytes.
            num_bytes += INLINE_BYTES
        push = partial(self._push, part, body.now_s())
        work = partial(guarded, push, part.replica.job, part.shard_id)
        result = await part.replica.work(self._run, num_bytes, work)
        if isinstance(result, ShoalError):
            return result
        try:
            await part.replica.leading.wait_acknowledged(
                result.version, self._header.acknowledgement
            )
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

    def _push(self, part: TablePushPart, at_unix_s: float) -> ShardPushResult[None]:
        push = part.push(self._session, self._header.sequence, at_unix_s, self.scope)
        what = f"more rows in shard {part.shard_id} of job {part.replica.job}"
        return part.shard.push(push, self._is_live, partial(self._memory.take, what=what))

    def refusal(self, shard_id: int, error: ShoalError) -> TablePushOutcome:
        """Return the answer for a refused shard, with its new route if the shard moved while its
        rows were being received."""
        epoch = next(item.epoch for item in self._header.shards if item.shard_id == shard_id)
        error = self._maker.with_route(error, self._header.token.job, shard_id, epoch)
        return TablePushOutcome(shard_id=shard_id, error=to_detail(error))
