"""Threads of a membership end with it."""

import asyncio
import threading

import grpc
import pytest
from support.clusters.coordinator_world import served
from support.clusters.memory_store import MemoryStore

from shoal_client.connection.coordinators import Coordinators
from shoal_client.connection.held_stream import HeldStream
from shoal_client.membership import member_session
from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import DeadlineExceeded

DEADLINE_S = 30.0


class ClosedMeanwhile(Coordinators):
    """Coordinators whose session is closed just before it opens its stream."""

    closer: threading.Thread
    has_cancelled: threading.Event
    """Set once the session has cancelled its stream: there is none yet."""

    def channel(self) -> grpc.Channel:
        self.closer.start()
        assert self.has_cancelled.wait(DEADLINE_S)
        return super().channel()


async def test_a_membership_closed_while_it_connects_leaves_no_open_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The coordinator would have nothing to send on it."""
    has_cancelled, close_stream = threading.Event(), HeldStream.close

    def close_noted(stream: HeldStream) -> None:
        close_stream(stream)
        has_cancelled.set()

    monkeypatch.setattr(HeldStream, "close", close_noted)
    monkeypatch.setattr(member_session, "Coordinators", ClosedMeanwhile)
    async with served(MemoryStore()) as world:
        membership = MemberSession(world.member("a"))
        coordinators = membership.coordinators
        assert isinstance(coordinators, ClosedMeanwhile)
        coordinators.closer = threading.Thread(target=membership.close, daemon=True)
        coordinators.has_cancelled = has_cancelled
        with pytest.raises(DeadlineExceeded):
            await asyncio.to_thread(membership.join, 0.5)
        await asyncio.to_thread(coordinators.closer.join, DEADLINE_S)
        assert not any(thread.name == "shoal-member" for thread in threading.enumerate())
