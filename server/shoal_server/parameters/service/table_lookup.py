"""Lookups of rows, over gRPC or a bulk connection."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial

from shoal_proto.checksum import crc32
from shoal_proto.errors import MalformedMessage, ShoalError
from shoal_proto.pieces import AnyPiece
from shoal_proto.status import to_detail
from shoal_proto.v1.tables_pb2 import FoundRows, RowIds, TableLookupItem
from shoal_server.parameters.service.incoming_push import IncomingPush, guarded
from shoal_server.parameters.service.table_maker import TableMaker
from shoal_server.parameters.shard.chunk_assembler import PieceAssembler
from shoal_server.parameters.shard.replica import ShardReplica
from shoal_server.parameters.shard.reply_writer import CopyOut, ReplyWriter
from shoal_server.parameters.shard.workers import ROWS_COST, Runner
from shoal_server.parameters.tables.batch import ID_BYTES
from shoal_server.parameters.tables.shard import LookupResult, TableShard

MAX_LOOKUP_BYTES = 4 * 1024 * 1024
"""Bound on the values of the rows that one message, or one item of a bulk call, requests; a single
row may be larger."""


async def look_up(
    replica: ShardReplica, shard: TableShard, ids: bytes, num_bytes: int, run: Runner
) -> LookupResult:
    """Look up rows, in the order of `ids`. `num_bytes`: the size of the rows' values."""
    work = partial(shard.read, partial(shard.body.look_up, ids))
    looked_up: LookupResult = await replica.work(run, ROWS_COST * num_bytes, work)
    # Until a backup has the version, it may be lost: no caller may see it before.
    await replica.wait_safe(looked_up.version)
    return looked_up


async def answer_message(
    requested: Sequence[RowIds],
    looked_up: Sequence[tuple[ShardReplica, TableShard] | ShoalError],
    run: Runner,
) -> list[FoundRows]:
    """Return the answers to one message of a gRPC call, in its order. Shards are looked up
    concurrently."""
    left_bytes = MAX_LOOKUP_BYTES
    answers: list[Awaitable[FoundRows]] = []
    for rows, shard in zip(requested, looked_up, strict=True):
        if isinstance(shard, ShoalError):
            answers.append(_refused(rows, shard))
            continue
        row_bytes = shard[1].body.row_bytes
        num_bytes = len(rows.ids) // ID_BYTES * row_bytes
        # A single row is always answered.
        if num_bytes > max(left_bytes, row_bytes):
            answers.append(_refused(rows, _too_many(num_bytes)))
            continue
        left_bytes -= num_bytes
        answers.append(_found(rows, *shard, num_bytes, run))
    return await asyncio.gather(*answers)


async def _refused(rows: RowIds, error: ShoalError) -> FoundRows:
    return FoundRows(shard_id=rows.shard_id, error=to_detail(error))


async def _found(
    rows: RowIds, replica: ShardReplica, shard: TableShard, num_bytes: int, run: Runner
) -> FoundRows:
    try:
        looked_up = await look_up(replica, shard, rows.ids, num_bytes, run)
    except ShoalError as error:
        return FoundRows(shard_id=rows.shard_id, error=to_detail(error))
    births, values = bytes(looked_up.births), bytes(looked_up.values)
    return FoundRows(
        shard_id=rows.shard_id,
        epoch=rows.epoch,
        version=looked_up.version,
        births=births,
        values=values,
        checksum=crc32(values, crc32(births)),
        step=looked_up.table_step,
    )


@dataclass(frozen=True, kw_only=True)
class LookupPart:
    """One item of a bulk call: rows of one shard."""

    number: int
    item: TableLookupItem
    replica: ShardReplica
    shard: TableShard
    assembler: PieceAssembler

    @property
    def shard_id(self) -> int:
        """The id that the item's pieces carry: the number of the item."""
        return self.number

    @property
    def num_bytes(self) -> int:
        return self.assembler.expected_bytes

    @property
    def is_complete(self) -> bool:
        return self.assembler.is_complete

    def truncated(self) -> ShoalError:
        return self.assembler.truncated()


@dataclass(frozen=True, kw_only=True)
class LookupAnswer:
    rows: FoundRows
    """The answer, without births and values."""
    frames: Sequence[bytes] = ()
    """Frames that carry births and values, or announce their position in shared memory."""


IncomingLookup = IncomingPush[LookupPart, AnyPiece, LookupAnswer]


class LookupKind:
    """The `PushKind` of a bulk lookup. Its items are received like the parts of a push. An item is
    answered once its rows are looked up."""

    applies_at_once = True

    def __init__(
        self,
        job: str,
        items: Sequence[TableLookupItem],
        *,
        maker: TableMaker,
        run: Runner,
        reply_writer: ReplyWriter,
    ) -> None:
        self._job = job
        self._items = items
        self._maker = maker
        self._run = run
        self._reply_writer = reply_writer

    async def open(self, lookup: IncomingLookup) -> None:
        """Look up every shard that the header names, and make those that never existed."""
        wanted = [(item.shard_id, item.epoch) for item in self._items]
        looked_up = await self._maker.look_up(self._job, wanted)
        for number, (item, shard) in enumerate(zip(self._items, looked_up, strict=True)):
            lookup.expect(number, partial(self._part, number, item, shard))

    def _part(
        self,
        number: int,
        item: TableLookupItem,
        looked_up: tuple[ShardReplica, TableShard] | ShoalError,
    ) -> LookupPart:
        if isinstance(looked_up, ShoalError):
            raise looked_up
        replica, shard = looked_up
        num_bytes = item.num_rows * shard.body.row_bytes
        if num_bytes > max(MAX_LOOKUP_BYTES, shard.body.row_bytes):
            raise _too_many(num_bytes)
        return LookupPart(
            number=number,
            item=item,
            replica=replica,
            shard=shard,
            assembler=PieceAssembler(item.shard_id, [(0, item.num_rows * ID_BYTES)]),
        )

    def add(self, part: LookupPart, piece: AnyPiece) -> None:
        part.assembler.take(piece)

    def apply(self, part: LookupPart) -> Awaitable[LookupAnswer | ShoalError]:
        return asyncio.ensure_future(self._answer(part))

    async def _answer(self, part: LookupPart) -> LookupAnswer | ShoalError:
        num_bytes = part.item.num_rows * (ID_BYTES + part.shard.body.row_bytes)
        writer = self._reply_writer.writer(part.number, num_bytes)
        read = partial(_read, part, writer)
        work = partial(guarded, read, self._job, part.item.shard_id, "lookup")
        answer = await part.replica.work(self._run, ROWS_COST * num_bytes, work)
        if isinstance(answer, ShoalError):
            return answer
        try:
            # Until a backup has the version, it may be lost: no caller may see it before.
            await part.replica.wait_safe(answer.rows.version)
        except ShoalError as error:
            return error
        return answer

    def refusal(self, shard_id: int, error: ShoalError) -> LookupAnswer:
        item = self._items[shard_id]
        rows = FoundRows(shard_id=item.shard_id, item=shard_id, error=to_detail(error))
        return LookupAnswer(rows=rows)


def _read(part: LookupPart, writer: CopyOut) -> LookupAnswer:
    # Copied, as the answer may be written to the memory that the ids lie in.
    ids = bytes(part.assembler.join())

    def answer(version: int) -> LookupAnswer:
        result = part.shard.body.look_up(ids, version)
        rows = FoundRows(
            shard_id=part.item.shard_id,
            item=part.number,
            epoch=part.item.epoch,
            version=version,
            step=result.table_step,
            num_bytes=len(result.births) + len(result.values),
        )
        return LookupAnswer(rows=rows, frames=writer(part.number, result.births, result.values))

    return part.shard.read(answer)


def _too_many(num_bytes: int) -> ShoalError:
    return MalformedMessage(
        "one message asks for too many rows",
        seen=f"{num_bytes} bytes for one of its shards",
        expected=f"at most {MAX_LOOKUP_BYTES} for a whole message, or for an item of a bulk call",
        fix="Ask in several messages.",
    )
