"""Links to other servers: the owner of a link is notified when it breaks."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import AccessDenied, Unavailable
from shoal_proto.pieces import Buffer
from shoal_proto.v1 import replication_pb2 as pb
from shoal_proto.v1.replication_pb2 import PushRecord
from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.events import (
    LinkBroken,
    LinkOpened,
    RecordDelivered,
    ReplyReceived,
)
from shoal_server.core.replication.protocol.messages import ImageChunk, UpdateMessage
from shoal_server.core.shards.shard_log import ShardLog
from shoal_server.etcd.api import KeyValue
from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts
from shoal_server.parameters.cluster.server_directory import ServerDirectory
from shoal_server.parameters.replication import peer_link
from shoal_server.parameters.replication.outgoing_record import OutgoingRecord
from shoal_server.parameters.replication.peer_link import PeerLink
from shoal_server.parameters.replication.wire.frames import Frame
from shoal_server.parameters.replication.wire.streams import Keep
from shoal_server.parameters.shard.record import UpdateRecord

ME, PEER = Holder("ps-0", "one"), Holder("ps-1", "one")
KEY = ("job", 0)
WITHIN_S = 10.0


class Refused:
    """Owner that cannot find out the other server's address."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[LinkOpened | LinkBroken | RecordDelivered | ReplyReceived] = (
            asyncio.Queue()
        )

    async def find_address(self, holder: Holder) -> str | None:
        raise AccessDenied("etcd does not let this server in")

    def header(self, image: int) -> pb.CutHeader | None:
        return None

    def chunk(self, request: ImageChunk) -> Awaitable[Buffer]:
        raise NotImplementedError

    def submit_event(
        self, event: LinkOpened | LinkBroken | RecordDelivered | ReplyReceived
    ) -> None:
        self.events.put_nowait(event)


def test_a_link_that_fails_for_any_reason_is_reported_as_broken() -> None:
    """The owner of a link that failed unreported would wait for ever, and so would pushes to its
    shards."""

    async def run() -> None:
        owner = Refused()
        link = PeerLink(ME, PEER, 3, owner, PeerTimeouts())
        link.start()
        async with asyncio.timeout(WITHIN_S):
            assert await owner.events.get() == LinkBroken(PEER, 3, is_gone=False)
        await link.close()

    asyncio.run(run())


class Etcd(MemoryStore):
    """An etcd whose `get` can be made to fail."""

    is_cut_off = False

    async def get(self, key: str) -> KeyValue | None:
        if self.is_cut_off:
            raise Unavailable("etcd cannot be reached")
        return await super().get(key)


class Following(Refused):
    """Owner that looks up the other server in etcd."""

    def __init__(self, directory: ServerDirectory) -> None:
        super().__init__()
        self._directory = directory

    async def find_address(self, holder: Holder) -> str | None:
        return await self._directory.find_address(holder)


@pytest.mark.parametrize("is_cut_off", [False, True])
async def test_an_unknown_peer_is_gone_only_if_etcd_answers(is_cut_off: bool) -> None:
    """A peer may live while etcd does not answer, and its copies must not be given up."""
    store = Etcd()
    async with ServerDirectory(store, lambda: None) as directory, asyncio.timeout(WITHIN_S):
        store.is_cut_off = is_cut_off
        owner = Following(directory)
        link = PeerLink(ME, PEER, 3, owner, PeerTimeouts())
        link.start()
        assert await owner.events.get() == LinkBroken(PEER, 3, is_gone=not is_cut_off)
        await link.close()
    await store.close()


class Open(Refused):
    """Owner that knows the other server's address."""

    async def find_address(self, holder: Holder) -> str | None:
        return "127.0.0.1:1"


class Stream:
    """A stream that accepts frames and has no replies."""

    inline_bytes = 4096
    is_in_memory = False

    def __init__(self) -> None:
        self.written: asyncio.Queue[Frame] = asyncio.Queue()

    async def write(self, frame: Frame) -> None:
        self.written.put_nowait(frame)

    def draft(self, data: memoryview) -> memoryview | None:
        return None

    def write_now(self, *of_record: Frame, keep: Keep) -> bool:
        return False

    async def replies(self) -> AsyncIterator[pb.FollowReply]:
        await asyncio.Event().wait()
        yield pb.FollowReply()

    def deliver(self, take: Callable[[pb.FollowReply], None]) -> None:
        """Do nothing."""


async def test_an_update_that_no_backup_needs_any_more_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The log may drop an update that waits for its link."""
    stream = Stream()

    @asynccontextmanager
    async def opened(address: str) -> AsyncIterator[Stream]:
        yield stream

    monkeypatch.setattr(peer_link, "open_stream", opened)
    link, log = PeerLink(ME, PEER, 3, Open(), PeerTimeouts()), ShardLog[OutgoingRecord](1)
    for version in (2, 3):
        push = PushRecord(session="s", sequence=version, version=version)
        record = OutgoingRecord(UpdateRecord(push, b"data"))
        log.append(record)
        link.send_record(UpdateMessage(KEY, 1, version), record)
    log.trim(2)
    link.start()
    async with asyncio.timeout(WITHIN_S):
        hello, sent = await stream.written.get(), await stream.written.get()
    assert isinstance(hello, pb.FollowRequest) and hello.HasField("hello")
    assert isinstance(sent, pb.FollowRequest) and sent.record.record.version == 3
    await link.close()
