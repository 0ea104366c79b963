"""Pushes of gradients and of rows. The data of each shard are applied as one push."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from google.protobuf.message import Message

from shoal_proto.dtypes import MAX_SETTING
from shoal_proto.errors import InvalidSpec, MalformedMessage, ShoalError
from shoal_proto.status import to_detail
from shoal_proto.v1.parameters_pb2 import (
    Acknowledgement,
    PushHeader,
    PushItem,
    PushOutcome,
    PushReply,
    ShardVersion,
)
from shoal_server.parameters.codecs.codec import GradientDecoder
from shoal_server.parameters.service.incoming_call import IncomingCall, guarded
from shoal_server.parameters.service.table_maker import TableMaker
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.chunk_assembler import ChunkAssembler, PieceAssembler
from shoal_server.parameters.shard.dense import DensePush, DenseShard, DenseValues, is_dense
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.shard.replica import ShardReplica
from shoal_server.parameters.shard.reply_writer import CopyOut, ReplyWriter
from shoal_server.parameters.shard.step_scope import Scope
from shoal_server.parameters.shard.versioned import ShardPushResult
from shoal_server.parameters.shard.workers import INLINE_BYTES, ROWS_COST, Runner
from shoal_server.parameters.tables.batch import ID_BYTES, gradient_row_bytes
from shoal_server.parameters.tables.shard import TablePush, TableShard, is_table

T = TypeVar("T")

MAX_ROWS_BYTES = 256 * 1024 * 1024
"""Bound on one shard's rows in one push, with their gradients decoded."""
DECODING_COST = INLINE_BYTES
"""Cost of a compressed gradient, which is not decoded on the event loop."""


@dataclass(frozen=True, kw_only=True)
class DenseTarget:
    """A shard of parameters, and its part of the push."""

    shard: DenseShard
    blocks: Sequence[int]
    lr: float | None
    decoder: GradientDecoder | None
    """Decoder of a compressed gradient; None for others."""


@dataclass(frozen=True, kw_only=True)
class PushPart:
    """Part of a push for one shard."""

    item: PushItem
    replica: ShardReplica
    assembler: PieceAssembler
    target: DenseTarget | TableShard
    """Data for a TableShard are all ids, then all births, then all gradients."""
    cost_bytes: int
    next_address: str = ""

    @property
    def shard_id(self) -> int:
        return self.item.shard_id


@dataclass(frozen=True, kw_only=True)
class ShardAnswer:
    outcome: PushOutcome
    values: DenseValues | None = None

    @property
    def newest_version(self) -> int:
        return max(self.outcome.version, self.values.version if self.values else 0)


IncomingPush = IncomingCall[PushPart, ShardAnswer]


class PushKind:
    """The parts of one push, and their application."""

    def __init__(
        self,
        header: PushHeader,
        session: str,
        is_live: Callable[[str], bool],
        *,
        catalog: Catalog,
        maker: TableMaker,
        run: Runner,
        memory: Memory,
        reply_writer: ReplyWriter,
    ) -> None:
        """Raises MalformedMessage or InvalidSpec for a bad header."""
        _check(header)
        self._scope = Scope.of(header.all_shard_ids, of_tables=header.counts_rows)
        self._header = header
        self._session = session
        self._is_live = is_live
        self._catalog = catalog
        self._maker = maker
        self._run = run
        self._memory = memory
        self._reply_writer = reply_writer
        self._is_durable = header.acknowledgement == Acknowledgement.ACKNOWLEDGEMENT_DURABLE

    async def open(self, push: IncomingPush) -> None:
        """Look up the header's shards, and make shards of tables that never existed."""
        job, items = self._header.token.job, self._header.shards
        rows = [(item.shard_id, item.epoch) for item in items if item.HasField("rows")]
        if rows:
            await self._maker.make_missing(job, rows)
        wanted = [(item.shard_id, item.epoch) for item in items]
        shards = await self._catalog.look_up(job, wanted)
        for item, replica in zip(items, shards, strict=True):
            push.expect(item.shard_id, partial(self._part, item, replica))

    def _part(self, item: PushItem, replica: ShardReplica | ShoalError) -> PushPart:
        if isinstance(replica, ShoalError):
            raise replica
        replica.check_capacity()
        if self._is_durable:
            replica.check_durable()
        part = self._row_part if item.HasField("rows") else self._dense_part
        next_address = self._catalog.whereabouts.next_address(replica.job, item.shard_id)
        return part(item, replica, next_address)

    def _dense_part(self, item: PushItem, replica: ShardReplica, next_address: str) -> PushPart:
        shard = dense_shard(replica)
        group, rates = shard.spec.group, self._header.lr
        if rates and group >= len(rates):
            raise InvalidSpec(
                "the push lacks the learning rate of a parameter group",
                seen=f"{len(rates)} learning rates",
                expected=f"one for group {group} too",
            )
        is_encoded = item.HasField("codec")
        assembler = ChunkAssembler(
            shard.spec,
            item.absent_blocks,
            with_base=shard.body.needs_base and not is_encoded,
            encoded_bytes=item.codec.num_bytes if is_encoded else None,
        )
        blocks = assembler.blocks
        decoder = shard.body.decoder(item.codec, blocks) if is_encoded else None
        lr = rates[group] if rates else None
        return PushPart(
            item=item,
            replica=replica,
            assembler=assembler,
            target=DenseTarget(shard=shard, blocks=blocks, lr=lr, decoder=decoder),
            cost_bytes=shard.body.num_bytes + (DECODING_COST if is_encoded else 0),
            next_address=next_address,
        )

    def _row_part(self, item: PushItem, replica: ShardReplica, next_address: str) -> PushPart:
        shard, num_rows = table_shard(replica), item.rows.num_rows
        body, ids_bytes = shard.body, 2 * num_rows * ID_BYTES
        codec = item.codec if item.HasField("codec") else None
        row_bytes = gradient_row_bytes(body.table, codec)
        decoded_bytes = ids_bytes + num_rows * body.row_bytes
        if decoded_bytes > MAX_ROWS_BYTES:
            raise InvalidSpec(
                f"a push names too many rows of shard {item.shard_id}",
                seen=f"{num_rows} rows",
                expected=f"at most {MAX_ROWS_BYTES} bytes of them",
                fix="Push smaller batches.",
            )
        return PushPart(
            item=item,
            replica=replica,
            assembler=PieceAssembler(item.shard_id, [(0, ids_bytes + num_rows * row_bytes)]),
            target=shard,
            cost_bytes=ROWS_COST * decoded_bytes + (DECODING_COST if codec is not None else 0),
            next_address=next_address,
        )

    def apply(self, part: PushPart) -> "asyncio.Future[ShardAnswer | ShoalError]":
        target, cost_bytes = part.target, part.cost_bytes
        if not isinstance(target, DenseTarget):
            self._memory.refresh()
            cost_bytes += target.body.regrown_bytes(part.item.rows.num_rows)
            push = partial(self._push_rows, part, target, target.body.now_s())
        elif self._header.return_values:
            writer = self._reply_writer.writer(part.shard_id, target.shard.body.num_bytes)
            push = partial(self._push_gradient, part, target, writer)
        else:
            push = partial(self._push_gradient, part, target, None)
        work = partial(guarded, push, self._header.token.job, part.shard_id)
        applied = asyncio.ensure_future(part.replica.work(self._run, cost_bytes, work))
        if not applied.done():
            return asyncio.ensure_future(self._once_safe(part.replica, applied))
        answer, level = applied.result(), self._header.acknowledgement
        if isinstance(answer, ShoalError):
            return applied
        return part.replica.leading.when_acknowledged(answer.newest_version, level, answer)

    async def _once_safe(
        self, replica: ShardReplica, applied: Awaitable[ShardAnswer | ShoalError]
    ) -> ShardAnswer | ShoalError:
        answer = await applied
        if isinstance(answer, ShoalError):
            return answer
        try:
            await replica.leading.wait_acknowledged(
                answer.newest_version, self._header.acknowledgement
            )
        except ShoalError as error:
            return error
        return answer

    def _push_gradient(
        self, part: PushPart, target: DenseTarget, writer: CopyOut | None
    ) -> ShardAnswer:
        item, body = part.item, target.shard.body
        gradient, is_borrowed = part.assembler.join(), part.assembler.is_borrowed
        batch: memoryview | None = None
        if target.decoder is not None:
            if is_borrowed:
                # Backups and the journal must get the bytes that are decoded here.
                gradient, is_borrowed = bytes(gradient), False
            # Decode before the shard's lock is taken: other pushes can be applied meanwhile.
            batch = body.decode(target.decoder, gradient)
        push = DensePush(
            session=self._session,
            sequence=self._header.sequence,
            epoch=item.epoch,
            base_version=item.base_version,
            base_epoch=item.base_epoch,
            lr=target.lr,
            blocks=target.blocks,
            gradient=gradient,
            codec=None if target.decoder is None else item.codec,
            batch=batch,
            is_borrowed=is_borrowed,
            scope=self._scope,
        )
        applied = target.shard.push(
            push,
            self._is_live,
            on_applied=part.replica.leading.report_applied,
            read=None if writer is None else partial(body.values, writer=writer),
        )
        return ShardAnswer(outcome=_outcome(part, applied), values=applied.values)

    def _push_rows(self, part: PushPart, shard: TableShard, at_unix_s: float) -> ShardAnswer:
        item, flat = part.item, memoryview(part.assembler.join())
        births_at = item.rows.num_rows * ID_BYTES
        gradient_at = 2 * births_at
        push = TablePush(
            session=self._session,
            sequence=self._header.sequence,
            epoch=item.epoch,
            base_version=item.base_version,
            base_epoch=item.base_epoch,
            lr=item.rows.lr if item.rows.HasField("lr") else None,
            step=item.rows.step,
            codec=item.codec if item.HasField("codec") else None,
            row_ids=bytes(flat[:births_at]),
            births=bytes(flat[births_at:gradient_at]),
            gradient=flat[gradient_at:],
            is_borrowed=part.assembler.is_borrowed,
            at_unix_s=at_unix_s,
            scope=self._scope,
        )
        what = f"more rows in shard {part.shard_id} of job {part.replica.job}"
        with self._memory.growth(what) as take_memory:
            applied: ShardPushResult[None] = shard.push(
                push,
                self._is_live,
                take_memory,
                on_applied=part.replica.leading.report_applied,
            )
        outcome = _outcome(part, applied)
        outcome.fates, outcome.step = applied.fates, shard.body.content.table_step
        return ShardAnswer(outcome=outcome)

    def refusal(self, shard_id: int, error: ShoalError) -> ShardAnswer:
        """Return the answer for a refused shard, with its new route if it moved meanwhile."""
        epoch = next(item.epoch for item in self._header.shards if item.shard_id == shard_id)
        error = self._catalog.with_route(error, self._header.token.job, shard_id, epoch)
        return ShardAnswer(outcome=PushOutcome(shard_id=shard_id, error=to_detail(error)))


def _outcome(part: PushPart, applied: ShardPushResult[T]) -> PushOutcome:
    return PushOutcome(
        shard_id=part.shard_id,
        version=applied.version,
        staleness=applied.staleness,
        duplicate=applied.is_duplicate,
        next_address=part.next_address,
    )


def dense_shard(replica: ShardReplica) -> DenseShard:
    """Return a shard of parameters. Raises MalformedMessage for a shard of a table."""
    if not is_dense(replica.state):
        raise MalformedMessage(
            f"shard {replica.shard_id} of job {replica.job} is part of a table",
            seen="a call about parameters",
            expected="a lookup or a push of rows",
        )
    return replica.state


def table_shard(replica: ShardReplica) -> TableShard:
    """Return a shard of a table. Raises MalformedMessage for other shards."""
    if not is_table(replica.state):
        raise MalformedMessage(
            f"shard {replica.shard_id} of job {replica.job} is not part of a table",
            seen="a call about rows",
            expected="a pull, or a push without rows",
        )
    return replica.state


def messages(answers: Sequence[ShardAnswer]) -> Sequence[Message | bytes]:
    """Return the messages and frames with these answers; a message ends at the first outcome with
    values."""
    replies: list[Message | bytes] = []
    outcomes: list[PushOutcome] = []
    for answer in answers:
        outcomes.append(answer.outcome)
        if (values := answer.values) is not None:
            version = ShardVersion(
                shard_id=answer.outcome.shard_id, version=values.version, num_bytes=values.num_bytes
            )
            replies += (PushReply(outcomes=outcomes, version=version), *values.messages)
            outcomes = []
    if outcomes:
        replies.append(PushReply(outcomes=outcomes))
    return replies


def _check(header: PushHeader) -> None:
    if header.sequence < 1:
        raise MalformedMessage(
            "a push needs its sequence number",
            seen=str(header.sequence),
            expected="1 or more, one higher for each push of the incarnation",
        )
    of_rows = [item for item in header.shards if item.HasField("rows")]
    for group, lr in enumerate(header.lr):
        _check_rate("parameter group", group, lr)
    for item in of_rows:
        if item.rows.HasField("lr"):
            _check_rate("shard", item.shard_id, item.rows.lr)
    shard_ids = [item.shard_id for item in header.shards]
    if len(set(shard_ids)) != len(shard_ids):
        raise MalformedMessage(
            "a push names a shard twice",
            seen=str(sorted(shard_ids))[:200],
            expected="each shard once",
        )
    if of_rows and not set(shard_ids) <= set(header.all_shard_ids):
        raise MalformedMessage(
            "a push of rows names a shard that is not in the list of all its shards",
            seen=str(sorted(shard_ids))[:200],
            expected=f"some of {sorted(header.all_shard_ids)}"[:200],
        )
    if header.counts_rows and len(of_rows) < len(shard_ids):
        raise MalformedMessage(
            "a push of parameters has a number that counts pushes of rows",
            seen="counts_rows",
            expected="the number of a push of parameters",
        )


def _check_rate(what: str, number: int, lr: float) -> None:
    if not 0.0 <= lr <= MAX_SETTING:
        raise InvalidSpec(
            f"the learning rate of {what} {number} is out of range",
            seen=f"{lr:g}",
            expected=f"0 to {MAX_SETTING:g}",
        )
