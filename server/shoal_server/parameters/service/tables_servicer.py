"""The Tables service: ids and gradients in, rows and fates out."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial

import structlog

from shoal_proto.checksum import crc32
from shoal_proto.errors import MalformedMessage, ShoalError
from shoal_proto.status import to_detail
from shoal_proto.v1.tables_pb2 import (
    FoundRows,
    RowGradients,
    RowIds,
    TableLookupReply,
    TableLookupRequest,
    TablePushReply,
    TablePushRequest,
)
from shoal_proto.v1.tables_pb2_grpc import TablesServicer as Base
from shoal_server.parameters.cluster.fence import Fence
from shoal_server.parameters.service.headers import no_header
from shoal_server.parameters.service.table_maker import TableMaker
from shoal_server.parameters.service.table_push import IncomingTablePush, TablePushKind
from shoal_server.parameters.shard.chunk_assembler import Budget, Reservation
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.shard.replica import ShardReplica
from shoal_server.parameters.shard.step_scope import TABLES
from shoal_server.parameters.shard.workers import Runner
from shoal_server.parameters.snapshot.barriers import SnapshotBarriers
from shoal_server.parameters.tables.batch import ID_BYTES
from shoal_server.parameters.tables.shard import LookedUp, TableShard
from shoal_server.serving.rpc import Context

log = structlog.get_logger(__name__)

MAX_LOOKUP_BYTES = 4 * 1024 * 1024
"""Of the rows that one message asks for."""


class TablesServicer(Base):
    """What is wrong with one shard's part is answered for that shard, and the others go on."""

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

    async def _look_up(self, job: str, asked: Sequence[RowIds]) -> TableLookupReply:
        found = await self._maker.look_up(job, [(rows.shard_id, rows.epoch) for rows in asked])
        reply, left_bytes = TableLookupReply(), MAX_LOOKUP_BYTES
        for rows, shard in zip(asked, found, strict=True):
            try:
                if isinstance(shard, ShoalError):
                    raise shard
                num_bytes = len(rows.ids) // ID_BYTES * shard[1].body.row_bytes
                # A single row always gets through.
                if num_bytes > max(left_bytes, shard[1].body.row_bytes):
                    raise _too_many(num_bytes)
                left_bytes -= num_bytes
                reply.rows.append(await self._found(rows, *shard, num_bytes))
            except ShoalError as error:
                reply.rows.append(FoundRows(shard_id=rows.shard_id, error=to_detail(error)))
        return reply

    async def _found(
        self, rows: RowIds, replica: ShardReplica, shard: TableShard, num_bytes: int
    ) -> FoundRows:
        look_up = partial(shard.read, partial(shard.body.look_up, rows.ids))
        looked_up: LookedUp = await replica.in_turn(self._run, num_bytes, look_up)
        # What a backup has not got yet may still vanish: nobody is to have seen it.
        await replica.receipts.wait_safe(looked_up.version)
        return FoundRows(
            shard_id=rows.shard_id,
            epoch=rows.epoch,
            version=looked_up.version,
            births=looked_up.births,
            values=looked_up.values,
            checksum=crc32(looked_up.values, crc32(looked_up.births)),
            step=looked_up.table_step,
        )

    async def Push(
        self, requests: AsyncIterator[TablePushRequest], context: Context
    ) -> AsyncIterator[TablePushReply]:
        first = await anext(requests, TablePushRequest())
        if not first.HasField("header"):
            raise no_header("TablePushHeader")
        header = first.header
        session = await self._fence.check(header.token)
        kind = TablePushKind(
            header,
            session,
            self._fence.is_live,
            maker=self._maker,
            run=self._run,
            memory=self._memory,
        )
        counted = session if header.with_parameters else TABLES + session
        touched = frozenset(header.all_shard_ids)
        passing = self._barriers.passing(header.token.job, counted, header.sequence, touched)
        async with passing as passage, aclosing(self._pushed(kind, first, requests)) as replies:
            async for reply in replies:
                for outcome in reply.outcomes:
                    if outcome.HasField("error"):
                        passage.answered(outcome.shard_id, outcome.error)
                yield reply

    async def _pushed(
        self,
        kind: TablePushKind,
        first: TablePushRequest,
        requests: AsyncIterator[TablePushRequest],
    ) -> AsyncGenerator[TablePushReply, None]:
        with Reservation(self._budget) as reservation:
            push = IncomingTablePush(kind, reservation)
            await kind.open(push)
            async with aclosing(push.answers(_rows(first, requests))) as batches:
                async for outcomes in batches:
                    yield TablePushReply(outcomes=outcomes)


async def _rows(
    first: TablePushRequest, requests: AsyncIterator[TablePushRequest]
) -> AsyncIterator[tuple[int, RowGradients]]:
    for rows in first.rows:
        yield rows.shard_id, rows
    async for request in requests:
        for rows in request.rows:
            yield rows.shard_id, rows


def _too_many(num_bytes: int) -> ShoalError:
    return MalformedMessage(
        "one message asks for too many rows",
        seen=f"{num_bytes} bytes of one shard's",
        expected=f"at most {MAX_LOOKUP_BYTES} in a message",
        fix="Ask in several messages.",
    )
