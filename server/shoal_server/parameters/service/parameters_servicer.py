"""The Parameters service: messages in, shards changed, messages out.

Small shards are worked on where the call runs; big ones in a pool of threads, so that the event
loop stays free for other calls.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable
from contextlib import aclosing
from functools import partial

from shoal_proto import routes
from shoal_proto.errors import ShoalError
from shoal_proto.pieces import OnlyPiece
from shoal_proto.v1.parameters_pb2 import (
    CreateHeader,
    CreateReply,
    CreateRequest,
    DescribeReply,
    DescribeRequest,
    DropReply,
    DropRequest,
    FullPeer,
    OpenBulkReply,
    OpenBulkRequest,
    PullRequest,
    PushReply,
    PushRequest,
    ShardData,
    ShardVersion,
)
from shoal_proto.v1.shards_pb2 import Shard
from shoal_server.parameters.bulk.offers import Offers, Purpose
from shoal_server.parameters.cluster.fence import Fence
from shoal_server.parameters.optimizers import check_spec
from shoal_server.parameters.replication.shard_replicas import Custody
from shoal_server.parameters.service.description import Tally, add_shard
from shoal_server.parameters.service.headers import no_header
from shoal_server.parameters.service.incoming_push import IncomingPush, dense, not_expected
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.chunk_assembler import Budget, Inflow, Reservation, shard_bytes
from shoal_server.parameters.shard.dense import LiveShard, Values
from shoal_server.parameters.shard.memory import Claim, Memory
from shoal_server.parameters.shard.replica import Held, Role
from shoal_server.parameters.shard.reply_writer import PUSH_REPLIES, SHARD_DATA, Outlet
from shoal_server.parameters.shard.workers import Runner
from shoal_server.parameters.snapshot.barriers import Cuts
from shoal_server.serving.rpc import Context

MAX_WAIT_S = 60.0
FORMING_S = 10.0
"""How long a call that creates waits for the first backup to have the values."""


class Servicer:
    def __init__(
        self,
        *,
        catalog: Catalog,
        custody: Custody,
        fence: Fence,
        cuts: Cuts,
        run: Runner,
        budget: Budget,
        memory: Memory,
        offers: Offers,
    ) -> None:
        self._catalog = catalog
        self._custody = custody
        self._fence = fence
        self._cuts = cuts
        self._run = run
        self._budget = budget
        self._memory = memory
        self._offers = offers
        self._tally = Tally()

    async def Create(
        self, requests: AsyncIterator[CreateRequest | OnlyPiece], context: Context
    ) -> CreateReply:
        first = await anext(requests, CreateRequest())
        if isinstance(first, OnlyPiece) or not first.HasField("header"):
            raise no_header("CreateHeader")
        header = first.header
        await self._fence.check(header.token)
        check_spec(header.optimizer, 1 + max((s.group for s in header.shards), default=0))
        # What is created must be led as the record says from the start: a watch may be behind.
        await self._custody.refresh(header.token.job)
        await self._catalog.check_creatable(header.token.job, header.shards, header.optimizer)
        with self._claim(header) as claim, Reservation(self._budget) as reservation:
            created = await self._receive(header, requests, reservation, claim)
        return CreateReply(created=created)

    def _claim(self, header: CreateHeader) -> Claim:
        """Room for those of the shards that are not here yet. Raises Overloaded."""
        job = header.token.job
        new = [s for s in header.shards if self._catalog.find(job, s.shard_id) is None]
        num_bytes = sum(LiveShard.bytes_to_make(shard, header.optimizer) for shard in new)
        return self._memory.reserve(num_bytes, f"{len(new)} new shards of job {job}")

    async def _receive(
        self,
        header: CreateHeader,
        requests: AsyncIterator[CreateRequest | OnlyPiece],
        reservation: Reservation,
        claim: Claim,
    ) -> list[int]:
        specs = {shard.shard_id: shard for shard in header.shards}
        inflows = {shard.shard_id: Inflow(shard) for shard in header.shards}
        created = []
        async for request in requests:
            shard_id = request.piece.shard_id
            if shard_id not in inflows:
                raise not_expected(shard_id, inflows)
            spec, inflow = specs[shard_id], inflows[shard_id]
            reservation.reserve(shard_id, shard_bytes(spec))
            inflow.take(request.piece)
            if inflow.is_complete:
                make = partial(_new_shard, spec, header, inflow)
                shard = await self._run(shard_bytes(spec), make)
                job = header.token.job
                held = Held(job, shard, Role.PRIMARY, spec.epoch)
                # Once more: the shard may have gone elsewhere while its values came in.
                self._catalog.check_new(job, spec, self._custody.holding(job, shard_id))
                if self._catalog.add(held):
                    self._custody.created(held)
                    created.append(shard_id)
                    claim.became(shard.memory_bytes)
                reservation.release(shard_id)
                del inflows[shard_id]
        await self._catalog.notify()
        for inflow in inflows.values():
            raise inflow.truncated()
        await self._catalog.wait_for(header.token.job, created, FORMING_S)
        return created

    def Pull(self, request: PullRequest, context: Context) -> AsyncIterator[ShardData | bytes]:
        return self.pull(request, SHARD_DATA)

    async def pull(
        self, request: PullRequest, outlet: Outlet
    ) -> AsyncGenerator[ShardData | bytes, None]:
        """The shards, as of one version each, by that way back."""
        await self._fence.check(request.token)
        job = request.token.job
        wait_s = min(max(request.wait_s, 0.0), MAX_WAIT_S)
        await self._catalog.wait_for(job, [item.shard_id for item in request.shards], wait_s)
        found = await self._catalog.look_up(job, [(i.shard_id, i.epoch) for i in request.shards])
        errors = [error for error in found if isinstance(error, ShoalError)]
        for error in errors:
            raise routes.gather(error, errors)
        reads = [
            (held, item.known_version)
            for item, held in zip(request.shards, found, strict=True)
            if isinstance(held, Held)
        ]
        async for held, values in self._read_ahead(reads, outlet):
            # What a backup has not got yet may still vanish: nobody is to have seen it.
            await held.receipts.wait_safe(values.version)
            yield ShardData(
                version=ShardVersion(
                    shard_id=held.shard_id,
                    version=values.version,
                    num_bytes=values.num_bytes,
                )
            )
            for message in values.messages:
                yield message

    async def _read_ahead(
        self, reads: Iterable[tuple[Held, int]], outlet: Outlet
    ) -> AsyncIterator[tuple[Held, Values]]:
        """Each shard's values in order; one shard is read while the one before it goes out."""
        pending: deque[tuple[Held, Awaitable[Values]]] = deque()
        for held, known_version in reads:
            shard = dense(held)
            await outlet.await_room(held.shard_id)
            writer = outlet.writer(held.shard_id, shard.num_bytes)
            read = self._run(shard.num_bytes, partial(shard.read, known_version, writer))
            pending.append((held, read))
            if len(pending) == 2:
                earlier, values = pending.popleft()
                yield earlier, await values
        for held, values in pending:
            yield held, await values

    def Push(
        self, requests: AsyncIterator[PushRequest | OnlyPiece], context: Context
    ) -> AsyncIterator[PushReply | bytes]:
        return self.push(requests, PUSH_REPLIES)

    async def push(
        self, requests: AsyncIterator[PushRequest | OnlyPiece], outlet: Outlet
    ) -> AsyncGenerator[PushReply | bytes, None]:
        """Apply a push as it comes in; the outcome of each shard, and its values by that way
        back."""
        first = await anext(requests, PushRequest())
        if isinstance(first, OnlyPiece) or not first.HasField("header"):
            raise no_header("PushHeader")
        session = await self._fence.check(first.header.token)
        push = IncomingPush(first.header, session, self._fence.is_live, self._run, outlet)
        async with (
            self._cuts.passing(
                first.header.token.job,
                session,
                first.header.sequence,
                frozenset(first.header.all_shard_ids) or None,
            ) as passage,
            aclosing(self._pushed(push, requests)) as replies,
        ):
            outcomes = []
            async for reply in replies:
                if not isinstance(reply, bytes) and reply.HasField("outcome"):
                    outcomes.append(reply.outcome)
                    if reply.outcome.HasField("error"):
                        passage.answered(reply.outcome.shard_id, reply.outcome.error)
                yield reply
            self._tally.count(first.header.token.job, outcomes)

    async def _pushed(
        self, push: IncomingPush, requests: AsyncIterator[PushRequest | OnlyPiece]
    ) -> AsyncGenerator[PushReply | bytes, None]:
        with Reservation(self._budget) as reservation:
            await push.open(self._catalog)
            # Replies to finished shards leave while later ones still come in.
            taking = asyncio.create_task(_take_all(push, requests, reservation), name="push")
            try:
                async for reply in push.answers(reservation):
                    yield reply
                await taking
            finally:
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)

    async def Describe(self, request: DescribeRequest, context: Context) -> DescribeReply:
        self._memory.refresh()
        reply = DescribeReply(
            server_id=self._custody.me.server_id,
            unfinished_bytes=self._budget.held_bytes,
            held_bytes=self._memory.held_bytes,
            memory_limit_bytes=self._memory.limit_bytes,
            full_peers=[
                FullPeer(server_id=holder.server_id, reason=reason)
                for holder, reason in self._custody.full_peers.items()
            ],
        )
        for held in self._catalog.shards(request.job):
            add_shard(reply, held, self._custody.holding(held.job, held.shard_id))
        self._tally.fill(reply, request.job)
        return reply

    async def OpenBulk(self, request: OpenBulkRequest, context: Context) -> OpenBulkReply:
        await self._fence.check(request.token)
        return self._offers.make(Purpose.CALLS)

    async def Drop(self, request: DropRequest, context: Context) -> DropReply:
        await self._fence.check(request.token)
        return DropReply(dropped=await self._custody.empty_job(request.token.job))


async def _take_all(
    push: IncomingPush, requests: AsyncIterator[PushRequest | OnlyPiece], reservation: Reservation
) -> None:
    try:
        async for request in requests:
            push.take(request.piece, reservation)
            await push.await_room()
        push.end()
    finally:
        push.close()


def _new_shard(spec: Shard, header: CreateHeader, inflow: Inflow) -> LiveShard:
    return LiveShard(spec, header.optimizer, bytearray(inflow.join()))
