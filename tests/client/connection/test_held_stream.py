"""First replies: a client leaves a coordinator that accepts connections but does not answer."""

import asyncio
import socket
from dataclasses import replace

from support.clusters.coordinator_world import served

from shoal_client.connection.held_stream import FirstReplyTimeout
from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import Unavailable
from shoal_server.etcd.memory import MemoryStore


async def test_a_member_joins_at_another_coordinator_if_one_is_silent() -> None:
    """The kernel accepts connections to a halted process, but no data follow."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with served(MemoryStore()) as world:
            client = world.client("a")
            addresses = [f"127.0.0.1:{silent.getsockname()[1]}", world.address]
            member = replace(client._member, coordinators=addresses)
            patient = MemberSession(member)
            world.clients.append(patient)
            await asyncio.to_thread(patient.join)
            assert "a" in world.coordinator.registry.find("j").job.members


class Stream:
    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    def cancel(self) -> bool:
        self.cancelled.set()
        return True


def test_the_timeout_doubles_with_each_silence_and_an_answer_resets_it() -> None:
    """A leader under load then has more time to answer. The timeout is bounded."""
    timeout = FirstReplyTimeout(0.001)
    waited = []
    for _ in range(6):
        stream = Stream()
        with timeout.until_answered(stream):
            assert timeout._timer is not None
            timeout._timer.join(30)
        assert stream.cancelled.is_set()
        error = timeout.error("host:1")
        assert isinstance(error, Unavailable)
        waited.append(timeout._waited_s)
    assert waited == [0.001, 0.002, 0.004, 0.008, 0.008, 0.008]
    with timeout.until_answered(Stream()):
        timeout.record_reply()
    assert timeout.error("host:1") is None
    with timeout.until_answered(Stream()):
        assert timeout._timer is not None
        timeout._timer.join(30)
    assert timeout.error("host:1") is not None
    assert timeout._waited_s == 0.001
