"""Real member processes for tests, forked from a server that has already imported torch."""

import os
import queue
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

import torch
from support.processes.forking import forked
from support.processes.stacks import Stacks

Report = Callable[..., None]


class Rank:
    """A process that runs `body(report, *arguments)`; `report(kind, **data)` reports to the
    test."""

    def __init__(self, body: Callable[..., None], *arguments: Any) -> None:
        self._pipe, child = forked.Pipe(duplex=False)
        self._events: queue.SimpleQueue[tuple[str, dict[str, Any]] | None] = queue.SimpleQueue()
        self._stacks = Stacks()
        self.process = forked.Process(target=_run, args=(child, self._stacks, body, arguments))
        self.process.start()
        child.close()
        # Read reports at once: a full pipe would block the process in its report.
        self._reader = threading.Thread(target=self._read, name="read-rank", daemon=True)
        self._reader.start()
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def expect(self, kind: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """Return the data of the next report of this kind; other reports are kept in `seen`."""
        got, data = self.expect_any(kind, "raised", timeout_s=timeout_s)
        if got != kind:
            raise AssertionError(f"raised instead of {kind!r}: {data['trace']}")
        return data

    def expect_any(self, *kinds: str, timeout_s: float = 60.0) -> tuple[str, dict[str, Any]]:
        """Return the next report of one of these kinds; other reports are kept in `seen`."""
        while True:
            try:
                report = self._events.get(timeout=timeout_s)
            except queue.Empty:
                what = f"no {kinds} in {timeout_s} s; saw {self.kinds()}\n{self.stacks()}"
                raise AssertionError(what) from None
            if report is None:
                self._events.put(None)
                raise AssertionError(f"ended without {kinds}; saw {self.kinds()}")
            self.seen.append(report)
            if report[0] in kinds:
                return report

    def catch_up(self) -> None:
        """Move all reports so far to `seen`, without waiting for more."""
        while not self._events.empty():
            report = self._events.get()
            if report is None:
                self._events.put(None)
                return
            self.seen.append(report)

    def drain(self) -> None:
        """Move all remaining reports of an ended process to `seen`."""
        while (report := self._events.get(timeout=30)) is not None:
            self.seen.append(report)
        self._events.put(None)

    def _read(self) -> None:
        with self._pipe:
            while True:
                try:
                    self._events.put(self._pipe.recv())
                except (EOFError, OSError):
                    self._events.put(None)
                    return

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.seen]

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def join(self, timeout_s: float = 60.0) -> int:
        """Wait for the end of the process, and return its exit code (-9: killed)."""
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            raise AssertionError(f"still running after {timeout_s} s\n{self.stacks()}")
        return self.process.exitcode

    def stacks(self) -> str:
        """Return the stacks of all threads of the process, for the message of a failure."""
        pid = self.process.pid
        return self._stacks.of(pid) if pid is not None and self.process.is_alive() else "(ended)"

    def close(self) -> None:
        """Kill the process unless it has ended, and wait for the end of its reader."""
        # Not `send_signal`, which fails if the process ends at this moment.
        self.process.kill()
        self.process.join(10)
        self._reader.join(10)
        self._stacks.close()


class Ranks:
    """Starts ranks, and ends all of them with its `with` block."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []

    def start(self, body: Callable[..., None], *arguments: Any) -> Rank:
        rank = Rank(body, *arguments)
        self._ranks.append(rank)
        return rank

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.close()


def _run(
    events: Connection, stacks: Stacks, body: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    stacks.install()
    torch.set_num_threads(1)

    def report(kind: str, /, **data: Any) -> None:
        events.send((kind, data))

    try:
        body(report, *arguments)
    except SystemExit as end:
        report("exits", code=end.code, reason=str(end))
        raise
    except BaseException as error:
        report("raised", error=type(error).__name__, text=str(error), trace=traceback.format_exc())
        raise SystemExit(1) from error
