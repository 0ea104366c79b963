"""The Parameters service: creates shards, applies pushes to them, and sends values and rows."""

import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from google.protobuf.message import Message

from shoal_proto import routes
from shoal_proto.errors import MalformedMessage, ShoalError
from shoal_proto.pieces import AnyPiece
from shoal_proto.tls.bulk_offers import BulkOffers, Purpose
from shoal_proto.traces import tracing
from shoal_proto.v1.parameters_pb2 import (
    CreateHeader,
    CreateReply,
    CreateRequest,
    DescribeReply,
    DescribeRequest,
    DropReply,
    DropRequest,
    FullPeer,
    LookupReply,
    LookupRequest,
    OpenBulkReply,
    OpenBulkRequest,
    PullRequest,
    PushHeader,
    PushOutcome,
    PushReply,
    PushRequest,
    ShardData,
    ShardVersion,
)
from shoal_proto.v1.parameters_pb2_grpc import ParametersServicer as Base
from shoal_proto.v1.shards_pb2 import Shard
from shoal_server.parameters.cluster.fence import Fence
from shoal_server.parameters.codecs.codec import CODECS
from shoal_server.parameters.optimizers.checks import check_spec
from shoal_server.parameters.replication.shard_replicas import ShardReplicas
from shoal_server.parameters.service.description import PushTally, add_shard
from shoal_server.parameters.service.incoming_call import not_expected
from shoal_server.parameters.service.lookup import IncomingLookup, LookupKind
from shoal_server.parameters.service.lookup import messages as found_messages
from shoal_server.parameters.service.push import (
    IncomingPush,
    PushKind,
    dense_shard,
    messages,
)
from shoal_server.parameters.service.table_maker import TableMaker
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.chunk_assembler import (
    Budget,
    ChunkAssembler,
    Reservation,
    shard_bytes,
)
from shoal_server.parameters.shard.dense import (
    DenseShard,
    DenseValues,
    bytes_to_make,
    new_dense_shard,
)
from shoal_server.parameters.shard.memory import Memory, MemoryClaim
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica
from shoal_server.parameters.shard.reply_writer import (
    LOOKUP_REPLIES,
    PUSH_REPLIES,
    SHARD_DATA,
    ReplyWriter,
)
from shoal_server.parameters.shard.step_scope import TABLES
from shoal_server.parameters.shard.workers import Runner
from shoal_server.parameters.snapshot.barriers import SnapshotBarriers
from shoal_server.serving.access.checks import known_caller
from shoal_server.serving.durations import Durations
from shoal_server.serving.loop_lag import LoopLag
from shoal_server.serving.rpc import Context

M = TypeVar("M", bound=Message)

MAX_WAIT_S = 60.0
FORMING_S = 10.0
"""Longest wait of `Create` for the first backup."""


class ParametersServicer(Base):
    def __init__(
        self,
        *,
        catalog: Catalog,
        maker: TableMaker,
        replicas: ShardReplicas,
        fence: Fence,
        barriers: SnapshotBarriers,
        run: Runner,
        budget: Budget,
        memory: Memory,
        offers: BulkOffers,
        loop_lag: LoopLag,
    ) -> None:
        self._catalog = catalog
        self._maker = maker
        self._replicas = replicas
        self._fence = fence
        self._barriers = barriers
        self._run = run
        self._budget = budget
        self._memory = memory
        self._offers = offers
        self.loop_lag = loop_lag
        self._tally = PushTally()
        self.push_durations = Durations(("outcome",))
        """Durations from the header to the last answer."""

    async def Create(self, requests: AsyncIterator[CreateRequest], context: Context) -> CreateReply:
        first = await anext(requests, CreateRequest())
        if not first.HasField("header"):
            raise no_header("CreateHeader")
        header = first.header
        await self._fence.check(header.token)
        check_spec(header.optimizer, 1 + max((s.group for s in header.shards), default=0))
        # A watch may lag, and only the recorded primary may create a shard.
        await self._replicas.refresh(header.token.job)
        await self._catalog.check_creatable(header.token.job, header.shards, header.optimizer)
        with self._claim(header) as claim, Reservation(self._budget) as reservation:
            created = await self._receive(header, requests, reservation, claim)
        return CreateReply(created=created)

    def _claim(self, header: CreateHeader) -> MemoryClaim:
        job = header.token.job
        new = [s for s in header.shards if self._catalog.find(job, s.shard_id) is None]
        num_bytes = sum(bytes_to_make(shard, header.optimizer) for shard in new)
        return self._memory.reserve(num_bytes, f"{len(new)} new shards of job {job}")

    async def _receive(
        self,
        header: CreateHeader,
        requests: AsyncIterator[CreateRequest],
        reservation: Reservation,
        claim: MemoryClaim,
    ) -> list[int]:
        specs = {shard.shard_id: shard for shard in header.shards}
        inflows = {shard.shard_id: ChunkAssembler(shard) for shard in header.shards}
        created = []
        async for request in requests:
            shard_id = request.piece.shard_id
            if shard_id not in inflows:
                raise not_expected(shard_id, inflows)
            spec, assembler = specs[shard_id], inflows[shard_id]
            reservation.reserve(shard_id, shard_bytes(spec))
            assembler.take(request.piece)
            if assembler.is_complete:
                make = partial(_new_shard, spec, header, assembler)
                shard = await self._run(shard_bytes(spec), make)
                job = header.token.job
                replica = ShardReplica(job, shard, ReplicaRole.PRIMARY, spec.epoch)
                # The shard may have moved while its values were being received.
                self._catalog.check_new(job, spec, self._replicas.assignment(job, shard_id))
                if self._catalog.add(replica):
                    self._replicas.created(replica)
                    created.append(shard_id)
                    claim.move_to_shard(shard.memory_bytes)
                reservation.release(shard_id)
                del inflows[shard_id]
        await self._catalog.notify()
        for assembler in inflows.values():
            raise assembler.truncated()
        await self._catalog.wait_for(header.token.job, created, FORMING_S)
        return created

    async def Pull(self, request: PullRequest, context: Context) -> AsyncIterator[ShardData]:
        async for reply in _replies(ShardData, self.pull(request, SHARD_DATA)):
            yield reply

    async def pull(
        self, request: PullRequest, reply_writer: ReplyWriter
    ) -> AsyncGenerator[Sequence[Message | bytes], None]:
        """Yield the messages with each shard's values, which are of one version. Messages yielded
        together are sent together. Raises the error for the first shard that this server does not
        serve; a WrongEpoch also has the routes of the other shards that are led elsewhere."""
        await self._fence.check(request.token)
        job = request.token.job
        wait_s = min(max(request.wait_s, 0.0), MAX_WAIT_S)
        await self._catalog.wait_for(job, [item.shard_id for item in request.shards], wait_s)
        shards = await self._catalog.look_up(job, [(i.shard_id, i.epoch) for i in request.shards])
        errors = [error for error in shards if isinstance(error, ShoalError)]
        for error in errors:
            raise routes.gather(error, errors)
        reads = [
            (replica, item.known_version)
            for item, replica in zip(request.shards, shards, strict=True)
            if isinstance(replica, ShardReplica)
        ]
        async for replica, values in self._read_ahead(reads, reply_writer):
            # Until a backup has the version, it may be lost: no caller may see it before.
            await replica.wait_safe(values.version)
            version = ShardVersion(
                shard_id=replica.shard_id, version=values.version, num_bytes=values.num_bytes
            )
            yield [ShardData(version=version), *values.messages]

    async def _read_ahead(
        self, reads: Iterable[tuple[ShardReplica, int]], reply_writer: ReplyWriter
    ) -> AsyncIterator[tuple[ShardReplica, DenseValues]]:
        """Read each shard while the previous one is sent."""
        pending: deque[tuple[ShardReplica, Awaitable[DenseValues]]] = deque()
        for replica, known_version in reads:
            shard = dense_shard(replica)
            await reply_writer.await_slot(replica.shard_id)
            num_bytes = shard.body.num_bytes
            writer = reply_writer.writer(replica.shard_id, num_bytes)
            values = partial(shard.body.values, known_version=known_version, writer=writer)
            read = replica.work(self._run, num_bytes, partial(shard.read, values))
            pending.append((replica, read))
            if len(pending) == 2:
                earlier, result = pending.popleft()
                yield earlier, await result
        for replica, result in pending:
            yield replica, await result

    async def Lookup(
        self, requests: AsyncIterator[LookupRequest], context: Context
    ) -> AsyncIterator[LookupReply]:
        first = await anext(requests, LookupRequest())
        pieces = (request.piece async for request in requests)
        replies = self.look_up(first, pieces, LOOKUP_REPLIES)
        async for reply in _replies(LookupReply, replies):
            yield reply

    async def look_up(
        self, request: LookupRequest, pieces: AsyncIterator[AnyPiece], reply_writer: ReplyWriter
    ) -> AsyncGenerator[Sequence[Message | bytes], None]:
        """Answer a lookup of rows while it is being received."""
        if not request.HasField("header"):
            raise no_header("LookupHeader")
        header = request.header
        await self._fence.check(header.token)
        kind = LookupKind(
            header,
            catalog=self._catalog,
            maker=self._maker,
            run=self._run,
            reply_writer=reply_writer,
        )
        with Reservation(self._budget) as reservation:
            lookup = IncomingLookup(kind, reservation)
            await kind.open(lookup)
            async with aclosing(lookup.answers(pieces)) as batches:
                async for answers in batches:
                    yield found_messages(answers)

    async def Push(
        self, requests: AsyncIterator[PushRequest], context: Context
    ) -> AsyncIterator[PushReply]:
        first = await anext(requests, PushRequest())
        pieces = (request.piece async for request in requests)
        async for reply in _replies(PushReply, self.push(first, pieces, PUSH_REPLIES)):
            yield reply

    async def push(
        self, request: PushRequest, pieces: AsyncIterator[AnyPiece], reply_writer: ReplyWriter
    ) -> AsyncGenerator[Sequence[Message | bytes], None]:
        """Apply a push while it is being received, once the job's snapshot barrier admits it. Yield
        each shard's outcome, with its values if requested."""
        if not request.HasField("header"):
            raise no_header("PushHeader")
        header, began_s = request.header, time.perf_counter()
        with tracing.OngoingSpan("Parameters/Push", header.token) as whole:
            with whole.within():
                session = await self._fence.check(header.token)
            kind = PushKind(
                header,
                session,
                self._fence.is_live,
                catalog=self._catalog,
                maker=self._maker,
                run=self._run,
                memory=self._memory,
                reply_writer=reply_writer,
            )
            async with self._barriers.admit_part(
                header.token.job,
                TABLES + session if header.counts_rows else session,
                header.sequence,
                frozenset(header.all_shard_ids) or None,
            ) as passage:
                outcomes: list[PushOutcome] = []
                with Reservation(self._budget) as reservation:
                    push = IncomingPush(kind, reservation)
                    await kind.open(push)
                    async with aclosing(push.answers(pieces)) as batches:
                        async for answers in batches:
                            if push.is_last:
                                reply_writer.end_follows()
                            outcomes += passage.record_answers(a.outcome for a in answers)
                            yield messages(answers)
                self._count(header, outcomes, time.perf_counter() - began_s)

    def _count(self, header: PushHeader, outcomes: Sequence[PushOutcome], took_s: float) -> None:
        if any(item.HasField("rows") for item in header.shards):
            return
        self._tally.count(header.token.job, outcomes)
        refused = any(each.HasField("error") for each in outcomes)
        self.push_durations.observe(took_s, "refused" if refused else "applied")

    async def Describe(self, request: DescribeRequest, context: Context) -> DescribeReply:
        self._memory.refresh()
        reply = DescribeReply(
            server_id=self._replicas.me.server_id,
            unfinished_bytes=self._budget.held_bytes,
            held_bytes=self._memory.held_bytes,
            memory_limit_bytes=self._memory.limit_bytes,
            codecs=CODECS,
            loop_lag_p99_s=self.loop_lag.p99_s,
            loop_lag_max_s=self.loop_lag.max_s,
            compared_pieces=self._replicas.received.num_compared,
            differing_pieces=self._replicas.received.num_different,
            full_peers=[
                FullPeer(server_id=holder.server_id, reason=reason)
                for holder, reason in self._replicas.full_peers.items()
            ],
        )
        for replica in self._catalog.shards(request.job):
            at = replica.job, replica.shard_id
            add_shard(reply, replica, self._replicas.assignment(*at), self._replicas.versions(*at))
        self._tally.fill(reply, request.job)
        return reply

    async def OpenBulk(self, request: OpenBulkRequest, context: Context) -> OpenBulkReply:
        await self._fence.check(request.token)
        return self._offers.make(Purpose.CALLS, known_caller(context))

    async def Drop(self, request: DropRequest, context: Context) -> DropReply:
        await self._fence.check(request.token)
        await self._replicas.empty_job(request.token.job)
        return DropReply()


async def _replies(
    kind: type[M], batches: AsyncGenerator[Sequence[Message | bytes], None]
) -> AsyncIterator[M]:
    async with aclosing(batches):
        async for batch in batches:
            for reply in batch:
                assert isinstance(reply, kind)
                yield reply


def _new_shard(spec: Shard, header: CreateHeader, assembler: ChunkAssembler) -> DenseShard:
    first = Shard()
    first.CopyFrom(spec)
    first.first_epoch = spec.epoch
    return new_dense_shard(first, header.optimizer, bytearray(assembler.join()))


def no_header(expected: str) -> MalformedMessage:
    """Return the error for a stream that does not begin with its header."""
    return MalformedMessage(
        "the stream does not begin with its header",
        seen="another message, or none",
        expected=f"a {expected}",
    )
