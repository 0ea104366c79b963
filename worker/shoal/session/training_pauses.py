"""For how long a member took no step when its generation changed, and what it took again."""

from collections import deque
from dataclasses import dataclass
from statistics import median

USUAL_OF = 16
"""So many of the newest steps say how long one usually takes."""


@dataclass(frozen=True, kw_only=True)
class TrainingPause:
    """Between the last step of one generation and the first of the next."""

    generation: int
    paused_s: float
    """From commit to commit, less what a step usually takes."""
    lost_steps: int
    """Steps that had been committed, and were taken again."""

    def __str__(self) -> str:
        steps = "step" if self.lost_steps == 1 else "steps"
        return f"paused {self.paused_s:.2f} s; {self.lost_steps} {steps} lost"


class TrainingPauses:
    """Told of each step as it is committed; times are of a clock that never jumps."""

    def __init__(self) -> None:
        self._generation = 0
        self._step = 0
        self._committed_s = 0.0
        self._gaps_s: deque[float] = deque(maxlen=USUAL_OF)

    def committed(self, generation: int, step: int, now_s: float) -> TrainingPause | None:
        """`step` is committed in that generation. The pause, if it is the first one there and not
        the first of all."""
        before, last_step, gap_s = self._generation, self._step, now_s - self._committed_s
        self._generation, self._step, self._committed_s = generation, step, now_s
        if before == 0:
            return None
        if generation == before:
            self._gaps_s.append(gap_s)
            return None
        usual_s = median(self._gaps_s) if self._gaps_s else 0.0
        return TrainingPause(
            generation=generation,
            paused_s=max(0.0, gap_s - usual_s),
            lost_steps=max(0, last_step + 1 - step),
        )
