"""Lookups of rows. Each item's ids (int64) arrive in pieces. The answer has all births (int64),
then all values."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from google.protobuf.message import Message

from shoal_proto.errors import MalformedMessage, ShoalError
from shoal_proto.status import to_detail
from shoal_proto.v1.parameters_pb2 import FoundRows, LookupHeader, LookupItem, LookupReply
from shoal_server.parameters.service.incoming_call import IncomingCall, guarded
from shoal_server.parameters.service.push import table_shard
from shoal_server.parameters.service.table_maker import TableMaker
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.chunk_assembler import PieceAssembler
from shoal_server.parameters.shard.replica import ShardReplica
from shoal_server.parameters.shard.reply_writer import CopyOut, ReplyWriter
from shoal_server.parameters.shard.workers import ROWS_COST, Runner
from shoal_server.parameters.tables.batch import ID_BYTES
from shoal_server.parameters.tables.shard import TableShard

MAX_LOOKUP_BYTES = 4 * 1024 * 1024
"""Bound on the values of the rows of one item; a single row may be larger."""


@dataclass(frozen=True, kw_only=True)
class LookupPart:
    """Item of a lookup: rows of one shard."""

    number: int
    item: LookupItem
    replica: ShardReplica
    shard: TableShard
    assembler: PieceAssembler

    @property
    def shard_id(self) -> int:
        return self.number


@dataclass(frozen=True, kw_only=True)
class LookupAnswer:
    rows: FoundRows
    values: Sequence[Message | bytes] = ()
    """Messages or frames with births and values, or their position in shared memory."""


IncomingLookup = IncomingCall[LookupPart, LookupAnswer]


class LookupKind:
    """The items of one lookup. An answer waits until every backup in step has the version of its
    rows."""

    def __init__(
        self,
        header: LookupHeader,
        *,
        catalog: Catalog,
        maker: TableMaker,
        run: Runner,
        reply_writer: ReplyWriter,
    ) -> None:
        self._job = header.token.job
        self._items = header.items
        self._catalog = catalog
        self._maker = maker
        self._run = run
        self._reply_writer = reply_writer

    async def open(self, lookup: IncomingLookup) -> None:
        """Look up the header's shards, and make those that never existed."""
        wanted = [(item.shard_id, item.epoch) for item in self._items]
        await self._maker.make_missing(self._job, wanted)
        replicas = await self._catalog.look_up(self._job, wanted)
        for number, (item, replica) in enumerate(zip(self._items, replicas, strict=True)):
            lookup.expect(number, partial(self._part, number, item, replica))

    def _part(
        self, number: int, item: LookupItem, replica: ShardReplica | ShoalError
    ) -> LookupPart:
        if isinstance(replica, ShoalError):
            raise replica
        shard = table_shard(replica)
        num_bytes = item.num_rows * shard.body.row_bytes
        if num_bytes > max(MAX_LOOKUP_BYTES, shard.body.row_bytes):
            raise MalformedMessage(
                "an item of a lookup asks for too many rows",
                seen=f"{num_bytes} bytes of values",
                expected=f"at most {MAX_LOOKUP_BYTES}",
                fix="Ask for the rows in several items.",
            )
        return LookupPart(
            number=number,
            item=item,
            replica=replica,
            shard=shard,
            assembler=PieceAssembler(item.shard_id, [(0, item.num_rows * ID_BYTES)]),
        )

    def apply(self, part: LookupPart) -> "asyncio.Future[LookupAnswer | ShoalError]":
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


def messages(answers: Sequence[LookupAnswer]) -> Sequence[Message | bytes]:
    """Return the messages and frames with these answers."""
    found = LookupReply(rows=[answer.rows for answer in answers])
    return [found, *(value for answer in answers for value in answer.values)]


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
        return LookupAnswer(rows=rows, values=writer(part.number, result.births, result.values))

    return part.shard.read(answer)
