"""The Parameters service: messages in, shards changed, messages out.

Small shards are worked on where the call runs; big ones in a pool of threads, so that the event
loop stays free for other calls.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from shoal_proto.errors import MalformedMessage, ShoalError
from shoal_proto.v1.parameters_pb2 import (
    CreateHeader,
    CreateReply,
    CreateRequest,
    DescribeReply,
    DescribeRequest,
    DropReply,
    DropRequest,
    PullRequest,
    PushReply,
    PushRequest,
    ShardData,
    ShardVersion,
)
from shoal_proto.v1.parameters_pb2_grpc import ParametersServicer
from shoal_proto.v1.shards_pb2 import Shard
from shoal_server.parameters.catalog import Catalog
from shoal_server.parameters.fence import Fence
from shoal_server.parameters.inflow import Budget, Inflow, Reservation, shard_bytes
from shoal_server.parameters.optimizers import check_spec
from shoal_server.parameters.pushes import IncomingPush, fill, not_expected
from shoal_server.parameters.shard import LiveShard, Values
from shoal_server.rpc import Context

T = TypeVar("T")

INLINE_BYTES = 256 * 1024
"""Up to it, a hop to another thread costs more than the work."""
MAX_WAIT_S = 60.0


class Servicer(ParametersServicer):
    def __init__(
        self, *, server_id: str, catalog: Catalog, fence: Fence, pool: Executor, budget: Budget
    ) -> None:
        self._server_id = server_id
        self._catalog = catalog
        self._fence = fence
        self._pool = pool
        self._budget = budget

    async def Create(self, requests: AsyncIterator[CreateRequest], context: Context) -> CreateReply:
        first = await anext(requests, CreateRequest())
        if not first.HasField("header"):
            raise _no_header("CreateHeader")
        header = first.header
        await self._fence.check(header.token)
        check_spec(header.optimizer, 1 + max((s.group for s in header.shards), default=0))
        await self._catalog.check_creatable(header.token.job, header.shards, header.optimizer)
        with Reservation(self._budget) as reservation:
            created = await self._receive(header, requests, reservation)
        return CreateReply(created=created)

    async def _receive(
        self,
        header: CreateHeader,
        requests: AsyncIterator[CreateRequest],
        reservation: Reservation,
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
                if await self._catalog.add(header.token.job, shard):
                    created.append(shard_id)
                reservation.release(shard_id)
                del inflows[shard_id]
        for inflow in inflows.values():
            raise inflow.truncated()
        return created

    async def Pull(self, request: PullRequest, context: Context) -> AsyncIterator[ShardData]:
        await self._fence.check(request.token)
        job = request.token.job
        wait_s = min(max(request.wait_s, 0.0), MAX_WAIT_S)
        await self._catalog.wait_for(job, [item.shard_id for item in request.shards], wait_s)
        found = await self._catalog.look_up(job, [(i.shard_id, i.epoch) for i in request.shards])
        reads = []
        for item, shard in zip(request.shards, found, strict=True):
            if isinstance(shard, ShoalError):
                raise shard
            reads.append((shard, item.known_version))
        async for shard, values in self._read_ahead(reads):
            yield ShardData(
                version=ShardVersion(
                    shard_id=shard.spec.shard_id,
                    version=values.version,
                    num_bytes=values.num_bytes,
                )
            )
            for part in values.pieces:
                data = ShardData()
                fill(data.piece, shard.spec.shard_id, part)
                yield data

    async def _read_ahead(
        self, reads: Iterable[tuple[LiveShard, int]]
    ) -> AsyncIterator[tuple[LiveShard, Values]]:
        """Each shard's values in order; one shard is read while the one before it goes out."""
        pending: deque[tuple[LiveShard, Awaitable[Values]]] = deque()
        for shard, known_version in reads:
            read = self._run(shard.num_bytes, partial(shard.read, known_version))
            pending.append((shard, read))
            if len(pending) == 2:
                earlier, values = pending.popleft()
                yield earlier, await values
        for shard, values in pending:
            yield shard, await values

    async def Push(
        self, requests: AsyncIterator[PushRequest], context: Context
    ) -> AsyncIterator[PushReply]:
        first = await anext(requests, PushRequest())
        if not first.HasField("header"):
            raise _no_header("PushHeader")
        session = await self._fence.check(first.header.token)
        push = IncomingPush(first.header, session, self._fence.is_live, self._run)
        with Reservation(self._budget) as reservation:
            await push.open(self._catalog)
            async for request in requests:
                push.take(request.piece, reservation)
                # Replies to finished shards leave while later ones still come in.
                while push.is_answer_due:
                    for reply in await push.next_answer(reservation):
                        yield reply
            push.end()
            while push.has_pending:
                for reply in await push.next_answer(reservation):
                    yield reply

    async def Describe(self, request: DescribeRequest, context: Context) -> DescribeReply:
        reply = DescribeReply(server_id=self._server_id)
        for job, shard in self._catalog.shards(request.job):
            reply.shards.append(shard.describe(job))
            reply.memory_bytes += shard.memory_bytes
        return reply

    async def Drop(self, request: DropRequest, context: Context) -> DropReply:
        await self._fence.check(request.token)
        return DropReply(dropped=self._catalog.drop(request.token.job))

    def _run(self, num_bytes: int, work: Callable[[], T]) -> Awaitable[T]:
        """The result of `work`, which touches so many bytes, without holding up the event loop."""
        loop = asyncio.get_running_loop()
        if num_bytes > INLINE_BYTES:
            return loop.run_in_executor(self._pool, work)
        done: asyncio.Future[T] = loop.create_future()
        done.set_result(work())
        return done


def _new_shard(spec: Shard, header: CreateHeader, inflow: Inflow) -> LiveShard:
    return LiveShard(spec, header.optimizer, bytearray(inflow.join()))


def _no_header(expected: str) -> ShoalError:
    return MalformedMessage(
        "the stream does not begin with its header",
        seen="another message, or none",
        expected=f"a {expected}",
    )
