"""Record of a demo worker's steps, from which the count of trained samples is checked."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType


class Audit:
    """A file of JSON lines, `<member>.<pid>.jsonl`; nothing is written without a directory.

    Each line is one write to the file, so a SIGKILL right after a call loses nothing.
    """

    def __init__(self, directory: Path | None, member_id: str) -> None:
        self._path = directory / f"{member_id}.{os.getpid()}.jsonl" if directory else None
        self._descriptor = -1

    def __enter__(self) -> "Audit":
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._descriptor = os.open(self._path, flags, 0o644)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def begin(self, generation: int, step: int, epoch: int, positions: Sequence[int]) -> None:
        """Record the beginning of a step, before the step can have any effect."""
        self._write("begin", generation, step, epoch=epoch, positions=list(positions))

    def commit(self, generation: int, step: int) -> None:
        """Record the commit of a step, once the step cannot be undone."""
        self._write("commit", generation, step)

    def _write(self, event: str, generation: int, step: int, **more: object) -> None:
        if self._descriptor < 0:
            return
        line = {
            "event": event,
            "at_s": time.monotonic(),
            "generation": generation,
            "step": step,
            **more,
        }
        os.write(self._descriptor, (json.dumps(line) + "\n").encode())
