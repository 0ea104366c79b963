"""Reports of a member's steps for the status page."""

import threading
import time
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import structlog
from torch import Tensor

from shoal.membership.health import HealthReporter
from shoal.session.batch_sources import BatchSource
from shoal.session.elastic_controller import ElasticController
from shoal.session.run_origin import run_origin
from shoal.session.usage import UsageMeter, memory_bytes
from shoal.strategies.base import Strategy
from shoal_proto.errors import InvalidSpec
from shoal_proto.health import CourseFigures, HealthFigures, RunOrigin, StepParts

log = structlog.get_logger(__name__)

INTERVAL_S = 1.0
"""Shortest interval between reads of a loss: reading it may wait for the device."""

ORIGIN_WITHIN_S = 1.0
"""Longest time that the end of a short job waits for git."""


def check_entered(reports: "StepReports | None", call: str) -> None:
    """Raise InvalidSpec for a call outside the session's block, where `reports` is None."""
    if reports is None:
        raise InvalidSpec(
            f"{call} outside a session",
            seen="a session before or after its `with` block",
            expected="with shoal.join(...) as session: ..., and the call in it",
        )


USUAL_OF = 16
"""Number of the newest steps: their median is the usual time of a step."""


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """Training time lost to a change of generation, and the steps that are taken again."""

    generation: int
    paused_s: float
    """Time from the last commit of the old generation to the first of the new one, less the usual
    time of a step."""
    lost_steps: int
    """Committed steps that were rolled back, and are taken again."""

    def __str__(self) -> str:
        steps = "step" if self.lost_steps == 1 else "steps"
        return f"paused {self.paused_s:.2f} s; {self.lost_steps} {steps} lost"


class InterruptionMeter:
    """Finds interruptions from the times of commits, by a monotonic clock."""

    def __init__(self) -> None:
        self._generation = 0
        self._step = 0
        self._committed_s = 0.0
        self._gaps_s: deque[float] = deque(maxlen=USUAL_OF)

    def note_commit(self, generation: int, step: int, now_s: float) -> Interruption | None:
        """Note that `step` is committed in that generation. Returns the interruption before it if
        it is the generation's first step and not this member's first; else None."""
        before, last_step, gap_s = self._generation, self._step, now_s - self._committed_s
        self._generation, self._step, self._committed_s = generation, step, now_s
        if before == 0:
            return None
        if generation == before:
            self._gaps_s.append(gap_s)
            return None
        usual_s = median(self._gaps_s) if self._gaps_s else 0.0
        return Interruption(
            generation=generation,
            paused_s=max(0.0, gap_s - usual_s),
            lost_steps=max(0, last_step + 1 - step),
        )


class StepTimes(NamedTuple):
    """Times of one committed step."""

    step_s: float
    exchange_s: float
    """Part of `step_s` in which the trainer waited for other members or for servers."""
    loading_s: float | None
    """Time that this member has waited for batches in all steps so far; None if the script loads
    them."""


@dataclass(kw_only=True)
class StepPartsMeter:
    """Averages of the parts of a step, from report to report."""

    _since_s: float | None = None
    _loading_s: float = 0.0
    _step_s: float = 0.0
    _exchange_s: float = 0.0
    _num_steps: int = 0

    def add(self, times: StepTimes, now_s: float) -> None:
        """Add a step that is committed now. The first step only starts the measurement."""
        if self._since_s is None:
            self._since_s, self._loading_s = now_s, times.loading_s or 0.0
            return
        self._num_steps += 1
        self._step_s += times.step_s
        self._exchange_s += times.exchange_s

    def read(self, loading_s: float | None, now_s: float) -> StepParts | None:
        """Return the averages since the last report; None if no step was committed since."""
        count, since_s = self._num_steps, self._since_s
        if not count or since_s is None:
            return None
        loaded_s = (loading_s or 0.0) - self._loading_s
        rest_s = now_s - since_s - self._step_s - loaded_s
        parts = StepParts(
            data_s=None if loading_s is None else loaded_s / count,
            compute_s=max(0.0, self._step_s - self._exchange_s) / count,
            exchange_s=self._exchange_s / count,
            between_s=max(0.0, rest_s) / count,
        )
        self._since_s, self._loading_s = now_s, loading_s or 0.0
        self._step_s, self._exchange_s, self._num_steps = 0.0, 0.0, 0
        return parts


class StepReports:
    """Health reports about the steps of one member."""

    def __init__(self, controller: ElasticController) -> None:
        member, membership = controller.member, controller.membership
        self._controller = controller
        self._interruptions = InterruptionMeter()
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
        self._source: BatchSource | None = None
        self._unreported: tuple[Tensor | None, StepTimes] | None = None
        self._parts = StepPartsMeter()
        self._usage = UsageMeter()
        self._origin: RunOrigin | None = None
        self._origin_reader: threading.Thread | None = None

    def trains_on(self, source: BatchSource) -> None:
        """Set the source of the job's batches: its number of steps is reported."""
        self._source = source

    def step_begins(self) -> None:
        """Note that a step begins. At its first step, the member that reports for the job begins to
        read its command line and commit, on another thread."""
        controller = self._controller
        reports = controller.job_log.is_writer and controller.member.coordinators
        if self._origin_reader is None and reports:
            self._origin_reader = threading.Thread(
                target=self._read_origin, name="shoal-origin", daemon=True
            )
            self._origin_reader.start()

    def _read_origin(self) -> None:
        self._origin = run_origin()
        if self._strategy is None:
            # Report now: the first step may take long.
            self._health.update(HealthFigures(course=CourseFigures(run=self._origin)))

    def step_done(
        self, strategy: Strategy, loss: Tensor | None, times: StepTimes, num_samples: int
    ) -> None:
        """Note that a step was committed. Cheap, except for one call per interval, which reads the
        loss."""
        if strategy.synchronous:
            self._note_interruption(strategy)
        self._samples += num_samples
        self._strategy, self._unreported = strategy, (loss, times)
        now_s = time.monotonic()
        self._parts.add(times, now_s)
        since_s = now_s - self._reported_s
        if since_s < INTERVAL_S:
            return
        first, self._reported_s = self._reported_s == 0.0, now_s
        samples, self._samples = self._samples, 0
        self._report(samples_per_s=None if first else samples / since_s)

    def _note_interruption(self, strategy: Strategy) -> None:
        generation = self._controller.generation
        assert generation is not None, "a step is committed in a generation"
        interruption = self._interruptions.note_commit(
            generation.number, strategy.step, time.perf_counter()
        )
        if interruption is None:
            return
        self._health.update(
            HealthFigures(
                generation=interruption.generation,
                paused_s=interruption.paused_s,
                lost_steps=interruption.lost_steps,
            )
        )
        if generation.rank == 0:
            # Only one member logs: one line per change.
            waits_for = self._controller.membership.waiting_for
            named = f"generation {interruption.generation}"
            log.info(f"{waits_for if waits_for.startswith(named) else named}; {interruption}")

    def _report(self, samples_per_s: float | None = None) -> None:
        if self._strategy is None or self._unreported is None:
            return
        strategy, (loss, times), self._unreported = self._strategy, self._unreported, None
        metrics, usage = strategy.metrics(), self._usage.read()
        self._health.update(
            HealthFigures(
                step=strategy.step,
                loss=float(loss) if loss is not None and loss.numel() == 1 else None,
                step_time_s=times.step_s,
                step_parts=self._parts.read(times.loading_s, time.monotonic()),
                samples_per_s=samples_per_s,
                memory_bytes=memory_bytes(),
                cpu_cores=usage.cpu_cores if usage else None,
                host_received_bytes_per_s=usage.received_bytes_per_s if usage else None,
                host_sent_bytes_per_s=usage.sent_bytes_per_s if usage else None,
                staleness_steps=metrics.get("staleness"),
                sent_bytes_per_step=metrics.get("bytes_per_step"),
                compression_ratio=metrics.get("compression_ratio"),
                last_error=strategy.warning,
                course=self._course(strategy),
            )
        )

    def _course(self, strategy: Strategy) -> CourseFigures:
        job_log, written = self._controller.job_log, strategy.written_checkpoint
        return CourseFigures(
            # A job that resumes with another batch size changes the number.
            num_steps=self._source.num_steps if self._source else None,
            checkpoint_step=written.step if written else None,
            checkpoint_bytes=written.num_bytes if written else None,
            writes_checkpoints=strategy.writes_checkpoints,
            logged=job_log.newest_values(),
            run=self._origin if job_log.is_writer else None,
        )

    def close(self, *, completed: bool) -> None:
        """Send the last report, with the last step's loss if the job is complete, and wait up to 3
        s."""
        if completed:
            # After a failure, reading from the failed device might never return.
            self._report()
        if self._origin_reader is not None:
            self._origin_reader.join(ORIGIN_WITHIN_S)
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
