"""A bulk connection whose client hangs up during a call."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from shoal_proto import bulk
from shoal_proto.bulk import FrameKind
from shoal_proto.tls.bulk_offers import PermittedUse, Purpose
from shoal_proto.v1.parameters_pb2 import PushReply, PushRequest
from shoal_proto.v1.replication_pb2 import FollowReply
from shoal_server.parameters.bulk.wire import FrameConnection, PeerHungUp
from shoal_server.parameters.service import bulk_connection
from shoal_server.parameters.service.bulk_connection import BulkServerConnection, BulkServices


@pytest.fixture(autouse=True)
def short_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_connection, "BEAT_S", 0.01)


class WaitingPushes:
    """Reads each push to its end, and never answers it."""

    def __init__(self) -> None:
        self.received, self.ended = asyncio.Event(), asyncio.Event()

    async def push(
        self, request: PushRequest, pieces: AsyncIterator[object], reply_writer: object
    ) -> AsyncGenerator[list[PushReply], None]:
        try:
            async for _ in pieces:
                pass
            self.received.set()
            await asyncio.Event().wait()
            yield []
        finally:
            self.ended.set()


class SlowReader:
    """Reads a replication stream to its end, but begins only when told to."""

    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.num_read = 0

    async def follow(
        self, requests: AsyncIterator[object], direct: object
    ) -> AsyncGenerator[FollowReply, None]:
        self.begun.set()
        await self.go_on.wait()
        try:
            async for _ in requests:
                self.num_read += 1
        except PeerHungUp:
            return
        yield FollowReply()


def connection(
    end: socket.socket, purpose: Purpose, parameters: object = None, replication: object = None
) -> BulkServerConnection:
    services = BulkServices(parameters, replication, None)  # type: ignore[arg-type]
    return BulkServerConnection(FrameConnection(end), services, None, PermittedUse(purpose, None))


async def test_a_push_of_a_client_that_is_gone_ends() -> None:
    """The push's parts may wait for minutes for a backup: nobody needs them for so long."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        pushes = WaitingPushes()
        serving = asyncio.create_task(connection(ours, Purpose.CALLS, pushes).serve())
        request = PushRequest().SerializeToString()
        theirs.send(bulk.message(FrameKind.PUSH, request) + bulk.header(FrameKind.END))
        async with asyncio.timeout(20):
            await pushes.received.wait()
            theirs.close()
            await pushes.ended.wait()
            await serving


async def test_a_replication_stream_is_read_to_its_end_after_its_sender_is_gone() -> None:
    """A primary counts the records that it has sent as received."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        reader = SlowReader()
        stream = connection(ours, Purpose.REPLICATION, replication=reader)
        serving = asyncio.create_task(stream.serve())
        message = bulk.message(FrameKind.MESSAGE, b"")
        theirs.send(bulk.header(FrameKind.FOLLOW) + 3 * message)
        async with asyncio.timeout(20):
            await reader.begun.wait()
            theirs.close()
            # By now several beats have failed.
            await asyncio.sleep(0.1)
            reader.go_on.set()
            await serving
        assert reader.num_read == 3
