"""What the status page learns of a member's steps."""

import os
import time
from pathlib import Path

from torch import Tensor

from shoal.membership.health import HealthReporter
from shoal.session.elastic_controller import ElasticController
from shoal.strategies.base import Strategy
from shoal_proto.health import HealthFigures

INTERVAL_S = 1.0
"""Reading a loss may wait for the device, so it is done no more often than this."""


class StepReports:
    """Health reports of one member, taken from its steps."""

    def __init__(self, controller: ElasticController) -> None:
        member, membership = controller.member, controller.membership
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
        self._unreported: tuple[Tensor | None, float] | None = None

    def step_done(
        self, strategy: Strategy, loss: Tensor | None, step_time_s: float, num_samples: int
    ) -> None:
        """A step was committed. Costs nothing but once in an interval."""
        self._samples += num_samples
        self._strategy, self._unreported = strategy, (loss, step_time_s)
        now_s = time.monotonic()
        since_s = now_s - self._reported_s
        if since_s < INTERVAL_S:
            return
        first, self._reported_s = self._reported_s == 0.0, now_s
        samples, self._samples = self._samples, 0
        self._report(samples_per_s=None if first else samples / since_s)

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
            )
        )

    def close(self, *, completed: bool) -> None:
        """Send what is unsent, within a bound; if all is well, with the last step's figures."""
        if completed:
            # Else the device may be what failed, and reading a loss from it would never end.
            self._report()
        if self._strategy is not None:
            strategy = self._strategy
            self._health.update(HealthFigures(step=strategy.step, last_error=strategy.warning))
        self._health.close()


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
