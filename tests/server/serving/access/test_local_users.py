"""Users of the processes at the other end of local connections, as the kernel reports them."""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal_server.serving.access import local_users
from shoal_server.serving.access.local_users import user_of_peer


@contextmanager
def connection(host: str = "127.0.0.1") -> Iterator[tuple[socket.socket, socket.socket]]:
    """Open a connection, and return both ends: the caller's and the acceptor's."""
    with (
        socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ) as listener,
        socket.create_connection(listener.getsockname()[:2]) as caller,
        listener.accept()[0] as taken,
    ):
        yield caller, taken


@pytest.fixture(params=["sock_diag", "/proc"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Choose how the kernel is asked: by sock_diag, or without it by the table in /proc."""
    if request.param == "/proc":

        def none(*ends: object) -> int:
            raise OSError("no sock_diag here")

        monkeypatch.setattr(local_users, "ask_sock_diag", none)
    return str(request.param)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_user_of_a_caller_is_known(method: str, host: str) -> None:
    with connection(host) as (_, taken):
        assert user_of_peer(taken) == os.geteuid()


def test_a_closed_connection_has_no_user(method: str) -> None:
    """The kernel reports such a socket as root's."""
    with connection() as (caller, taken):
        caller.close()
        assert taken.recv(1) == b""
        assert user_of_peer(taken) is None


def test_a_reset_connection_has_no_user(method: str) -> None:
    with connection() as (caller, taken):
        # Closing such a socket resets the connection.
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        caller.close()
        with pytest.raises(ConnectionResetError):
            taken.recv(1)
        assert user_of_peer(taken) is None


def test_another_kind_of_socket_has_no_user(method: str) -> None:
    one, other = socket.socketpair()
    with one, other:
        assert user_of_peer(one) is None


def test_an_unmapped_user_is_no_user(
    method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A container with a user namespace shows all users of the host as one id, which a process of
    the container may have as well."""
    overflow = tmp_path / "overflowuid"
    overflow.write_text(f"{os.geteuid()}\n")
    monkeypatch.setattr(local_users, "OVERFLOW_UID_FILE", overflow)
    with connection() as (_, taken):
        assert user_of_peer(taken) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes sockets of other users")
def test_another_user_is_reported(method: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        os.seteuid(12345)
        try:
            caller = socket.create_connection(listener.getsockname())
        finally:
            os.seteuid(0)
        with caller, listener.accept()[0] as taken:
            assert user_of_peer(taken) == 12345
