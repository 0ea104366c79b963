"""A Shoal server as a child process, which is started and awaited until it serves."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

from shoal_client.local.process import ChildCommand, Process, Supervisor

START_S = 60.0

Found = TypeVar("Found")


def awaited(look: Callable[[], Found | None], within_s: float, what: str) -> Found:
    """Poll `look` until it finds something in another process; fail after the limit."""
    deadline_s = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, f"{what}: not within {within_s:g} s"
        time.sleep(0.02)
    return found


class ServedProcess:
    """`shoal SUBCOMMAND ...`, which writes its addresses into a file once it serves."""

    def __init__(
        self,
        supervisor: Supervisor,
        directory: Path,
        name: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        under: Sequence[str] = (),
    ) -> None:
        """Start the process. `under`: words of a command that runs the process, such as a shell
        with other limits."""
        self.name = name
        self.log_path = directory / f"{name}.log"
        self._ready_path = directory / f"{name}.json"
        command = (*under, sys.executable, "-m", "shoal_client", *arguments)
        self.process: Process = supervisor.spawn(
            ChildCommand(
                name=name,
                arguments=(*command, "--ready-file", str(self._ready_path)),
                log_path=self.log_path,
                environment=None if environment is None else {**os.environ, **environment},
            )
        )
        self.grpc = self.http = ""

    @property
    def runs(self) -> bool:
        return self.process.exit_code is None

    def ready(self) -> Self:
        """Wait until it serves; its own log explains a failure."""
        awaited(self.serves, START_S, f"{self.name} serves")
        return self

    def serves(self) -> bool:
        """True once it has written its addresses. Fails with its log if it has ended."""
        assert self.runs, self.log_path.read_text()
        if not self._ready_path.exists():
            return False
        addresses = json.loads(self._ready_path.read_text())
        self.grpc, self.http = addresses["grpc"], addresses.get("http", "")
        return True


__all__ = ["ServedProcess", "awaited"]
