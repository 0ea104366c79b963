"""The Replication service: what a primary's server tells this one of the copies kept here."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Protocol

import structlog

from shoal_proto.errors import (
    MalformedMessage,
    Overloaded,
    ShoalError,
    Unavailable,
)
from shoal_proto.pieces import OnlyPiece
from shoal_proto.status import to_detail
from shoal_proto.v1 import replication_pb2 as pb
from shoal_proto.v1.parameters_pb2 import OpenBulkReply
from shoal_server.core.shards.assignments import Holder
from shoal_server.parameters.bulk.offers import Offers, Purpose
from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts
from shoal_server.parameters.cluster.silence import Silence
from shoal_server.parameters.replication.bounded_queue import BoundedQueue
from shoal_server.parameters.replication.frames import Arrived, Arriving, Assembly
from shoal_server.parameters.replication.received_updates import ReceivedUpdates
from shoal_server.parameters.shard.image import Image, UpdateRecord
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.shard.replica import Role, ShardReplica
from shoal_server.parameters.shard.workers import Runner
from shoal_server.parameters.tables.restore import restore
from shoal_server.serving.rpc import Context
from shoal_server.serving.tasks import cancel

log = structlog.get_logger(__name__)

MAX_ANSWERS = 64
"""Of one stream, not sent yet; beyond it the stream is not read."""


class ReplicaStore(Protocol):
    """What the service asks of the keeper of this server's shards."""

    async def refresh_source(self, arrived: Arrived, primary: Holder) -> None:
        """Look whether the record names that primary by now, if it did not as last seen."""
        ...

    def check_source(self, arrived: Arrived, primary: Holder) -> None:
        """Raise WrongEpoch unless that primary may tell this server of the shard."""
        ...

    def adopt(self, replica: ShardReplica) -> None:
        """Keep a shard as a backup, in place of what was kept of it before."""
        ...

    def replica(self, job: str, shard_id: int) -> ShardReplica | None: ...

    def discard(self, replica: ShardReplica) -> None:
        """Keep a copy no longer: it is not what it should be."""
        ...

    def stream_opened(self, primary: Holder) -> None: ...

    def stream_ended(self, primary: Holder, reason: str) -> None: ...


class ReplicationServicer:
    """Acknowledges a record once it is received whole and is the next one; applies it behind."""

    def __init__(
        self,
        *,
        me: Holder,
        replicas: ReplicaStore,
        received: ReceivedUpdates,
        run: Runner,
        timeouts: PeerTimeouts,
        memory: Memory,
        offers: Offers,
    ) -> None:
        self._me = me
        self._replicas = replicas
        self._received = received
        self._run = run
        self._timeouts = timeouts
        self._memory = memory
        self._offers = offers
        self._is_full = False

    async def Identify(self, request: pb.IdentifyRequest, context: Context) -> pb.Holder:
        return pb.Holder(server_id=self._me.server_id, incarnation=self._me.incarnation)

    async def OpenBulk(self, request: pb.OpenFollowRequest, context: Context) -> OpenBulkReply:
        return self._offers.make(Purpose.REPLICATION)

    def Follow(
        self, requests: AsyncIterator[Arriving], context: Context
    ) -> AsyncIterator[pb.FollowReply]:
        return self.follow(requests)

    async def follow(
        self, requests: AsyncIterator[Arriving]
    ) -> AsyncGenerator[pb.FollowReply, None]:
        """Take in what a primary tells; what is received is acknowledged in the replies."""
        first = await anext(requests, pb.FollowRequest())
        if isinstance(first, OnlyPiece) or not first.HasField("hello"):
            raise MalformedMessage(
                "the stream does not begin with its hello", seen="another message, or none"
            )
        primary = Holder(first.hello.primary.server_id, first.hello.primary.incarnation)
        self._replicas.stream_opened(primary)
        reason = "the stream ended"
        try:
            async with aclosing(self._replies(requests, primary)) as replies:
                async for reply in replies:
                    yield reply
        except Exception as error:
            reason = repr(error)
            raise
        finally:
            self._replicas.stream_ended(primary, reason)

    async def _replies(
        self, requests: AsyncIterator[Arriving], primary: Holder
    ) -> AsyncGenerator[pb.FollowReply, None]:
        """The answers in order; an empty one where there was none for a beat: the primary is to
        hear that somebody is there, also while a large image comes in or is restored."""
        answers, silence = BoundedQueue[pb.FollowReply](MAX_ANSWERS), Silence(self._timeouts)
        answering = asyncio.create_task(self._answer_all(requests, primary, answers, silence))
        silent = asyncio.create_task(silence.wait())
        for task in (answering, silent):
            task.add_done_callback(lambda _: answers.end())
        try:
            while not answers.is_over:
                answer = await answers.take(self._timeouts.beat_s)
                if answer is not None:
                    yield answer
                elif not answers.is_over:
                    yield pb.FollowReply()
            if silent.done():
                raise Unavailable(
                    f"the primary {primary.server_id} says nothing any more",
                    seen=f"nothing for {self._timeouts.silence_s:g} s",
                )
            await answering
        finally:
            await cancel(answering, silent)

    async def _answer_all(
        self,
        requests: AsyncIterator[Arriving],
        primary: Holder,
        answers: BoundedQueue[pb.FollowReply],
        silence: Silence,
    ) -> None:
        assembly = Assembly()
        while True:
            # While it has to wait here, it need not say anything.
            silence.expect()
            request = await anext(requests, None)
            silence.heard()
            if request is None:
                return
            if not isinstance(request, OnlyPiece) and request.HasField("beat"):
                await answers.put(pb.FollowReply())
                continue
            arrived = assembly.take(request)
            if arrived is not None:
                await answers.put(await self._receive(arrived, primary))

    async def _receive(self, arrived: Arrived, primary: Holder) -> pb.FollowReply:
        reply = pb.FollowReply(job=arrived.job, shard_id=arrived.shard_id)
        try:
            if isinstance(arrived.content, Image):
                await self._replicas.refresh_source(arrived, primary)
                self._replicas.check_source(arrived, primary)
                reply.version = await self._take_image(arrived, arrived.content, primary)
            else:
                await self._received.await_room()
                # Only now: while there was no room, this server may have come to lead the shard.
                self._replicas.check_source(arrived, primary)
                reply.version = self._received.take(arrived, arrived.content)
        except ShoalError as error:
            self._log_refusal(arrived, error)
            reply.error.CopyFrom(to_detail(error))
        return reply

    def _log_refusal(self, arrived: Arrived, error: ShoalError) -> None:
        # A full server refuses many: one line until it has taken one again.
        if not isinstance(error, Overloaded) or not self._is_full:
            kind = "record" if isinstance(arrived.content, UpdateRecord) else "copy"
            log.warning(
                f"{kind}_refused", job=arrived.job, shard_id=arrived.shard_id, why=str(error)
            )
        self._is_full |= isinstance(error, Overloaded)

    async def _take_image(self, arrived: Arrived, image: Image, primary: Holder) -> int:
        key = arrived.job, arrived.shard_id
        self._received.check_not_older(arrived, image)
        await self._received.settle_key(key)
        before = self._replicas.replica(*key)
        more_bytes = image.num_bytes - (before.state.memory_bytes if before is not None else 0)
        what = f"a copy of shard {arrived.shard_id} of job {arrived.job}"
        with self._memory.reserve(more_bytes, what) as claim:
            state = await self._run(image.num_bytes, partial(restore, image))
            replica = ShardReplica(arrived.job, state, Role.BACKUP, arrived.epoch)
            # Once more: while it was restored, this server may have come to lead the shard.
            # There is no await from here on.
            self._replicas.check_source(arrived, primary)
            self._replicas.adopt(replica)
            claim.became(more_bytes)
        self._is_full = False
        self._received.begin(replica, self._replicas.discard)
        return image.version
