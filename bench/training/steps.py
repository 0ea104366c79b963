"""Reads the steps that workers committed, and computes figures from them."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

POLL_S = 0.05
"""Interval between reads. It does not affect accuracy, since each line contains its time."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A committed step of one worker."""

    at_s: float
    pid: int
    agent: int
    """Process id of the worker's parent."""
    formation: int
    """Number of the set of workers that took the step together: Shoal's generation, torchft's
    quorum or number of participants, a number that torchrun's rank 0 chose; 0 for one process."""
    world_size: int
    step: int = 0
    """Number of the step; 0 from workers that do not record it."""


class Steps:
    """All steps that workers wrote to a directory; `read` adds the new ones."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}
        self.by_pid: dict[int, list[Step]] = {}

    def read(self) -> None:
        for path in self._directory.glob("steps-*"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            complete = text[: text.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(complete)
            for line in complete.splitlines():
                step = Step(**json.loads(line))
                self.by_pid.setdefault(step.pid, []).append(step)

    def drop(self, pid: int) -> None:
        """Forget the steps of a process that has ended, and delete its file."""
        self.by_pid.pop(pid, None)
        path = self._directory / f"steps-{pid}"
        self._offsets.pop(path, None)
        path.unlink(missing_ok=True)

    def newest(self) -> Step | None:
        """Return the last step that any worker committed."""
        return max((own[-1] for own in self.by_pid.values()), key=_at, default=None)

    def await_true(self, holds: Callable[[], bool], within_s: float) -> bool:
        """Read until `holds` returns True. Returns False if it does not within `within_s`."""
        deadline_s = time.monotonic() + within_s
        while True:
            self.read()
            if holds():
                return True
            if time.monotonic() > deadline_s:
                return False
            time.sleep(POLL_S)

    def training(self, world_size: int, num_steps: int) -> list[int]:
        """Return the process ids of the newest formation if it has `world_size` workers, each has
        taken `num_steps` steps in it, and none is more than a second behind; else an empty list."""
        newest = self.newest()
        if newest is None or newest.world_size != world_size:
            return []
        pids = [
            pid
            for pid, own in self.by_pid.items()
            if len(own) >= num_steps
            and own[-num_steps].formation == own[-1].formation == newest.formation
            and own[-num_steps].world_size == world_size
            and newest.at_s - own[-1].at_s < 1.0
        ]
        return sorted(pids) if len(pids) == world_size else []

    def first(self, pid: int, *, after_s: float, where: Callable[[Step], bool]) -> float | None:
        """Return the time of the worker's first step after `after_s` for which `where` is True."""
        own = self.by_pid.get(pid, [])
        return next((step.at_s for step in own if step.at_s > after_s and where(step)), None)

    def await_step(self, pids: Iterable[int], *, after_s: float, within_s: float) -> bool:
        """Read until each of the workers has committed a step after that time."""
        waited = list(pids)
        return self.await_true(
            lambda: all(self.by_pid[pid][-1].at_s > after_s for pid in waited), within_s
        )

    def all_first(
        self, pids: Iterable[int], *, after_s: float, where: Callable[[Step], bool]
    ) -> float | None:
        """Return the time by which each worker had committed a step after `after_s` for which
        `where` is True; None if a worker has not."""
        times = [self.first(pid, after_s=after_s, where=where) for pid in pids]
        known = [at_s for at_s in times if at_s is not None]
        return max(known) if known and len(known) == len(times) else None

    def gaps(self, pid: int, from_s: float, to_s: float) -> list[float]:
        """Return the seconds between consecutive committed steps whose gap overlaps the range."""
        pairs = pairwise(step.at_s for step in self.by_pid[pid])
        return [end - start for start, end in pairs if end >= from_s and start <= to_s]

    def pause(self, pids: Iterable[int], at_s: float, around_s: float) -> float:
        """Return the longest gap of a worker within `around_s` of `at_s`, minus its usual gap
        before, in seconds."""
        longest = 0.0
        for pid in pids:
            usual = median(self.gaps(pid, at_s - 6 * around_s, at_s - around_s))
            longest = max(longest, max(self.gaps(pid, at_s - around_s, at_s + around_s)) - usual)
        return longest


def _at(step: Step) -> float:
    return step.at_s
