"""Pushes to parameters: each shard's gradient arrives in pieces, and is answered with its outcome
and, on request, the shard's newest values."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from google.protobuf.message import Message

from shoal_proto.errors import InvalidSpec, MalformedMessage, ShoalError
from shoal_proto.pieces import AnyPiece
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
from shoal_server.parameters.service.incoming_push import IncomingPush, check_sequence, guarded
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.chunk_assembler import ChunkAssembler
from shoal_server.parameters.shard.dense import DensePush, DenseShard, DenseValues, is_dense
from shoal_server.parameters.shard.replica import ShardReplica
from shoal_server.parameters.shard.reply_writer import CopyOut, ReplyWriter
from shoal_server.parameters.shard.step_scope import Scope
from shoal_server.parameters.shard.workers import INLINE_BYTES, Runner


@dataclass(frozen=True, kw_only=True)
class DensePushPart:
    item: PushItem
    replica: ShardReplica
    shard: DenseShard
    assembler: ChunkAssembler
    decoder: GradientDecoder | None = None
    """Decodes the gradient; None: it is not compressed."""
    next_address: str = ""
    """Address of the successor while the shard is being handed over; else empty."""

    @property
    def shard_id(self) -> int:
        return self.item.shard_id

    @property
    def num_bytes(self) -> int:
        return self.assembler.expected_bytes

    @property
    def is_complete(self) -> bool:
        return self.assembler.is_complete

    def truncated(self) -> ShoalError:
        return self.assembler.truncated()


@dataclass(frozen=True, kw_only=True)
class ShardAnswer:
    outcome: PushOutcome
    values: DenseValues | None = None

    @property
    def newest_version(self) -> int:
        """The newest version in the answer."""
        return max(self.outcome.version, self.values.version if self.values else 0)


IncomingDensePush = IncomingPush[DensePushPart, AnyPiece, ShardAnswer]


class DensePushKind:
    applies_at_once = False

    def __init__(
        self,
        header: PushHeader,
        session: str,
        is_live: Callable[[str], bool],
        *,
        catalog: Catalog,
        run: Runner,
        reply_writer: ReplyWriter,
    ) -> None:
        _check(header)
        self._scope = Scope.of(header.all_shard_ids)
        self._header = header
        self._session = session
        self._is_live = is_live
        self._catalog = catalog
        self._run = run
        self._reply_writer = reply_writer
        self._is_durable = header.acknowledgement == Acknowledgement.ACKNOWLEDGEMENT_DURABLE

    async def open(self, push: IncomingDensePush) -> None:
        """Look up every shard that the header names."""
        items = self._header.shards
        wanted = [(item.shard_id, item.epoch) for item in items]
        shards = await self._catalog.look_up(self._header.token.job, wanted)
        for item, replica in zip(items, shards, strict=True):
            push.expect(item.shard_id, partial(self._part, item, replica))

    def _part(self, item: PushItem, replica: ShardReplica | ShoalError) -> DensePushPart:
        if isinstance(replica, ShoalError):
            raise replica
        replica.check_capacity()
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
        next_address = self._catalog.whereabouts.next_address(replica.job, item.shard_id)
        if item.HasField("codec"):
            return replace(_compressed_part(item, replica, shard), next_address=next_address)
        assembler = ChunkAssembler(shard.spec, item.absent_blocks, with_base=shard.body.needs_base)
        return DensePushPart(
            item=item,
            replica=replica,
            shard=shard,
            assembler=assembler,
            next_address=next_address,
        )

    def add(self, part: DensePushPart, piece: AnyPiece) -> None:
        part.assembler.take(piece)

    def apply(self, part: DensePushPart) -> Awaitable[ShardAnswer | ShoalError]:
        writer, num_bytes = None, part.shard.body.num_bytes
        if self._header.return_values:
            writer = self._reply_writer.writer(part.shard_id, num_bytes)
        push = partial(self._push, part, writer)
        work = partial(guarded, push, self._header.token.job, part.shard_id)
        if part.decoder is not None:
            # Too much for the event loop: decoding takes longer than applying as many bytes.
            num_bytes += INLINE_BYTES
        applied = asyncio.ensure_future(part.replica.work(self._run, num_bytes, work))
        if not applied.done():
            return asyncio.ensure_future(self._once_safe(part.replica, applied))
        answer, level = applied.result(), self._header.acknowledgement
        if isinstance(answer, ShoalError):
            return applied
        return part.replica.leading.when_acknowledged(answer.newest_version, level, answer)

    async def _once_safe(
        self, replica: ShardReplica, applied: Awaitable[ShardAnswer | ShoalError]
    ) -> ShardAnswer | ShoalError:
        """Return the answer once its newest version is as safe as the push demands."""
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

    def _push(self, part: DensePushPart, writer: CopyOut | None) -> ShardAnswer:
        item, group = part.item, part.shard.spec.group
        gradient, body = part.assembler.join(), part.shard.body
        is_borrowed = part.assembler.is_borrowed
        batch: memoryview | None = None
        if part.decoder is not None:
            if is_borrowed:
                # Backups and the journal get the bytes that are decoded here, even if the sender
                # changes its memory meanwhile.
                gradient, is_borrowed = bytes(gradient), False
            # Decoded before the shard's lock is taken: other pushes can be applied meanwhile.
            batch = body.decode(part.decoder, gradient)
        push = DensePush(
            session=self._session,
            sequence=self._header.sequence,
            epoch=item.epoch,
            base_version=item.base_version,
            base_epoch=item.base_epoch,
            lr=self._header.lr[group] if self._header.lr else None,
            blocks=part.assembler.blocks,
            gradient=gradient,
            codec=None if part.decoder is None else item.codec,
            batch=batch,
            is_borrowed=is_borrowed,
            scope=self._scope,
        )
        read = None if writer is None else partial(body.values, writer=writer)
        on_applied = part.replica.leading.report_applied
        applied = part.shard.push(push, self._is_live, on_applied=on_applied, read=read)
        outcome = PushOutcome(
            shard_id=item.shard_id,
            version=applied.version,
            staleness=applied.staleness,
            duplicate=applied.is_duplicate,
            next_address=part.next_address,
        )
        return ShardAnswer(outcome=outcome, values=applied.values)

    def refusal(self, shard_id: int, error: ShoalError) -> ShardAnswer:
        """Return the answer for a refused shard, with its new route if the shard moved while its
        gradient was being received."""
        epoch = next(item.epoch for item in self._header.shards if item.shard_id == shard_id)
        error = self._catalog.with_route(error, self._header.token.job, shard_id, epoch)
        return ShardAnswer(outcome=PushOutcome(shard_id=shard_id, error=to_detail(error)))


def _compressed_part(item: PushItem, replica: ShardReplica, shard: DenseShard) -> DensePushPart:
    """Make the part for a compressed gradient. Raises what `DenseBody.decoder` raises, and
    MalformedMessage for absent blocks that do not exist."""
    num_bytes = item.codec.num_bytes
    assembler = ChunkAssembler(shard.spec, item.absent_blocks, encoded_bytes=num_bytes)
    decoder = shard.body.decoder(item.codec, assembler.blocks)
    return DensePushPart(
        item=item, replica=replica, shard=shard, assembler=assembler, decoder=decoder
    )


def dense(replica: ShardReplica) -> DenseShard:
    """Return the state of a shard of parameters. Raises MalformedMessage for a shard of a table."""
    if not is_dense(replica.state):
        raise MalformedMessage(
            f"shard {replica.shard_id} of job {replica.job} is part of a table",
            seen="a call of the Parameters service",
            expected="one of the Tables service",
        )
    return replica.state


def messages(answer: ShardAnswer) -> Iterator[Message | bytes]:
    """Yield the messages that answer one shard's part."""
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


def _check(header: PushHeader) -> None:
    check_sequence(header.sequence)
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
