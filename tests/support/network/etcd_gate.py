"""A TCP forwarder that a test can cut or slow: the network between a client and an etcd."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Forwards while open. `cut` breaks every connection; `silence` and `hang` keep connections
    open without traffic."""

    def __init__(self, target: str, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._passing = asyncio.Event()
        self._passing.set()
        self._refusing = False
        self._generation = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.endpoint = ""

    def cut(self) -> None:
        """Break all connections, and refuse new ones."""
        self._refusing = True
        self._drop()

    def silence(self) -> None:
        """Forward no bytes, in either direction, on old and new connections."""
        self._passing.clear()

    def hang(self) -> None:
        """Forward no bytes on the current connections any more; new connections work."""
        self._generation += 1

    def restore(self) -> None:
        """Forward again. Silenced connections are broken, and their bytes lost."""
        self._refusing = False
        if not self._passing.is_set():
            self._drop()
            self._passing.set()

    def _drop(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if self._refusing:
                return
            upstream_reader, upstream = await asyncio.open_connection(*self._target)
            self._writers.add(upstream)
            born = self._generation
            await asyncio.gather(
                self._pump(reader, upstream, born), self._pump(upstream_reader, writer, born)
            )
        except OSError:
            return  # the target is down, so the connection ends
        finally:
            writer.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, born: int
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._passing.wait()
                if born != self._generation:
                    continue
                if self._delay_s:
                    # Not awaited, so that several delayed writes are in transit at once.
                    asyncio.get_running_loop().call_later(self._delay_s, writer.write, data)
                    continue
                writer.write(data)
                await writer.drain()
        finally:
            writer.transport.abort()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self.serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        self._drop()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def open_gate(
    target: str, *, delay_s: float = 0.0, address: str = "127.0.0.1"
) -> AsyncIterator[Gate]:
    """Open a gate to `target` (host:port), at `gate.endpoint`, with `delay_s` each way."""
    gate = Gate(target, delay_s)
    server = await asyncio.start_server(gate.accept, address, 0)
    gate.endpoint = f"{address}:{server.sockets[0].getsockname()[1]}"
    try:
        yield gate
    finally:
        server.close()
        await gate.close()


__all__ = ["Gate", "open_gate"]
