"""One push as it comes in: its shards are received, applied and answered one by one."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import structlog

from shoal_proto.errors import InternalError, InvalidSpec, MalformedMessage, ShoalError
from shoal_proto.pieces import AnyPiece
from shoal_proto.status import from_detail, to_detail
from shoal_proto.v1.parameters_pb2 import (
    Acknowledgement,
    PushHeader,
    PushItem,
    PushOutcome,
    PushReply,
    ShardVersion,
)
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.chunk_assembler import ChunkAssembler, Reservation
from shoal_server.parameters.shard.dense import DensePush, DenseShard, Values, is_dense
from shoal_server.parameters.shard.replica import ShardReplica
from shoal_server.parameters.shard.reply_writer import CopyOut, ReplyWriter
from shoal_server.parameters.shard.step_scope import Scope
from shoal_server.parameters.shard.workers import Runner

log = structlog.get_logger(__name__)

MAX_PENDING_SHARDS = 8
"""Shards of one call that are worked on, or wait for their reply to leave, at a time."""


@dataclass(frozen=True, kw_only=True)
class _DensePushPart:
    item: PushItem
    replica: ShardReplica
    shard: DenseShard
    assembler: ChunkAssembler


@dataclass(frozen=True, kw_only=True)
class _ShardAnswer:
    outcome: PushOutcome
    values: Values | None = None


class IncomingPush:
    """Raises for what is wrong with the push as a whole; what is wrong with one shard's part is
    answered for that shard, leaves it untouched, and the others go on."""

    def __init__(
        self,
        header: PushHeader,
        session: str,
        is_live: Callable[[str], bool],
        run: Runner,
        reply_writer: ReplyWriter,
    ) -> None:
        _check(header)
        self._scope = Scope.of(header.all_shard_ids)
        self._header = header
        self._session = session
        self._is_live = is_live
        self._run = run
        self._reply_writer = reply_writer
        self._parts: dict[int, _DensePushPart] = {}
        self._whole: _DensePushPart | None = None
        self._refused: set[int] = set()
        self._is_durable = header.acknowledgement == Acknowledgement.ACKNOWLEDGEMENT_DURABLE
        self._pending: deque[tuple[int, Awaitable[_ShardAnswer]]] = deque()
        self._changed = asyncio.Event()
        self._is_over = False

    async def open(self, catalog: Catalog) -> None:
        """Look up every shard that the header names."""
        self._catalog = catalog
        items = self._header.shards
        found = await catalog.look_up(
            self._header.token.job, [(item.shard_id, item.epoch) for item in items]
        )
        for item, shard in zip(items, found, strict=True):
            try:
                part = self._expect(item, shard)
            except ShoalError as error:
                self._refuse(item.shard_id, error)
                continue
            if part.assembler.is_complete:
                self._start(part)
            else:
                self._parts[item.shard_id] = part

    def _expect(self, item: PushItem, replica: ShardReplica | ShoalError) -> _DensePushPart:
        if isinstance(replica, ShoalError):
            raise replica
        replica.check_room()
        if self._is_durable:
            replica.check_durable()
        shard = dense(replica)
        group = shard.spec.group
        if self._header.lr and group >= len(self._header.lr):
            raise InvalidSpec(
                "the push lacks the learning rate of a parameter group",
                seen=f"{len(self._header.lr)} learning rates",
                expected=f"one for group {group} too",
            )
        assembler = ChunkAssembler(shard.spec, item.absent_blocks, with_base=shard.body.needs_base)
        return _DensePushPart(item=item, replica=replica, shard=shard, assembler=assembler)

    def take(self, piece: AnyPiece, reservation: Reservation) -> None:
        """Add a piece. A shard is applied once a piece of another one, or the end, has come: only
        then is it known that its gradient was not too long."""
        if self._whole is not None and piece.shard_id != self._whole.item.shard_id:
            self._start(self._whole)
            self._whole = None
        part = self._parts.get(piece.shard_id, self._whole)
        if part is None or part.item.shard_id != piece.shard_id:
            if piece.shard_id not in self._refused:
                raise not_expected(piece.shard_id, self._parts)
            return
        try:
            reservation.reserve(piece.shard_id, part.assembler.expected_bytes)
            part.assembler.take(piece)
        except ShoalError as error:
            self._parts.pop(piece.shard_id, None)
            self._whole = None
            self._refuse(piece.shard_id, error)
            return
        if part.assembler.is_complete:
            self._whole = self._parts.pop(piece.shard_id)

    def end(self) -> None:
        """The stream is over: shards that are not complete are refused."""
        if self._whole is not None:
            self._start(self._whole)
            self._whole = None
        for shard_id, part in self._parts.items():
            self._refuse(shard_id, part.assembler.truncated())

    async def await_room(self) -> None:
        """Return once no more shards are pending than may be: only then take more in."""
        while len(self._pending) >= MAX_PENDING_SHARDS:
            self._changed.clear()
            await self._changed.wait()

    async def answers(self, reservation: Reservation) -> AsyncIterator[PushReply | bytes]:
        """The messages that answer each shard, in the order in which they were started, until
        the push is over."""
        while True:
            while not self._pending:
                if self._is_over:
                    return
                self._changed.clear()
                await self._changed.wait()
            shard_id, pending = self._pending[0]
            answer = await pending
            reservation.release(shard_id)
            for message in _messages(self._with_route(answer)):
                yield message
            self._pending.popleft()
            self._changed.set()

    def close(self) -> None:
        """Nothing more is taken in: the answers end behind what is pending."""
        self._is_over = True
        self._changed.set()

    def _start(self, part: _DensePushPart) -> None:
        writer = None
        if self._header.return_values:
            writer = self._reply_writer.writer(part.item.shard_id, part.shard.body.num_bytes)
        work = partial(self._apply, part, writer)
        applied = asyncio.ensure_future(self._run(part.shard.body.num_bytes, work))
        # Whether to wait for a backup is decided behind the push: one may have come meanwhile.
        waits = part.replica.receipts.safe_version is not None or self._is_durable
        if not applied.done() or waits:
            applied = asyncio.ensure_future(self._once_safe(part.replica, applied))
        self._add(part.item.shard_id, applied)

    async def _once_safe(
        self, replica: ShardReplica, applied: Awaitable[_ShardAnswer]
    ) -> _ShardAnswer:
        """The answer, once every backup, and the disk if it is asked for, has what it tells of."""
        answer = await applied
        told = max(answer.outcome.version, answer.values.version if answer.values else 0)
        try:
            await replica.wait_acknowledged(told, self._header.acknowledgement)
        except ShoalError as error:
            return _refusal(replica.shard_id, error)
        return answer

    def _apply(self, part: _DensePushPart, writer: CopyOut | None) -> _ShardAnswer:
        item, group = part.item, part.shard.spec.group
        push = DensePush(
            session=self._session,
            sequence=self._header.sequence,
            epoch=item.epoch,
            base_version=item.base_version,
            base_epoch=item.base_epoch,
            lr=self._header.lr[group] if self._header.lr else None,
            blocks=part.assembler.blocks,
            gradient=part.assembler.join(),
            is_borrowed=part.assembler.is_borrowed,
            scope=self._scope,
        )
        part.replica.before_push()
        try:
            read = None
            if writer is not None:
                read = partial(part.shard.body.values, writer=writer)
            applied = part.shard.push(push, self._is_live, read=read)
        except ShoalError as error:
            return _refusal(item.shard_id, error)
        except Exception as error:
            log.exception("push_failed", job=self._header.token.job, shard_id=item.shard_id)
            return _refusal(item.shard_id, InternalError("the push failed", seen=repr(error)))
        message = PushOutcome(
            shard_id=item.shard_id,
            version=applied.version,
            staleness=applied.staleness,
            duplicate=applied.is_duplicate,
        )
        return _ShardAnswer(outcome=message, values=applied.values)

    def _with_route(self, answer: _ShardAnswer) -> _ShardAnswer:
        """The shard may have gone elsewhere while its gradient came in."""
        if not answer.outcome.HasField("error"):
            return answer
        job, shard_id = self._header.token.job, answer.outcome.shard_id
        epoch = next(item.epoch for item in self._header.shards if item.shard_id == shard_id)
        error = from_detail(answer.outcome.error)
        return _refusal(shard_id, self._catalog.with_route(error, job, shard_id, epoch))

    def _refuse(self, shard_id: int, error: ShoalError) -> None:
        self._refused.add(shard_id)
        answer: asyncio.Future[_ShardAnswer] = asyncio.get_running_loop().create_future()
        answer.set_result(_refusal(shard_id, error))
        self._add(shard_id, answer)

    def _add(self, shard_id: int, answer: Awaitable[_ShardAnswer]) -> None:
        self._pending.append((shard_id, answer))
        self._changed.set()


def dense(replica: ShardReplica) -> DenseShard:
    """The state of a shard of parameters. Raises MalformedMessage for one of a table."""
    if not is_dense(replica.state):
        raise MalformedMessage(
            f"shard {replica.shard_id} of job {replica.job} is part of a table",
            seen="a call of the Parameters service",
            expected="one of the Tables service",
        )
    return replica.state


def not_expected(shard_id: int, expected: Mapping[int, object]) -> ShoalError:
    """The error for a piece of a shard that the header does not name, or that is complete."""
    return MalformedMessage(
        "a piece of a shard that is not expected",
        seen=f"shard {shard_id}",
        expected=f"one of {sorted(expected)}" if expected else "no more pieces",
        fix="Name each shard in the header and send each of its bytes once.",
    )


def _messages(answer: _ShardAnswer) -> Iterator[PushReply | bytes]:
    yield PushReply(outcome=answer.outcome)
    if answer.values is None:
        return
    shard_id = answer.outcome.shard_id
    yield PushReply(
        version=ShardVersion(
            shard_id=shard_id, version=answer.values.version, num_bytes=answer.values.num_bytes
        )
    )
    yield from answer.values.messages


def _refusal(shard_id: int, error: ShoalError) -> _ShardAnswer:
    return _ShardAnswer(outcome=PushOutcome(shard_id=shard_id, error=to_detail(error)))


def _check(header: PushHeader) -> None:
    if header.sequence < 1:
        raise MalformedMessage(
            "a push needs its sequence number",
            seen=str(header.sequence),
            expected="1 or more, one higher for each push of the incarnation",
        )
    for group, lr in enumerate(header.lr):
        if not 0.0 <= lr < math.inf:
            raise InvalidSpec(
                f"the learning rate of parameter group {group} is out of range",
                seen=f"{lr:g}",
                expected="0 <= lr, finite",
            )
    shard_ids = [item.shard_id for item in header.shards]
    if len(set(shard_ids)) != len(shard_ids):
        raise MalformedMessage(
            "a push names a shard twice",
            seen=str(sorted(shard_ids))[:200],
            expected="each shard once",
        )
