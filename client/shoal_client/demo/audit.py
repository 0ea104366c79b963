"""Audit of a run, from the files that every worker wrote. A worker writes a line before a step can
contribute to the model (`begin`), and one when the step is committed. The kernel has a line before
the worker goes on, so a SIGKILL loses none. Times are CLOCK_MONOTONIC.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

Sample = tuple[int, int]
GAP_WINDOW_S = 2.0


@dataclass(frozen=True, kw_only=True)
class AuditLine:
    """A line of a worker's audit."""

    event: str
    """"begin" or "commit"."""
    at_s: float
    generation: int
    step: int
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WorkerAudit:
    """Audit lines of one worker process, in order."""

    name: str
    lines: tuple[AuditLine, ...]

    @property
    def commits(self) -> list[AuditLine]:
        return [line for line in self.lines if line.event == "commit"]

    @property
    def begins(self) -> list[AuditLine]:
        return [line for line in self.lines if line.event == "begin"]


@dataclass(frozen=True, kw_only=True)
class SampleAudit:
    """Counts of samples."""

    lost: int
    """Samples that were never part of a committed step."""
    repeated: int
    """Contributions beyond the first of each sample."""
    steps: int
    """Committed steps in the history of the final weights."""
    samples: int
    """All contributions."""


def read_account(path: Path) -> WorkerAudit:
    """The audit in a file, without a last line that a kill has cut short."""
    lines = []
    for text in path.read_text().splitlines(keepends=True):
        if text.endswith("\n"):
            entry = json.loads(text)
            samples = tuple((entry["epoch"], each) for each in entry.pop("positions", ()))
            entry.pop("epoch", None)
            lines.append(AuditLine(**entry, samples=samples))
    return WorkerAudit(name=path.stem, lines=tuple(lines))


def count_synchronous(accounts: Iterable[WorkerAudit], expected: Iterable[Sample]) -> SampleAudit:
    """Count a synchronous run. A committed step counts unless a later generation took the step
    again: then no member survived that had committed it.
    """
    accounts = list(accounts)
    begun: dict[tuple[int, int], Counter[Sample]] = {}
    first_step: dict[int, int] = {}
    for account in accounts:
        for line in account.begins:
            begun.setdefault((line.generation, line.step), Counter()).update(line.samples)
            first = first_step.get(line.generation, line.step)
            first_step[line.generation] = min(first, line.step)
    committed = {(line.generation, line.step) for account in accounts for line in account.commits}
    used: Counter[Sample] = Counter()
    steps = 0
    for generation, step in sorted(committed):
        redone = any(later > generation and first <= step for later, first in first_step.items())
        if not redone:
            steps += 1
            used.update(begun[generation, step])
    return _count(used, expected, steps)


def count_asynchronous(
    accounts: Iterable[WorkerAudit], expected: Iterable[Sample], pushes_applied: int | None
) -> SampleAudit:
    """Count a run in which each worker's step is one push. A killed worker's last push may be
    applied without an acknowledgement: `pushes_applied` shows how many such pushes count. None
    (unknown): all of them, so that no repetition is missed.
    """
    accounts = list(accounts)
    used: Counter[Sample] = Counter()
    unanswered: list[AuditLine] = []
    steps = 0
    for account in accounts:
        done = {line.step for line in account.commits}
        steps += len(done)
        for line in account.begins:
            if line.step in done:
                used.update(line.samples)
            else:
                unanswered.append(line)
    if pushes_applied is not None:
        unanswered = unanswered[: max(0, pushes_applied - steps)]
    for line in unanswered:
        used.update(line.samples)
    return _count(used, expected, steps + len(unanswered))


def _count(used: Counter[Sample], expected: Iterable[Sample], steps: int) -> SampleAudit:
    lost = sum(1 for sample in expected if sample not in used)
    return SampleAudit(
        lost=lost, repeated=used.total() - len(used), steps=steps, samples=used.total()
    )


def recovery_s(
    survivors: Iterable[WorkerAudit], killed_at_s: float, *, after_generation: int | None = None
) -> float | None:
    """Seconds from the kill to the next step that a survivor completed; None: no such step.

    With `after_generation` only steps of a later generation count: the killed worker may have
    contributed to earlier ones.
    """
    times = [
        line.at_s
        for account in survivors
        for line in account.commits
        if line.at_s > killed_at_s
        and (after_generation is None or line.generation > after_generation)
    ]
    return min(times) - killed_at_s if times else None


def pause_s(survivors: Sequence[WorkerAudit], killed_at_s: float) -> float:
    """The longest gap between survivors' steps in the two seconds after the kill, minus the median
    gap in the two seconds before. The first gap begins at the kill; it is two seconds if no step
    follows.
    """
    times = sorted(line.at_s for account in survivors for line in account.commits)
    before = _gaps([at for at in times if killed_at_s - GAP_WINDOW_S <= at <= killed_at_s])
    after = _gaps(
        [killed_at_s, *(at for at in times if killed_at_s < at <= killed_at_s + GAP_WINDOW_S)]
    )
    usual_s = median(before) if before else 0.0
    return max(0.0, max(after, default=GAP_WINDOW_S) - usual_s)


def _gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def span_s(accounts: Iterable[WorkerAudit]) -> float:
    """Seconds from the beginning of the first step to the commit of the last one."""
    lines = [line for account in accounts for line in account.lines]
    starts = [line.at_s for line in lines if line.event == "begin"]
    ends = [line.at_s for line in lines if line.event == "commit"]
    return max(ends) - min(starts) if starts and ends else 0.0


def generation_at(accounts: Iterable[WorkerAudit], at_s: float) -> int:
    """Newest generation in which a worker trained by the time `at_s`; 0: none."""
    seen = (line.generation for each in accounts for line in each.lines if line.at_s <= at_s)
    return max(seen, default=0)
