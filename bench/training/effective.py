"""Figures of a run from the steps that its workers committed: pure.

*Useful* is a step that the training at the end of the run still has: a step that a restart took
back counts once, when it was trained again. The step time is the system's own, the median of what
lies between two useful steps, so that the figures compare what changes cost and not how fast a
step is; `steps_per_s` compares the latter.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from training.steps import Step


@dataclass(frozen=True, kw_only=True)
class Effective:
    """Figures of one run."""

    wall_s: float
    useful_steps: int
    step_s: float
    """Median time of a step."""
    effective: float
    """Useful steps times the median step, over the wall time; at most 1."""
    steps_per_s: float
    """Useful steps over the wall time."""
    steps_twice: int
    """Steps that were trained again, as a restart had taken them back."""
    steps_lost: int
    """Steps of the order of samples that no worker ever committed, though later ones were."""
    longest_pause_s: float
    paused_s: float
    """Wall time that is not useful, in which nothing was trained or the same was trained again."""

    def paused_per_change_s(self, num_changes: int) -> float:
        return self.paused_s / max(1, num_changes)


def effective(steps: Iterable[Step], start_s: float, end_s: float) -> Effective:
    """Figures of the time from `start_s` to `end_s`, of all workers' steps."""
    ordered = sorted(
        (step for step in steps if step.at_s <= end_s), key=lambda step: (step.at_s, step.step)
    )
    if not ordered:
        return _nothing(end_s - start_s)
    before = max((step.step for step in ordered if step.at_s < start_s), default=-1)
    reached = _last_reached(ordered)
    front = _front(ordered, start_s)
    gaps = [after - at for at, after in pairwise(front)]
    usual_s = median(gaps) if gaps else 0.0
    wall_s = end_s - start_s
    useful = max(0, reached - before)
    share = min(1.0, useful * usual_s / wall_s)
    seen = {step.step for step in ordered}
    executed = {(step.formation, step.step) for step in ordered}
    edges = [start_s, *front, end_s]
    return Effective(
        wall_s=wall_s,
        useful_steps=useful,
        step_s=usual_s,
        effective=share,
        steps_per_s=useful / wall_s,
        steps_twice=len(executed) - len(seen),
        steps_lost=len(set(range(min(seen), max(seen) + 1)) - seen),
        longest_pause_s=max(after - at for at, after in pairwise(edges)),
        paused_s=wall_s * (1.0 - share),
    )


def _nothing(wall_s: float) -> Effective:
    return Effective(
        wall_s=wall_s,
        useful_steps=0,
        step_s=0.0,
        effective=0.0,
        steps_per_s=0.0,
        steps_twice=0,
        steps_lost=0,
        longest_pause_s=wall_s,
        paused_s=wall_s,
    )


def _last_reached(ordered: Sequence[Step]) -> int:
    """The last step of the workers that train at the end; a job that lost all began anew."""
    formation = ordered[-1].formation
    return max(step.step for step in ordered if step.formation == formation)


def _front(ordered: Sequence[Step], start_s: float) -> list[float]:
    """Times from the start at which a step further than any before was first committed."""
    times, furthest = [], -1
    for step in ordered:
        if step.step > furthest:
            furthest = step.step
            if step.at_s >= start_s:
                times.append(step.at_s)
    return times


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Training time between two checkpoints that loses least (Young 1974; Daly 2006, equation 37).

    `cost_s`: time of a checkpoint in which nothing is trained. `mtbf_s`: mean time between
    interruptions of the job.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def checkpoint_every(cost_s: float, mtbf_s: float, step_s: float) -> int:
    """The same in whole steps, at least one."""
    return max(1, round(daly_interval_s(cost_s, mtbf_s) / step_s))
