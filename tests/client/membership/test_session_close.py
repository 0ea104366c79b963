"""Threads of a membership end with it."""

import asyncio
import threading

import grpc
import pytest
from support.clusters.coordinator_world import served

from shoal_client.connection.coordinators import Coordinators
from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import DeadlineExceeded
from shoal_server.etcd.memory import MemoryStore

DEADLINE_S = 30.0


class ClosedMeanwhile(Coordinators):
    """Coordinators whose session is closed just before it opens its stream."""

    session: MemberSession
    closer: threading.Thread

    def channel(self) -> grpc.Channel:
        changed = self.session._changed
        with changed:
            self.closer.start()
            # `close` notifies the waiting threads once it has cancelled the stream; there is none
            # here.
            assert changed.wait(DEADLINE_S)
        return super().channel()


async def test_a_membership_closed_while_it_connects_leaves_no_open_stream() -> None:
    """The coordinator would have nothing to send on it."""
    async with served(MemoryStore()) as world:
        membership = MemberSession(world.member("a"))
        coordinators = ClosedMeanwhile([world.address])
        coordinators.session, membership._coordinators = membership, coordinators
        coordinators.closer = threading.Thread(target=membership.close, daemon=True)
        with pytest.raises(DeadlineExceeded):
            await asyncio.to_thread(membership.join, 0.5)
        await asyncio.to_thread(coordinators.closer.join, DEADLINE_S)
        assert not any(thread.is_alive() for thread in membership._threads.running)
