"""First replies: a client leaves a coordinator that accepts connections but does not answer."""

import asyncio
import socket
import threading
from dataclasses import replace

from support.clusters.coordinator_world import served
from support.clusters.memory_store import MemoryStore

from shoal_client.connection.held_stream import FirstReplyTimeout
from shoal_proto.errors import Unavailable


async def test_a_member_joins_at_another_coordinator_if_one_is_silent() -> None:
    """The kernel accepts connections to a halted process, but no data follow."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with served(MemoryStore()) as world:
            addresses = [f"127.0.0.1:{silent.getsockname()[1]}", world.address]
            patient = world.session(replace(world.member("a"), coordinators=addresses))
            await asyncio.to_thread(patient.join)
            assert "a" in world.coordinator.registry.find("j").job.members


class Stream:
    def __init__(self) -> None:
        self.cancelled = threading.Event()

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
            assert stream.cancelled.wait(30)
        error = timeout.error("host:1")
        assert isinstance(error, Unavailable)
        waited.append(error.seen)
    assert waited == [f"nothing for {each} s" for each in (0.001, 0.002, 0.004, *[0.008] * 3)]
    with timeout.until_answered(Stream()):
        timeout.record_reply()
    assert timeout.error("host:1") is None
    stream = Stream()
    with timeout.until_answered(stream):
        assert stream.cancelled.wait(30)
    error = timeout.error("host:1")
    assert error is not None
    assert error.seen == "nothing for 0.001 s"
