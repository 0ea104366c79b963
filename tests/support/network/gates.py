"""Gates on a separate event loop, for tests that are not coroutines."""

from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, Self, TypeVar

from support.network.etcd_gate import Gate, open_gate
from support.processes.loop_thread import LoopThread

Result = TypeVar("Result")


class Wire:
    """Traffic through one gate or several, as one wire that a test can cut."""

    def __init__(self, network: "Network", gates: list[Gate]) -> None:
        self._network = network
        self._gates = gates

    @property
    def endpoints(self) -> list[str]:
        return [gate.endpoint for gate in self._gates]

    def cut(self) -> None:
        """Break every connection, and prevent new ones."""
        self._network.run(self._each(Gate.cut))

    def silence(self) -> None:
        """Carry no more bytes in either direction, without closing connections."""
        self._network.run(self._each(Gate.silence))

    def restore(self) -> None:
        self._network.run(self._each(Gate.restore))

    async def _each(self, act: Any) -> None:
        for gate in self._gates:
            act(gate)


class Network:
    """Opens wires; the end of its `with` block closes them."""

    def __init__(self) -> None:
        self._loop = LoopThread("network")
        self._open = AsyncExitStack()

    def wire(self, *targets: str, address: str = "127.0.0.1") -> Wire:
        """Make a wire to these targets (host:port), each behind an endpoint of the wire's own."""
        return Wire(self, [self.run(self._gate(target, address)) for target in targets])

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._loop.run(work)

    async def _gate(self, target: str, address: str) -> Gate:
        return await self._open.enter_async_context(open_gate(target, address=address))

    def __enter__(self) -> Self:
        self._loop.start()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.run(self._open.aclose())
        finally:
            self._loop.close()


__all__ = ["Network", "Wire"]
