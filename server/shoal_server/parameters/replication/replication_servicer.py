"""The service on which primaries' servers replicate shards to this one."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, closing
from typing import Protocol

import structlog
import torch

from shoal_proto.errors import MalformedMessage, Overloaded, Unavailable
from shoal_proto.pieces import OnlyPiece
from shoal_proto.tls.bulk_offers import BulkOffers, Purpose
from shoal_proto.v1 import replication_pb2 as pb
from shoal_proto.v1.parameters_pb2 import OpenBulkReply
from shoal_proto.v1.replication_pb2_grpc import ReplicationServicer as Base
from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.effects import SendReply
from shoal_server.core.replication.protocol.events import (
    IncomingLinkEnded,
    IncomingLinkOpened,
    RequestReceived,
)
from shoal_server.core.replication.protocol.messages import (
    BackupRefusalReason,
    BackupRefused,
    UpdateMessage,
)
from shoal_server.parameters.bulk.wire import PeerHungUp
from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts
from shoal_server.parameters.cluster.silence import Silence
from shoal_server.parameters.replication.core_driver import CoreDriver
from shoal_server.parameters.replication.incoming_links import IncomingLinks
from shoal_server.parameters.replication.received_updates import ReceivedUpdates
from shoal_server.parameters.replication.wire import frames, replies
from shoal_server.parameters.replication.wire.bounded_queue import BoundedQueue
from shoal_server.parameters.replication.wire.frames import (
    ArrivedRequest,
    Arriving,
    RequestAssembler,
)
from shoal_server.serving.access.checks import known_caller
from shoal_server.serving.rpc import Context
from shoal_server.serving.tasks import cancel

log = structlog.get_logger(__name__)

MAX_ANSWERS = 4096
"""Bound on a link's unsent answers. Beyond it, requests are not read."""

SMALL_BYTES = 256 * 1024
"""Largest push after which reading may pause."""

Caller = tuple[Holder, int]


TakeArriving = Callable[[Arriving], bool]
"""Handles a request without waiting; False if it cannot."""


class DirectStream(Protocol):
    """Operations of a link's stream that need no turn of the event loop."""

    @property
    def reads_to_end(self) -> bool:
        """True if all that a primary has sent is read, even if the primary dies."""
        ...

    def send_now(self, reply: pb.FollowReply) -> bool:
        """Send an answer without waiting; False if that is impossible."""
        ...

    def send_soon(self, reply: pb.FollowReply) -> bool:
        """Send an answer within milliseconds, and before any later one. A later answer for the same
        shard may replace it. False if that is impossible."""
        ...

    def deliver(self, take: TakeArriving | None) -> None:
        """Offer later requests to `take` on arrival; None ends that."""
        ...

    def has_read(self, *, may_wait: bool) -> None:
        """Note that the `deliver` function took a push. `may_wait`: its answer may wait. While all
        answers may wait, requests may stay unread for milliseconds, but not after `end_reading` or
        `end_sending`."""
        ...

    def end_reading(self) -> None:
        """Keep the primary from sending more, if `reads_to_end`."""
        ...

    def end_sending(self) -> None:
        """Send no further answers; a send in progress fails."""
        ...


class _ByGrpc:
    """A gRPC call, which supports none of these operations."""

    reads_to_end = False

    def send_now(self, reply: pb.FollowReply) -> bool:
        return False

    def send_soon(self, reply: pb.FollowReply) -> bool:
        return False

    def deliver(self, take: TakeArriving | None) -> None:
        """Requests arrive only in the stream."""

    def has_read(self, *, may_wait: bool) -> None:
        """The stream of requests does not pause."""

    def end_reading(self) -> None:
        """Unread requests will be sent again."""

    def end_sending(self) -> None:
        """No send waits for the primary."""


_BY_GRPC = _ByGrpc()


class _Answers:
    """Answers of one link, in order, until one of its streams is over."""

    def __init__(self, direct: DirectStream) -> None:
        self._send_now, self._send_soon = direct.send_now, direct.send_soon
        self.queue = BoundedQueue[pb.FollowReply](MAX_ANSWERS)
        self.is_over = asyncio.Event()

    def put(self, reply: pb.FollowReply, *, may_wait: bool = False) -> None:
        """Send an answer after all earlier ones, at once if possible. `may_wait`: it may be sent
        some milliseconds later."""
        send = self._send_soon if may_wait else self._send_now
        if len(self.queue) or not send(reply):
            self.queue.put_now(reply)

    def end(self) -> None:
        self.is_over.set()
        self.queue.end()


class ReplicationServicer(Base):
    """Passes requests to the core, and sends its answers."""

    def __init__(
        self,
        driver: CoreDriver,
        *,
        me: Holder,
        received: ReceivedUpdates,
        links: IncomingLinks,
        timeouts: PeerTimeouts,
        offers: BulkOffers,
    ) -> None:
        self._driver = driver
        self._me = me
        self._received = received
        self._links = links
        self._timeouts = timeouts
        self._offers = offers
        self._callers: dict[Caller, _Answers] = {}
        self._warned_versions: set[str] = set()

    async def Identify(self, request: pb.IdentifyRequest, context: Context) -> pb.Holder:
        return pb.Holder(server_id=self._me.server_id, incarnation=self._me.incarnation)

    async def OpenBulk(self, request: pb.OpenFollowRequest, context: Context) -> OpenBulkReply:
        return self._offers.make(Purpose.REPLICATION, known_caller(context))

    def Follow(
        self, requests: AsyncIterator[Arriving], context: Context
    ) -> AsyncIterator[pb.FollowReply]:
        return self.follow(requests)

    async def follow(
        self, requests: AsyncIterator[Arriving], direct: DirectStream = _BY_GRPC
    ) -> AsyncGenerator[pb.FollowReply, None]:
        """Serve one stream of a link. Answers are sent by `direct` if possible, else yielded.
        Pushes arrive by `direct` or in `requests`.

        Raises Unavailable if the primary falls silent; MalformedMessage for a stream without its
        hello, a stream of images without its link, and messages out of order; ChecksumMismatch; and
        what ends `requests`.
        """
        first = await anext(requests, pb.FollowRequest())
        if isinstance(first, OnlyPiece) or not first.HasField("hello"):
            raise MalformedMessage(
                "the stream does not begin with its hello", seen="another message, or none"
            )
        hello = first.hello
        caller = Holder(hello.primary.server_id, hello.primary.incarnation), hello.link
        if hello.for_images:
            stream = self._images(caller, requests)
        else:
            stream = self._link(hello, requests, direct)
        async with aclosing(stream) as out:
            async for reply in out:
                yield reply

    async def _link(
        self, hello: pb.Hello, requests: AsyncIterator[Arriving], direct: DirectStream
    ) -> AsyncGenerator[pb.FollowReply, None]:
        caller = Holder(hello.primary.server_id, hello.primary.incarnation), hello.link
        self._compare(hello)
        # Requests of an earlier link are read first.
        await self._links.read_to_end(caller[0])
        answers = self._callers[caller] = _Answers(direct)
        self._driver.submit_event(IncomingLinkOpened(*caller))
        if direct.reads_to_end:
            answers.put(pb.FollowReply(reads_to_end=True))
        reason = "the stream ended"
        try:
            async with aclosing(self._carried(caller, answers, requests, direct)) as out:
                async for reply in out:
                    yield reply
        except Exception as error:
            reason = repr(error)
            raise
        finally:
            log.info("replication_link_ended", primary=caller[0].server_id, reason=reason)
            answers.end()
            self._end_link(caller, answers)

    def _end_link(self, caller: Caller, answers: _Answers, *, is_torn: bool = False) -> None:
        if self._callers.get(caller) is answers:
            del self._callers[caller]
            self._driver.submit_event(IncomingLinkEnded(*caller, is_torn=is_torn))

    async def _images(
        self, caller: Caller, requests: AsyncIterator[Arriving]
    ) -> AsyncGenerator[pb.FollowReply, None]:
        answers = self._callers.get(caller)
        if answers is None:
            raise MalformedMessage(
                "a stream of images that belongs to no link",
                seen=f"link {caller[1]} of server {caller[0].server_id}",
                expected="a link with an open first stream",
            )
        beats = _Answers(_BY_GRPC)
        try:
            async with aclosing(self._carried(caller, beats, requests, _BY_GRPC)) as out:
                async for reply in out:
                    yield reply
        finally:
            answers.end()

    def _compare(self, hello: pb.Hello) -> None:
        """Warn if the primary's torch is of another release, which may round differently: copies
        would differ."""
        theirs, mine = hello.torch_version, torch.__version__
        if theirs != mine and theirs not in self._warned_versions:
            self._warned_versions.add(theirs)
            log.warning(
                "torch_versions_differ",
                server=hello.primary.server_id,
                seen=theirs or "none",
                expected=mine,
            )

    async def _carried(
        self,
        caller: Caller,
        answers: _Answers,
        requests: AsyncIterator[Arriving],
        direct: DirectStream,
    ) -> AsyncGenerator[pb.FollowReply, None]:
        """Yield the answers. An empty one after `beat_s` shows that this server is alive, however
        busy it is."""
        silence = Silence(self._timeouts)
        reading = asyncio.create_task(self._read(caller, answers, requests, silence, direct))
        if direct.reads_to_end:

            def read(task: asyncio.Task[None]) -> None:
                if _is_torn(task):
                    self._end_link(caller, answers, is_torn=True)

            # Called before the tasks that wait for the end of reading, and before the rest of the
            # link ends.
            reading.add_done_callback(read)
            self._links.read_by(reading, caller[0], direct.end_reading)
        silent = asyncio.create_task(silence.wait())
        # A send to a suspended process would wait until it continues.
        silent.add_done_callback(lambda task: None if task.cancelled() else direct.end_sending())
        for task in (reading, silent):
            task.add_done_callback(lambda _: answers.end())
        try:
            while not answers.queue.is_over:
                answer = await answers.queue.take(self._timeouts.beat_s)
                if answer is not None:
                    yield answer
                elif not answers.queue.is_over:
                    yield pb.FollowReply()
            if silent.done():
                raise Unavailable(
                    f"the primary {caller[0].server_id} has fallen silent",
                    seen=f"nothing for {self._timeouts.silence_s:g} s",
                )
            if reading.done():
                reading.result()
        except asyncio.CancelledError:
            # This server ends: unread requests are lost.
            await cancel(reading)
            raise
        finally:
            if direct.reads_to_end:
                direct.end_reading()
                await asyncio.wait({reading})
            await cancel(reading, silent)

    async def _read(
        self,
        caller: Caller,
        answers: _Answers,
        requests: AsyncIterator[Arriving],
        silence: Silence,
        direct: DirectStream,
    ) -> None:
        with closing(self._received.assembly()) as assembly:

            def take(request: Arriving) -> bool:
                has_capacity = answers.queue.has_capacity and self._received.has_capacity
                if not (has_capacity and _is_of_push(request)):
                    return False
                silence.note_message()
                arrived = assembly.take(request)
                if arrived is not None:
                    direct.has_read(may_wait=_may_wait(arrived))
                    self._submit(caller, arrived)
                silence.start_counting()
                return True

            direct.deliver(take)
            try:
                await self._take_all(caller, answers, requests, silence, assembly)
            finally:
                direct.deliver(None)

    async def _take_all(
        self,
        caller: Caller,
        answers: _Answers,
        requests: AsyncIterator[Arriving],
        silence: Silence,
        assembly: RequestAssembler,
    ) -> None:
        while True:
            # The silence counts from here: the primary cannot send while this server does not read.
            silence.start_counting()
            request = await anext(requests, None)
            silence.note_message()
            if request is None:
                return
            if not isinstance(request, OnlyPiece) and request.HasField("beat"):
                await answers.queue.await_capacity()
                answers.queue.put_now(pb.FollowReply())
                continue
            if not isinstance(request, OnlyPiece) and request.HasField("digest"):
                digest = request.digest
                key = digest.job, digest.shard_id
                self._received.compare(key, digest.epoch, frames.to_digest(digest))
                continue
            arrived = assembly.take(request)
            if arrived is not None:
                await answers.queue.await_capacity()
                if isinstance(arrived.request, UpdateMessage):
                    await self._received.await_capacity()
                self._submit(caller, arrived)

    def _submit(self, caller: Caller, arrived: ArrivedRequest) -> None:
        request = arrived.request
        if isinstance(request, UpdateMessage):
            try:
                self._received.check_memory(arrived)
            except Overloaded as error:
                refusal = BackupRefused(
                    request.key, request.epoch, BackupRefusalReason.FULL, str(error)
                )
                self.send_reply(SendReply(*caller, refusal))
                return
        self._driver.submit_event(RequestReceived(*caller, request, arrived))

    def send_reply(self, effect: SendReply) -> None:
        answers = self._callers.get((effect.peer, effect.link))
        if answers is None:
            return
        reply = effect.reply
        if isinstance(reply, BackupRefused):
            log.warning(
                "copy_refused",
                job=reply.key[0],
                shard_id=reply.key[1],
                why=reply.why.value,
                detail=reply.detail,
            )
        answers.put(replies.encode(reply), may_wait=effect.may_wait)


def _is_of_push(request: Arriving) -> bool:
    return isinstance(request, OnlyPiece) or request.HasField("record")


def _may_wait(arrived: ArrivedRequest) -> bool:
    """True for a small push whose answer may wait: after a large one, the sender needs its memory
    back soon."""
    request = arrived.request
    may_wait = isinstance(request, UpdateMessage) and request.answer_may_wait
    return may_wait and sum(map(len, arrived.parts)) <= SMALL_BYTES


def _is_torn(reading: "asyncio.Task[None]") -> bool:
    if reading.cancelled():
        return True
    error = reading.exception()
    return error is not None and not isinstance(error, PeerHungUp)
