"""What a tracker of experiments is to the job that logs to it.

One member writes at a time. When another one takes over it reads what is there already, and goes on
behind it: so a member that is killed between two of its writes leaves nothing out and nothing is
written twice. For that the trackers keep their values where all hosts see them, and a lock beside
them keeps two processes from writing at once, which the system takes away from a process that dies.
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
    """One run of a job, from its first step to its end, over all restarts."""

    job: str
    begun_unix_s: float | None
    """When it began, for members that were there; None: for those that came later, the newest."""


@dataclass(frozen=True, kw_only=True)
class WrittenUpTo:
    """How far a run is written. Steps are written in order."""

    step: int = -1
    """The highest."""
    names: frozenset[str] = frozenset()
    """What is written of that step."""

    def rest(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """What of these values is not."""
        if step < self.step:
            return {}
        known = self.names if step == self.step else frozenset()
        return {name: value for name, value in values.items() if name not in known}

    def plus(self, step: int, names: frozenset[str]) -> "WrittenUpTo":
        return WrittenUpTo(
            step=step, names=names | (self.names if step == self.step else frozenset())
        )


class OpenRun(ABC):
    """A run that this process writes."""

    written: WrittenUpTo
    """As of when it was opened."""

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
        """Append the values of a step, as of that time."""

    @abstractmethod
    def flush(self) -> None:
        """Return when all that was written would outlive this process."""

    @abstractmethod
    def close(self) -> None:
        """Flush, and let another process write."""


class Tracker(ABC):
    """Where a job's values go: see `shoal.join(trackers=...)`."""

    @abstractmethod
    def open(self, run: Run) -> OpenRun:
        """Open the run, or begin it; by the one member that writes, on a thread of its own.

        Raises Busy while another process still writes it.
        """


class Busy(Exception):
    """Another process writes this run still."""


def require(module: str, *, tracker: str, extra: str) -> None:
    """Raise InvalidSpec, with what to install, if the package of a tracker is not there."""
    parents = module.split(".")
    if any(find_spec(".".join(parents[: n + 1])) is None for n in range(len(parents))):
        raise InvalidSpec(
            f"shoal.{tracker} needs a package that is not installed",
            seen=f"no module {module}",
            expected=f"the extra {extra}",
            fix=f"pip install 'shoal[{extra}]'",
        )


class Lock:
    """That of the one process that writes a run, in a file. A process that dies gives it back, and
    processes that it has forked do not have it."""

    def __init__(self, path: Path) -> None:
        """Raises Busy if another process has it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            self._file.close()
            raise Busy(str(path)) from error

    def release(self) -> None:
        """May be called twice."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


RUN_NAME = re.compile(r"run-(\d{13})")
"""Of a run: the milliseconds when it began."""


def run_name(run: Run, found: list[str], now_unix_s: float) -> str:
    """The name of the run, given the names of those that are there: the newest one if it began when
    this one did or later; or, for a member that came later, the newest."""
    newest = max((name for name in found if RUN_NAME.fullmatch(name)), default="")
    begun_unix_s = run.begun_unix_s
    if begun_unix_s is None and newest:
        return newest
    own = f"run-{int(1000 * (begun_unix_s or now_unix_s)):013d}"
    return max(newest, own)
