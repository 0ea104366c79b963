"""A thread that waits for ranks that have hung up is released, also if Gloo does not release it."""

import socket
from pathlib import Path

import pytest
from support.collectives import stuck_bodies
from support.processes.ranks import Ranks

from shoal.backends.network.sockets import count_connected, socket_address_bytes


def test_a_connection_counts_until_either_end_has_hung_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = socket_address_bytes(listener.family, listener.getsockname())

        def count() -> int:
            return count_connected(lambda end: end == own)

        assert count() == 0  # no peer has connected
        caller = socket.create_connection(listener.getsockname())
        with caller, listener.accept()[0] as called:
            assert count() == 2  # both ends are of this process
            caller.shutdown(socket.SHUT_RDWR)
            assert called.recv(1) == b""
            assert count() == 0


@pytest.mark.long
def test_a_process_ends_though_a_collective_of_its_checkpoint_does_not(
    tmp_path: Path,
) -> None:
    """A member that has left waits for its last checkpoint, and no cut reaches it any more."""
    with Ranks() as ranks:
        body, arguments = stuck_bodies.stuck_checkpoint, (str(tmp_path / "checkpoints"),)
        crew = [ranks.start(body, str(tmp_path / "store"), r, *arguments) for r in range(2)]
        crew[1].expect("going")
        assert crew[0].expect("closed", timeout_s=30)["written"] is None
        assert crew[0].join(timeout_s=30) == 0
