"""Interface of an experiment tracker, to which a job logs.

One member writes at a time. The next writer continues after the stored values, so that none is
missing or written twice. This requires storage that all hosts share, or a server.
"""

import fcntl
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from shoal_proto.errors import InvalidSpec


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a job, over all restarts."""

    job: str
    begun_unix_s: float | None
    """None on members that joined later: they continue the newest run."""


@dataclass(frozen=True, kw_only=True)
class WriteProgress:
    """Position up to which a run is written. Steps are written in order."""

    step: int = -1
    names: frozenset[str] = frozenset()
    """Names with written values of that step."""

    def unwritten(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Return the values that are not written yet."""
        if step < self.step:
            return {}
        written_names = self.names if step == self.step else frozenset()
        return {name: value for name, value in values.items() if name not in written_names}

    def with_new(self, step: int, names: frozenset[str]) -> "WriteProgress":
        return WriteProgress(
            step=step, names=names | (self.names if step == self.step else frozenset())
        )


class OpenRun(ABC):
    """A run that this process writes."""

    written: WriteProgress

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
        """Append the values of a step, with this time."""

    @abstractmethod
    def flush(self) -> None:
        """Return when all written values would survive the end of this process."""

    @abstractmethod
    def close(self) -> None:
        """Flush, and release the run: then another process may write it."""


class Tracker(ABC):
    """Destination of a job's values: see `shoal.join(trackers=...)`."""

    @abstractmethod
    def open(self, run: Run) -> OpenRun:
        """Open the run, or create it. The writer calls this on a thread of its own.

        Raises RunInUse while another process still writes the run.
        """


class RunInUse(Exception):
    """Another process still writes this run."""


def require(module: str, *, tracker: str, extra: str) -> None:
    """Raise InvalidSpec, which says what to install, if a package is missing."""
    parents = module.split(".")
    if any(find_spec(".".join(parents[: n + 1])) is None for n in range(len(parents))):
        raise InvalidSpec(
            f"shoal.{tracker} needs a package that is not installed",
            seen=f"no module {module}",
            expected=f"the extra {extra}",
            fix=f"pip install 'shoal[{extra}]'",
        )


class Lock:
    """Lock on a file, held by the process that writes a run.

    The system releases the lock when the process dies; forked processes do not inherit it.
    """

    def __init__(self, path: Path) -> None:
        """Acquire the lock. Raises RunInUse if another process holds it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            self._file.close()
            raise RunInUse(str(path)) from error

    def release(self) -> None:
        """Release the lock. May be called twice."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


RUN_NAME = re.compile(r"run-(\d{13})")
"""Name of a run, with the time of its beginning in milliseconds."""


def run_name(run: Run, found: list[str], now_unix_s: float) -> str:
    """Return the name of the run: the newest of the names found, or a new name.

    The newest counts unless its run is known to have begun before this one.
    """
    newest = max((name for name in found if RUN_NAME.fullmatch(name)), default="")
    begun_unix_s = run.begun_unix_s
    if begun_unix_s is None and newest:
        return newest
    new_name = f"run-{int(1000 * (begun_unix_s or now_unix_s)):013d}"
    return max(newest, new_name)
