"""Opening of a bulk connection, with a server's end that is played by the test."""

import os
import socket

import pytest

from shoal_proto import bulk
from shoal_proto.bulk import FrameKind
from shoal_proto.bulk_opening import present_key
from shoal_proto.errors import MalformedMessage


def test_memory_that_is_smaller_than_the_server_says_is_malformed() -> None:
    """The caller closes the connection for this error, and goes on over gRPC."""
    client, server = socket.socketpair()
    memory = os.memfd_create("arena")
    try:
        os.ftruncate(memory, 4096)
        hello = bulk.message(FrameKind.HELLO, b"", at=8192)
        socket.send_fds(server, [hello], [memory])
        with pytest.raises(MalformedMessage, match="smaller than it says"):
            present_key(client, b"key", 8192)
    finally:
        os.close(memory)
        client.close()
        server.close()
