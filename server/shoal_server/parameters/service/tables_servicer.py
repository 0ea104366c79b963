"""The Tables service: ids and gradients in, rows and fates out."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import structlog

from shoal_proto.checksum import crc32
from shoal_proto.errors import InternalError, MalformedMessage, ShoalError
from shoal_proto.status import to_detail
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_proto.v1.tables_pb2 import (
    FoundRows,
    RowGradients,
    RowIds,
    TableLookupReply,
    TableLookupRequest,
    TablePushHeader,
    TablePushOutcome,
    TablePushReply,
    TablePushRequest,
)
from shoal_proto.v1.tables_pb2_grpc import TablesServicer as Base
from shoal_server.parameters.cluster.fence import Fence
from shoal_server.parameters.service.headers import no_header
from shoal_server.parameters.service.table_maker import TableMaker
from shoal_server.parameters.service.table_parts import TablePushPart, answer, checked, refusal
from shoal_server.parameters.shard.chunk_assembler import Budget, Reservation
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.shard.replica import ShardReplica
from shoal_server.parameters.shard.step_scope import TABLES, Scope
from shoal_server.parameters.shard.versioned import PushResult
from shoal_server.parameters.shard.workers import Runner
from shoal_server.parameters.snapshot.barriers import SnapshotBarriers
from shoal_server.parameters.tables.batch import ID_BYTES
from shoal_server.parameters.tables.shard import LookedUp, TablePush, TableShard
from shoal_server.serving.rpc import Context

log = structlog.get_logger(__name__)

MAX_LOOKUP_BYTES = 4 * 1024 * 1024
"""Of the rows that one message asks for."""
MAX_PENDING_SHARDS = 8
"""Shards of one call that are worked on at a time."""


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
        scope = checked(header)
        counted = session if header.with_parameters else TABLES + session
        touched = frozenset(header.all_shard_ids)
        passing = self._barriers.passing(header.token.job, counted, header.sequence, touched)
        pushed = self._pushed(_Sender(session, scope), first, requests)
        async with passing as passage, aclosing(pushed) as replies:
            async for reply in replies:
                for outcome in reply.outcomes:
                    if outcome.HasField("error"):
                        passage.answered(outcome.shard_id, outcome.error)
                yield reply

    async def _pushed(
        self, sender: "_Sender", first: TablePushRequest, requests: AsyncIterator[TablePushRequest]
    ) -> AsyncGenerator[TablePushReply, None]:
        with Reservation(self._budget) as reservation:
            push = _IncomingPush(self, first.header, sender, reservation)
            await push.open(self._maker)
            await push.take(first.rows)
            async for request in requests:
                await push.take(request.rows)
                if push.answers:
                    yield push.reply()
            push.end()
            await push.settle(0)
            yield push.reply()

    async def apply(
        self, part: TablePushPart, header: TablePushHeader, sender: "_Sender"
    ) -> TablePushOutcome:
        """Apply one shard's part; its answer, once what it tells of is as safe as was asked for."""
        push = part.push(sender.session, header.sequence, time.time(), sender.scope)
        self._memory.refresh()
        try:
            num_bytes = part.num_bytes + part.replica.copy_bytes
            num_bytes += part.shard.body.regrown_bytes(part.item.num_rows)
            work = partial(self._push, part, push)
            outcome = await part.replica.in_turn(self._run, num_bytes, work)
            await part.replica.wait_acknowledged(outcome.version, header.acknowledgement)
        except ShoalError as error:
            return refusal(part.item.shard_id, self._maker.with_route(error, part))
        except Exception as error:
            log.exception("table_push_failed", job=part.replica.job, shard_id=part.item.shard_id)
            unnamed = InternalError("the push failed", seen=repr(error))
            return refusal(part.item.shard_id, unnamed)
        return answer(part.shard, outcome)

    def _push(self, part: TablePushPart, push: TablePush) -> PushResult[None]:
        part.replica.before_push()
        what = f"more rows in shard {part.item.shard_id} of job {part.replica.job}"
        return part.shard.push(push, self._fence.is_live, partial(self._memory.take, what=what))


@dataclass(frozen=True, slots=True)
class _Sender:
    """Who pushes, and as part of what."""

    session: str
    scope: Scope | None


class _IncomingPush:
    """One push: its shards are received, applied and answered one by one."""

    def __init__(
        self,
        servicer: TablesServicer,
        header: TablePushHeader,
        sender: "_Sender",
        reservation: Reservation,
    ) -> None:
        self._servicer = servicer
        self._header = header
        self._sender = sender
        self._reservation = reservation
        self._parts: dict[int, TablePushPart] = {}
        self._refused: set[int] = set()
        self._pending: deque[tuple[int, asyncio.Future[TablePushOutcome]]] = deque()
        self.answers: list[TablePushOutcome] = []
        """Those that are there and have not left yet."""

    async def open(self, maker: TableMaker) -> None:
        """Look up every shard that the header names."""
        items = self._header.shards
        wanted = [(item.shard_id, item.epoch) for item in items]
        for item, found in zip(
            items, await maker.look_up(self._header.token.job, wanted), strict=True
        ):
            try:
                if isinstance(found, ShoalError):
                    raise found
                part = TablePushPart(item=item, replica=found[0], shard=found[1])
                if self._header.acknowledgement == Acknowledgement.ACKNOWLEDGEMENT_DURABLE:
                    part.replica.check_durable()
            except ShoalError as error:
                self._refuse(item.shard_id, error)
                continue
            if part.is_complete:
                self._start(part)
            else:
                self._parts[item.shard_id] = part

    async def take(self, rows: Sequence[RowGradients]) -> None:
        """Add rows; a shard that is complete with them is applied. Waits where too many are."""
        for each in rows:
            self._take(each)
            await self.settle(MAX_PENDING_SHARDS)

    def _take(self, rows: RowGradients) -> None:
        shard_id = rows.shard_id
        part = self._parts.get(shard_id)
        if part is None:
            if shard_id in self._refused:
                return
            raise MalformedMessage(
                "rows of a shard that is not expected",
                seen=f"shard {shard_id}",
                expected=f"one of {sorted(self._parts)}" if self._parts else "no more rows",
                fix="Name each shard in the header and send each of its rows once.",
            )
        try:
            self._reservation.reserve(shard_id, part.num_bytes)
            part.take(rows)
        except ShoalError as error:
            del self._parts[shard_id]
            self._refuse(shard_id, error)
            return
        if part.is_complete:
            self._start(self._parts.pop(shard_id))

    def end(self) -> None:
        """The stream is over: shards that are not complete are refused."""
        for shard_id, part in self._parts.items():
            self._refuse(shard_id, part.truncated())

    async def settle(self, max_pending: int) -> None:
        """Gather answers until at most so many shards are worked on."""
        while self._pending and (len(self._pending) > max_pending or self._pending[0][1].done()):
            shard_id, pending = self._pending.popleft()
            self.answers.append(await pending)
            self._reservation.release(shard_id)

    def reply(self) -> TablePushReply:
        """The answers that are there."""
        answers, self.answers = self.answers, []
        return TablePushReply(outcomes=answers)

    def _start(self, part: TablePushPart) -> None:
        applied = self._servicer.apply(part, self._header, self._sender)
        self._pending.append((part.item.shard_id, asyncio.ensure_future(applied)))

    def _refuse(self, shard_id: int, error: ShoalError) -> None:
        self._refused.add(shard_id)
        refused: asyncio.Future[TablePushOutcome] = asyncio.get_running_loop().create_future()
        refused.set_result(refusal(shard_id, error))
        self._pending.append((shard_id, refused))


def _too_many(num_bytes: int) -> ShoalError:
    return MalformedMessage(
        "one message asks for too many rows",
        seen=f"{num_bytes} bytes of one shard's",
        expected=f"at most {MAX_LOOKUP_BYTES} in a message",
        fix="Ask in several messages.",
    )
