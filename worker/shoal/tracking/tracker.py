"""Interface of a tracker of experiments, to which a job logs.

One member writes at a time. A member that takes over reads what is stored already, and continues
after it. So nothing is missing and nothing is written twice, even if a member is killed between two
of its writes. For that the trackers keep their values on storage that all hosts see. A lock beside
them keeps two processes from writing at once; the system releases it when its process dies.
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
    """Begin of the run, for members that were present; None for later members, which take the
    newest."""


@dataclass(frozen=True, kw_only=True)
class WriteProgress:
    """Progress of what is written of a run. Steps are written in order."""

    step: int = -1
    """The highest step written."""
    names: frozenset[str] = frozenset()
    """Names written of that step."""

    def rest(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Return those of the values that are not written yet."""
        if step < self.step:
            return {}
        known = self.names if step == self.step else frozenset()
        return {name: value for name, value in values.items() if name not in known}

    def plus(self, step: int, names: frozenset[str]) -> "WriteProgress":
        return WriteProgress(
            step=step, names=names | (self.names if step == self.step else frozenset())
        )


class OpenRun(ABC):
    """A run that this process writes."""

    written: WriteProgress
    """State at the time it was opened."""

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
    """Destination of a job's values: see `shoal.join(trackers=...)`."""

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
    """Lock, in a file, of the one process that writes a run. A process that dies releases it, and
    forked processes do not hold it."""

    def __init__(self, path: Path) -> None:
        """Take the lock. Raises Busy if another process holds it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            self._file.close()
            raise Busy(str(path)) from error

    def release(self) -> None:
        """Release the lock. May be called twice."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


RUN_NAME = re.compile(r"run-(\d{13})")
"""Name of a run, with its begin in milliseconds."""


def run_name(run: Run, found: list[str], now_unix_s: float) -> str:
    """The name of the run, given the names of those that are there: the newest one if it began when
    this one did or later; or, for a member that came later, the newest."""
    newest = max((name for name in found if RUN_NAME.fullmatch(name)), default="")
    begun_unix_s = run.begun_unix_s
    if begun_unix_s is None and newest:
        return newest
    own = f"run-{int(1000 * (begun_unix_s or now_unix_s)):013d}"
    return max(newest, own)
