"""A fork waits while a thread is inside OpenSSL, and its child can use OpenSSL."""

import os
import socket
import ssl
import threading

import pytest

from shoal_proto.forks.openssl import NO_FORK, secured_client

WITHIN_S = 10.0


def forked() -> None:
    """Fork a child that ends at once, and wait for it."""
    child = os.fork()
    if not child:
        with NO_FORK:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_fork_waits_for_a_thread_inside_openssl() -> None:
    """The child would otherwise inherit a lock held by a thread that it does not have."""
    within, forking, is_forked, leave = (threading.Event() for _ in range(4))

    def hold() -> None:
        with NO_FORK:
            within.set()
            assert leave.wait(WITHIN_S)

    def fork() -> None:
        forking.set()
        forked()
        is_forked.set()

    holder = threading.Thread(target=hold)
    holder.start()
    assert within.wait(WITHIN_S)
    forker = threading.Thread(target=fork, daemon=True)
    forker.start()
    try:
        assert forking.wait(WITHIN_S)
        assert not is_forked.wait(0.2)
    finally:
        leave.set()
        holder.join()
    assert is_forked.wait(WITHIN_S)


def test_a_silent_server_does_not_delay_a_fork() -> None:
    """The handshake ends by its timeout; a fork meanwhile does not wait for it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ended: list[BaseException] = []

    def connect(port: int) -> None:
        connected = socket.create_connection(("127.0.0.1", port))
        try:
            secured_client(connected, context, "coordinator.shoal", 1.0)
        except TimeoutError as error:
            ended.append(error)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        thread = threading.Thread(target=connect, args=(silent.getsockname()[1],))
        thread.start()
        taken, _ = silent.accept()
        with taken:
            # The first bytes of the handshake: it has begun, and waits for an answer.
            assert taken.recv(1)
            forked()
            assert thread.is_alive()
            thread.join()
    assert [type(each) for each in ended] == [TimeoutError]


def test_an_answer_that_is_not_tls_is_an_oserror() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with socket.create_server(("127.0.0.1", 0)) as server:
        connected = socket.create_connection(server.getsockname())
        taken, _ = server.accept()
        with taken:
            taken.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            with pytest.raises(OSError, match=r"(?i)wrong.version"):
                secured_client(connected, context, "coordinator.shoal", 5.0)
