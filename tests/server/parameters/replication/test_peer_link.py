"""A link to another server ends in one way: it is told that it broke."""

import asyncio
from collections.abc import Awaitable, Callable

from shoal_proto.errors import AccessDenied
from shoal_proto.pieces import Buffer
from shoal_proto.v1 import replication_pb2 as pb
from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.events import (
    LinkBroken,
    LinkOpened,
    RecordDelivered,
    ReplyReceived,
)
from shoal_server.core.replication.protocol.messages import ImageChunk, UpdateMessage
from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts
from shoal_server.parameters.replication.peer_link import PeerLink
from shoal_server.parameters.shard.image import UpdateRecord

ME, PEER = Holder("ps-0", "one"), Holder("ps-1", "one")
WITHIN_S = 10.0


class Refused:
    """Whose way to the other server cannot be found out."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[LinkOpened | LinkBroken | RecordDelivered | ReplyReceived] = (
            asyncio.Queue()
        )

    async def reach(self, holder: Holder) -> str | None:
        raise AccessDenied("etcd does not let this server in")

    def record(self, request: UpdateMessage) -> UpdateRecord | None:
        return None

    def owned_record(self, request: UpdateMessage) -> UpdateRecord | None:
        return None

    def lies_at(self, request: UpdateMessage, data: memoryview) -> Callable[[], None]:
        return lambda: None

    def header(self, image: int) -> pb.CutHeader | None:
        return None

    def chunk(self, request: ImageChunk) -> Awaitable[Buffer]:
        raise NotImplementedError

    def submit_event(
        self, event: LinkOpened | LinkBroken | RecordDelivered | ReplyReceived
    ) -> None:
        self.told.put_nowait(event)


def test_a_link_that_fails_for_whatever_reason_is_told_to_be_broken() -> None:
    """Its owner would wait for it for ever, and with it the pushes to each shard that follows."""

    async def run() -> None:
        owner = Refused()
        link = PeerLink(ME, PEER, 3, owner, PeerTimeouts())
        link.start()
        async with asyncio.timeout(WITHIN_S):
            assert await owner.told.get() == LinkBroken(PEER, 3, is_gone=False)
        await link.close()

    asyncio.run(run())
