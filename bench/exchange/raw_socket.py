"""Plain TCP: the bytes alone, without names, pieces, checksums or retries."""

import socket
import threading
from multiprocessing.connection import Connection

from exchange.model import (
    NUM_BYTES,
    Exchange,
    Parameters,
    await_end,
    flat_parts,
    new_gradients,
)


def serve(owner: Connection, num_workers: int) -> None:
    parameters = Parameters()
    listener = socket.create_server(("127.0.0.1", 0), backlog=num_workers)

    def answer(connection: socket.socket) -> None:
        received = bytearray(NUM_BYTES)
        parts = flat_parts(received)
        with connection:
            while _receive(connection, memoryview(received)):
                with parameters.lock:
                    parameters.apply(parts)
                    for value in parameters.values:
                        connection.sendall(value.numpy().data.cast("B"))

    def accept() -> None:
        for _ in range(num_workers):
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    owner.send(str(listener.getsockname()[1]))
    await_end(owner)


def connect(address: str, number: int, num_workers: int) -> Exchange:
    connection = socket.create_connection(("127.0.0.1", int(address)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    gradients, values = new_gradients(), bytearray(NUM_BYTES)

    def exchange() -> None:
        for gradient in gradients:
            connection.sendall(gradient.numpy().data.cast("B"))
        if not _receive(connection, memoryview(values)):
            raise ConnectionError("the server closed the connection")

    return exchange


def _receive(connection: socket.socket, into: memoryview) -> bool:
    """Fill the buffer. Returns False if the other end is closed."""
    done = 0
    while done < len(into):
        count = connection.recv_into(into[done:])
        if not count:
            return False
        done += count
    return True
