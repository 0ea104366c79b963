"""The Tables service: looks up rows, and applies pushes to them."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from itertools import chain

import structlog

from shoal_proto.pieces import AnyPiece
from shoal_proto.traces import tracing
from shoal_proto.v1.tables_pb2 import (
    RowIds,
    TableLookupReply,
    TableLookupRequest,
    TablePushHeader,
    TablePushReply,
    TablePushRequest,
)
from shoal_proto.v1.tables_pb2_grpc import TablesServicer as Base
from shoal_server.parameters.cluster.fence import Fence
from shoal_server.parameters.service.headers import no_header
from shoal_server.parameters.service.incoming_rows import RowsPiece
from shoal_server.parameters.service.table_lookup import (
    IncomingLookup,
    LookupKind,
    answer_message,
)
from shoal_server.parameters.service.table_maker import TableMaker
from shoal_server.parameters.service.table_push import IncomingTablePush, TablePushKind
from shoal_server.parameters.shard.chunk_assembler import Budget, Reservation
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.shard.reply_writer import ReplyWriter
from shoal_server.parameters.shard.step_scope import TABLES
from shoal_server.parameters.shard.workers import Runner
from shoal_server.parameters.snapshot.barriers import SnapshotBarriers
from shoal_server.serving.rpc import Context

log = structlog.get_logger(__name__)


class TablesServicer(Base):
    """Serves tables. An error in one shard's part is that shard's answer; other shards go on."""

    def __init__(
        self,
        *,
        maker: TableMaker,
        fence: Fence,
        barriers: SnapshotBarriers,
        run: Runner,
        budget: Budget,
        memory: Memory,
    ) -> None:
        self._maker = maker
        self._fence = fence
        self._barriers = barriers
        self._run = run
        self._budget = budget
        self._memory = memory

    async def Lookup(
        self, requests: AsyncIterator[TableLookupRequest], context: Context
    ) -> AsyncIterator[TableLookupReply]:
        first = await anext(requests, TableLookupRequest())
        if not first.HasField("header"):
            raise no_header("TableLookupHeader")
        await self._fence.check(first.header.token)
        job = first.header.token.job
        if first.rows:
            yield await self._look_up(job, first.rows)
        async for request in requests:
            yield await self._look_up(job, request.rows)

    async def _look_up(self, job: str, requested: Sequence[RowIds]) -> TableLookupReply:
        shards = await self._maker.look_up(job, [(rows.shard_id, rows.epoch) for rows in requested])
        return TableLookupReply(rows=await answer_message(requested, shards, self._run))

    async def look_up(
        self,
        request: TableLookupRequest,
        pieces: AsyncIterator[AnyPiece],
        reply_writer: ReplyWriter,
    ) -> AsyncGenerator[Sequence[TableLookupReply | bytes], None]:
        """Answer a lookup of a bulk connection. The ids are received in pieces; `reply_writer`
        writes births and values. Raises an error that concerns the whole call, such as
        MalformedMessage for a request with rows or without a header."""
        if not request.HasField("header") or request.rows:
            raise no_header("TableLookupHeader without rows")
        header = request.header
        await self._fence.check(header.token)
        kind = LookupKind(
            header.token.job,
            header.items,
            maker=self._maker,
            run=self._run,
            reply_writer=reply_writer,
        )
        with Reservation(self._budget) as reservation:
            lookup = IncomingLookup(kind, reservation)
            await kind.open(lookup)
            keyed = ((piece.shard_id, piece) async for piece in pieces)
            async with aclosing(lookup.answers(keyed)) as batches:
                async for answers in batches:
                    reply = TableLookupReply(rows=[answer.rows for answer in answers])
                    yield [reply, *chain.from_iterable(answer.frames for answer in answers)]

    async def Push(
        self, requests: AsyncIterator[TablePushRequest], context: Context
    ) -> AsyncIterator[TablePushReply]:
        first = await anext(requests, TablePushRequest())
        async with aclosing(self._push(first, _rows(first, requests), False)) as replies:
            async for reply in replies:
                yield reply

    async def push(
        self, request: TablePushRequest, pieces: AsyncIterator[AnyPiece]
    ) -> AsyncGenerator[Sequence[TablePushReply], None]:
        """Answer a push of a bulk connection, whose rows are received in pieces. Raises an error
        that concerns the whole push, such as MalformedMessage for a request with rows or without a
        header."""
        if request.rows:
            raise no_header("TablePushHeader without rows")
        keyed = ((piece.shard_id, piece) async for piece in pieces)
        async with aclosing(self._push(request, keyed, True)) as replies:
            async for reply in replies:
                yield [reply]

    async def _push(
        self,
        first: TablePushRequest,
        pieces: AsyncIterator[tuple[int, RowsPiece]],
        is_in_pieces: bool,
    ) -> AsyncGenerator[TablePushReply, None]:
        if not first.HasField("header"):
            raise no_header("TablePushHeader")
        with tracing.OngoingSpan("Tables/Push", first.header.token) as whole:
            with whole.within():
                session = await self._fence.check(first.header.token)
            replies = self._passed(first.header, session, pieces, is_in_pieces)
            async with aclosing(replies):
                async for reply in replies:
                    yield reply

    async def _passed(
        self,
        header: TablePushHeader,
        session: str,
        pieces: AsyncIterator[tuple[int, RowsPiece]],
        is_in_pieces: bool,
    ) -> AsyncGenerator[TablePushReply, None]:
        """Apply a push within the job's snapshot barrier."""
        kind = TablePushKind(
            header,
            session,
            self._fence.is_live,
            maker=self._maker,
            run=self._run,
            memory=self._memory,
            is_in_pieces=is_in_pieces,
        )
        counted = session if header.with_parameters else TABLES + session
        touched = frozenset(header.all_shard_ids)
        passing = self._barriers.admit_part(header.token.job, counted, header.sequence, touched)
        async with passing as passage, aclosing(self._pushed(kind, pieces)) as replies:
            async for reply in replies:
                for outcome in reply.outcomes:
                    if outcome.HasField("error"):
                        passage.record_answer(outcome.shard_id, outcome.error)
                yield reply

    async def _pushed(
        self, kind: TablePushKind, pieces: AsyncIterator[tuple[int, RowsPiece]]
    ) -> AsyncGenerator[TablePushReply, None]:
        with Reservation(self._budget) as reservation:
            push = IncomingTablePush(kind, reservation)
            await kind.open(push)
            async with aclosing(push.answers(pieces)) as batches:
                async for outcomes in batches:
                    yield TablePushReply(outcomes=outcomes)


async def _rows(
    first: TablePushRequest, requests: AsyncIterator[TablePushRequest]
) -> AsyncIterator[tuple[int, RowsPiece]]:
    for rows in first.rows:
        yield rows.shard_id, rows
    async for request in requests:
        for rows in request.rows:
            yield rows.shard_id, rows
