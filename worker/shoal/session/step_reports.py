"""What the status page learns of a member's steps."""

import os
import time
from pathlib import Path

import structlog
from torch import Tensor

from shoal.membership.health import HealthReporter
from shoal.session.elastic_controller import ElasticController
from shoal.session.training_pauses import TrainingPauses
from shoal.strategies.base import Strategy
from shoal_proto.errors import InvalidSpec
from shoal_proto.health import CourseFigures, HealthFigures

log = structlog.get_logger(__name__)

INTERVAL_S = 1.0
"""Reading a loss may wait for the device, so it is done no more often than this."""


def check_entered(reports: "StepReports | None", call: str) -> None:
    """Raise InvalidSpec for a call outside the block of its session, which alone has some."""
    if reports is None:
        raise InvalidSpec(
            f"{call} outside a session",
            seen="a session whose `with` block was not entered, or is left",
            expected="with shoal.join(...) as session: ..., and the call in it",
        )


class StepReports:
    """Health reports of one member, taken from its steps."""

    def __init__(self, controller: ElasticController) -> None:
        member, membership = controller.member, controller.membership
        self._controller = controller
        self._pauses = TrainingPauses()
        self._health = HealthReporter(
            lambda: membership.http_url,
            member.spec.job,
            member.member_id,
            member.incarnation,
            interval_s=INTERVAL_S,
        )
        self._health.update(HealthFigures(step=0, device=member.info.device))
        self._strategy: Strategy | None = None
        self._reported_s = 0.0
        self._samples = 0
        self._num_steps: int | None = None
        self._unreported: tuple[Tensor | None, float] | None = None

    def trains_for(self, num_steps: int | None) -> None:
        """The job has so many steps, where that is known."""
        self._num_steps = num_steps

    def step_done(
        self, strategy: Strategy, loss: Tensor | None, step_time_s: float, num_samples: int
    ) -> None:
        """A step was committed. Costs nothing but once in an interval."""
        if strategy.synchronous:
            self._note_pause(strategy)
        self._samples += num_samples
        self._strategy, self._unreported = strategy, (loss, step_time_s)
        now_s = time.monotonic()
        since_s = now_s - self._reported_s
        if since_s < INTERVAL_S:
            return
        first, self._reported_s = self._reported_s == 0.0, now_s
        samples, self._samples = self._samples, 0
        self._report(samples_per_s=None if first else samples / since_s)

    def _note_pause(self, strategy: Strategy) -> None:
        generation = self._controller.generation
        assert generation is not None, "a step is committed in a generation"
        pause = self._pauses.committed(generation.number, strategy.step, time.perf_counter())
        if pause is None:
            return
        self._health.update(
            HealthFigures(
                generation=pause.generation,
                paused_s=pause.paused_s,
                lost_steps=pause.lost_steps,
            )
        )
        if generation.rank == 0:
            # One line a change, of one member for all.
            told = self._controller.membership.waiting_for
            named = f"generation {pause.generation}"
            log.info(f"{told if told.startswith(named) else named}; {pause}")

    def _report(self, samples_per_s: float | None = None) -> None:
        if self._strategy is None or self._unreported is None:
            return
        strategy, (loss, step_time_s), self._unreported = self._strategy, self._unreported, None
        metrics = strategy.metrics()
        self._health.update(
            HealthFigures(
                step=strategy.step,
                loss=float(loss) if loss is not None and loss.numel() == 1 else None,
                step_time_s=step_time_s,
                samples_per_s=samples_per_s,
                memory_bytes=_resident_bytes(),
                staleness_steps=metrics.get("staleness"),
                sent_bytes_per_step=metrics.get("bytes_per_step"),
                compression_ratio=metrics.get("compression_ratio"),
                last_error=strategy.warning,
                course=self._course(strategy),
            )
        )

    def _course(self, strategy: Strategy) -> CourseFigures:
        return CourseFigures(
            num_steps=self._num_steps,
            checkpoint_step=strategy.written_checkpoint,
            logged=self._controller.job_log.newest(),
        )

    def close(self, *, completed: bool) -> None:
        """Send what is unsent, within a bound; if all is well, with the last step's figures."""
        if completed:
            # Else the device may be what failed, and reading a loss from it would never end.
            self._report()
        if self._strategy is not None:
            strategy = self._strategy
            self._health.update(
                HealthFigures(
                    step=strategy.step,
                    last_error=strategy.warning,
                    course=self._course(strategy),
                )
            )
        self._health.close()


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
