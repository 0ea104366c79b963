"""Figures of a run from the steps that its workers committed; pure functions.

A step is *useful* if the training at the end of the run still has it; a step that was undone by a
restart and trained again counts once. The step time is measured for each system, as the median time
between two useful steps. So `effective` shows what changes cost, and not how fast a system takes
steps; `steps_per_s` depends on both.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from training.steps import Step

LONG_STEPS = 2.0


@dataclass(frozen=True, kw_only=True)
class Effective:
    """Figures of one run."""

    wall_s: float
    useful_steps: int
    step_s: float
    """Median time between two useful steps."""
    effective: float
    """Useful steps times the median step, over the wall time; at most 1."""
    steps_per_s: float
    """Useful steps over the wall time."""
    steps_twice: int
    """Steps that were trained again, since a restart had undone them."""
    steps_lost: int
    """Steps that no worker ever committed, although later ones were committed."""
    longest_pause_s: float
    paused_s: float
    """Wall time without a useful step: nothing was trained, or steps were trained again. Steps that
    were slower than the median count as well."""
    stalled_s: float
    """Part of the wall time in gaps of more than LONG_STEPS median steps between two useful steps,
    without one median step for each gap: what changes cost, and not the spread of the steps."""

    def paused_per_change_s(self, num_changes: int) -> float | None:
        """Return the paused time divided by the number of changes; None without changes."""
        return self.paused_s / num_changes if num_changes else None


def effective(steps: Iterable[Step], start_s: float, end_s: float) -> Effective:
    """Return the figures of all workers' steps from `start_s` to `end_s`."""
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
    all_gaps = [after - at for at, after in pairwise([start_s, *front, end_s])]
    return Effective(
        wall_s=wall_s,
        useful_steps=useful,
        step_s=usual_s,
        effective=share,
        steps_per_s=useful / wall_s,
        steps_twice=len(executed) - len(seen),
        steps_lost=len(set(range(min(seen), max(seen) + 1)) - seen),
        longest_pause_s=max(all_gaps),
        paused_s=wall_s * (1.0 - share),
        stalled_s=sum(gap - usual_s for gap in all_gaps if gap > LONG_STEPS * usual_s),
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
        stalled_s=wall_s,
    )


def _last_reached(ordered: Sequence[Step]) -> int:
    """Return the last step of the newest formation; a job that lost all its workers starts over."""
    formation = ordered[-1].formation
    return max(step.step for step in ordered if step.formation == formation)


def _front(ordered: Sequence[Step], start_s: float) -> list[float]:
    """Return the times from `start_s` on at which a step later than all before was committed."""
    times, furthest = [], -1
    for step in ordered:
        if step.step > furthest:
            furthest = step.step
            if step.at_s >= start_s:
                times.append(step.at_s)
    return times


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the time between checkpoints that loses least (Young 1974; Daly 2006, equation 37).

    `cost_s`: time of a checkpoint in which nothing is trained. `mtbf_s`: mean time between
    interruptions of the job.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def checkpoint_every(cost_s: float, mtbf_s: float, step_s: float) -> int:
    """Return the interval of `daly_interval_s` in whole steps, at least one."""
    return max(1, round(daly_interval_s(cost_s, mtbf_s) / step_s))
