"""The end of a membership ends its threads."""

import asyncio
import threading

import pytest
from support.clusters.coordinator_world import served

from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import DeadlineExceeded
from shoal_proto.v1 import membership_pb2 as pb
from shoal_server.etcd.memory import MemoryStore

DEADLINE_S = 30.0


class ClosedMeanwhile(MemberSession):
    """It is closed just before it opens its stream."""

    closer: threading.Thread

    def _attend_request(self) -> pb.AttendRequest:
        with self._changed:
            self.closer.start()
            # `close` tells all who wait when it has cancelled the stream, of which there is none.
            assert self._changed.wait(DEADLINE_S)
        return super()._attend_request()


async def test_a_membership_that_is_closed_while_it_connects_holds_up_nobody() -> None:
    """The stream that it opens then is not left to a coordinator that has nothing to say on it."""
    async with served(MemoryStore()) as world:
        membership = ClosedMeanwhile(world.client("a")._member)
        membership.closer = threading.Thread(target=membership.close, daemon=True)
        with pytest.raises(DeadlineExceeded):
            await asyncio.to_thread(membership.join, 0.5)
        await asyncio.to_thread(membership.closer.join, DEADLINE_S)
        assert not any(thread.is_alive() for thread in membership._threads)
