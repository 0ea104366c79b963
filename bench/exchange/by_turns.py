"""Peers that exchange in turns, so that other work on the machine affects all of them alike.

Each peer has a server and workers as processes. All processes exist at the same time. While one
peer exchanges, the processes of the others are halted (SIGSTOP): a peer that polls its memory would
take a core from the measured one. Only Shoal's processes run on, since they must keep their leases.
"""

import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from statistics import median
from types import TracebackType
from typing import Self

from exchange.model import NUM_BYTES, Peer

WARM_UP = 3
MAX_EXCHANGES = 6
"""Maximum number of exchanges of a worker in a turn; a slow peer makes fewer."""
TURN_S = 1.5
START_S, END_S = 120.0, 30.0

_processes = multiprocessing.get_context("spawn")


class PeerFailed(Exception):
    """Raised if a peer does not start in time, or if one of its processes ends early."""


def _find(module: str) -> Peer:
    peer: Peer = importlib.import_module(f"exchange.{module}")  # type: ignore[assignment]
    return peer


def _serve(module: str, owner: Connection, num_workers: int) -> None:
    _find(module).serve(owner, num_workers)
    # Do not wait for the peer's own threads.
    os._exit(0)


def _work(module: str, address: str, number: int, num_workers: int, owner: Connection) -> None:
    """Run a worker: it receives the number of exchanges, and sends its start and end times."""
    exchange = _find(module).connect(address, number, num_workers)
    began_s = time.perf_counter()
    for _ in range(WARM_UP):
        exchange()
    owner.send((time.perf_counter() - began_s) / WARM_UP)
    try:
        while True:
            count = owner.recv()
            began_s = time.perf_counter()
            for _ in range(count):
                exchange()
            owner.send((began_s, time.perf_counter()))
    except EOFError:
        os._exit(0)


class RunningPeer:
    """A peer with its workers, ready to exchange."""

    def __init__(self, module: str, num_workers: int, environment: Mapping[str, str] = {}) -> None:
        """`environment`: variables that are set when the processes start."""
        self._module = module
        self._num_workers = num_workers
        self._environment = environment
        self._is_own = module == "parameter_client"
        self._stack = ExitStack()
        self._started: list[BaseProcess] = []
        self._workers: list[Connection] = []
        self._count = 1

    def __enter__(self) -> Self:
        before = {name: os.environ.get(name) for name in self._environment}
        os.environ.update(self._environment)
        try:
            self._start()
        except EOFError as error:
            self._stack.close()
            raise PeerFailed(f"{self._module} ended before it was measured") from error
        except BaseException:
            self._stack.close()
            raise
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        self._signal(signal.SIGSTOP)
        return self

    def _start(self) -> None:
        self._stack.callback(self._end)
        owner, other_end = _processes.Pipe()
        self._stack.callback(owner.close)
        self._launch(_serve, self._module, other_end, self._num_workers)
        other_end.close()
        if not owner.poll(START_S):
            raise PeerFailed(f"{self._module} did not start within {START_S:g} s")
        address = owner.recv()
        for number in range(self._num_workers):
            end, other_end = _processes.Pipe()
            self._stack.callback(end.close)
            self._launch(_work, self._module, address, number, self._num_workers, other_end)
            other_end.close()
            self._workers.append(end)
        usual_s = max(worker.recv() for worker in self._workers)
        self._count = max(1, min(MAX_EXCHANGES, int(TURN_S / usual_s)))

    def _launch(self, target: object, *args: object) -> None:
        process = _processes.Process(target=target, args=args)  # type: ignore[arg-type]
        process.start()
        self._started.append(process)

    def turn_gb_s(self) -> float:
        """Run one turn; return GB per second in both directions together, over all workers."""
        self._signal(signal.SIGCONT)
        for worker in self._workers:
            worker.send(self._count)
        try:
            began_s, ended_s = zip(*(worker.recv() for worker in self._workers), strict=True)
        except EOFError as error:
            raise PeerFailed(f"{self._module} ended while it was measured") from error
        self._signal(signal.SIGSTOP)
        num_bytes = 2 * NUM_BYTES * self._count * self._num_workers
        return num_bytes / (max(ended_s) - min(began_s)) / 1e9

    def _signal(self, number: signal.Signals) -> None:
        # Shoal's processes run on: they have to keep their leases, and an idle one uses little CPU.
        for process in () if self._is_own else self._started:
            assert process.pid is not None
            os.kill(process.pid, number)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._signal(signal.SIGCONT)
        self._stack.close()

    def _end(self) -> None:
        for process in reversed(self._started):
            process.join(END_S)
            process.kill()


def by_turns(
    peers: Mapping[str, tuple[str, Mapping[str, str]]], num_workers: int, num_turns: int
) -> dict[str, list[float]]:
    """GB/s of each turn of each peer. `peers`: module and environment of each, by name."""
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(RunningPeer(module, num_workers, environment))
            for name, (module, environment) in peers.items()
        }
        turns: dict[str, list[float]] = {name: [] for name in running}
        for _ in range(num_turns):
            for name, peer in running.items():
                turns[name].append(peer.turn_gb_s())
    return turns


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median of our GB/s over theirs in the same round."""
    return median(own / other for own, other in zip(ours, theirs, strict=True))
