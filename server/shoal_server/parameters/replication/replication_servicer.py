"""The Replication service: what a primary's server tells this one of the copies kept here."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import structlog

from shoal_proto.errors import (
    InternalError,
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
from shoal_server.parameters.shard.image import Image, UpdateRecord
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.shard.replica import Role, ShardReplica, num_bytes_of
from shoal_server.parameters.shard.workers import Runner
from shoal_server.parameters.tables.batch import ID_BYTES
from shoal_server.parameters.tables.restore import restore
from shoal_server.serving.rpc import Context
from shoal_server.serving.tasks import cancel

log = structlog.get_logger(__name__)

MAX_UNAPPLIED_BYTES = 256 * 1024 * 1024
"""Of records received and not applied yet, over all shards; beyond it the stream is not read."""
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


@dataclass(slots=True)
class _Backlog:
    """What was received for one shard and is still to be applied, in order."""

    replica: ShardReplica
    received_version: int
    is_closed: bool = False
    """No more is taken: the shard is to be led here, or another image of it has come."""
    records: deque[UpdateRecord] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None


class ReplicationServicer:
    """Acknowledges a record once it is received whole and is the next one; applies it behind."""

    def __init__(
        self,
        *,
        me: Holder,
        replicas: ReplicaStore,
        run: Runner,
        timeouts: PeerTimeouts,
        memory: Memory,
        offers: Offers,
    ) -> None:
        self._me = me
        self._replicas = replicas
        self._run = run
        self._timeouts = timeouts
        self._memory = memory
        self._offers = offers
        self._is_full = False
        self._backlogs: dict[tuple[str, int], _Backlog] = {}
        self._unapplied_bytes = 0
        self._room = asyncio.Condition()

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
                async with self._room:
                    await self._room.wait_for(self._has_room)
                # Only now: while there was no room, this server may have come to lead the shard.
                self._replicas.check_source(arrived, primary)
                reply.version = self._take_record(arrived, arrived.content)
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

    def _has_room(self) -> bool:
        return self._unapplied_bytes <= MAX_UNAPPLIED_BYTES

    async def _take_image(self, arrived: Arrived, image: Image, primary: Holder) -> int:
        key = arrived.job, arrived.shard_id
        self._check_not_older(arrived, image)
        await self._settle(key)
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
        self._backlogs[key] = _Backlog(replica, image.version)
        return image.version

    def _check_not_older(self, arrived: Arrived, image: Image) -> None:
        """What a primary was told to be received here must not be replaced by less."""
        backlog = self._backlogs.get((arrived.job, arrived.shard_id))
        if (
            backlog is not None
            and self._replicas.replica(arrived.job, arrived.shard_id) is backlog.replica
            and backlog.replica.epoch == arrived.epoch
            and backlog.received_version > image.version
        ):
            raise InternalError(
                f"an image of shard {arrived.shard_id} is older than the copy that is here",
                seen=f"version {image.version}",
                expected=f"version {backlog.received_version} or a newer one",
            )

    def _take_record(self, arrived: Arrived, record: UpdateRecord) -> int:
        """Without an await: what was checked holds until the record has its place in the order."""
        key = arrived.job, arrived.shard_id
        backlog = self._backlogs.get(key)
        is_open = backlog is not None and not backlog.is_closed
        if backlog is None or not is_open or self._replicas.replica(*key) is not backlog.replica:
            raise InternalError(
                f"no copy of shard {arrived.shard_id} of job {arrived.job} is here",
                seen=f"a record of version {record.push.version}",
                expected="the shard's image first",
            )
        if record.push.version != backlog.received_version + 1:
            raise InternalError(
                f"a record of shard {arrived.shard_id} does not follow on what came before",
                seen=f"version {record.push.version}",
                expected=f"version {backlog.received_version + 1}",
            )
        if record.push.row_ids:
            # What was acknowledged stays here until the record says that it may go.
            self._memory.check(f"more rows in a copy of shard {arrived.shard_id}")
        self._unapplied_bytes += num_bytes_of(record)
        backlog.received_version = record.push.version
        backlog.records.append(record)
        if backlog.task is None or backlog.task.done():
            backlog.task = asyncio.create_task(self._apply(backlog))
        return record.push.version

    async def _apply(self, backlog: _Backlog) -> None:
        """Replay until nothing is left; a copy that fails to is given up."""
        while backlog.records:
            record = backlog.records.popleft()
            size = num_bytes_of(record)
            state = backlog.replica.state
            num_bytes = len(record.data) + state.body.regrown_bytes(
                len(record.push.row_ids) // ID_BYTES
            )
            try:
                await self._run(num_bytes, partial(state.replay, record))
            except Exception:
                log.exception(
                    "copy_failed", job=backlog.replica.job, shard_id=backlog.replica.shard_id
                )
                size += sum(map(num_bytes_of, backlog.records))
                backlog.records.clear()
                self._replicas.discard(backlog.replica)
            finally:
                self._unapplied_bytes -= size
                async with self._room:
                    self._room.notify_all()

    async def settle(self, replica: ShardReplica) -> None:
        """Return once everything that was received for a shard is applied."""
        await self._settle((replica.job, replica.shard_id))

    async def _settle(self, key: tuple[str, int]) -> None:
        backlog = self._backlogs.get(key)
        if backlog is None:
            return
        backlog.is_closed = True
        if backlog.task is not None:
            # Whoever else settles it waits too, and what was acknowledged is applied although who
            # waits for it is cancelled.
            await asyncio.wait({backlog.task})
        if self._backlogs.get(key) is backlog:
            del self._backlogs[key]
