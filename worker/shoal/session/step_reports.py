"""What the status page learns of a member's steps."""

import os
import time
from pathlib import Path

from torch import Tensor

from shoal.membership.health import HealthReporter
from shoal.session.elastic_controller import ElasticController
from shoal.strategies.base import Strategy

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
        self._health.update(step=0, device=member.info.device)
        self._reported_s = 0.0
        self._samples = 0

    def step_done(
        self, strategy: Strategy, loss: Tensor | None, step_time_s: float, num_samples: int
    ) -> None:
        """A step was committed. Costs nothing but once in an interval."""
        now_s = time.monotonic()
        self._samples += num_samples
        since_s = now_s - self._reported_s
        if since_s < INTERVAL_S:
            return
        first, self._reported_s = self._reported_s == 0.0, now_s
        samples, self._samples = self._samples, 0
        metrics = strategy.metrics()
        self._health.update(
            step=strategy.step,
            loss=float(loss) if loss is not None and loss.numel() == 1 else None,
            step_time_s=step_time_s,
            samples_per_s=None if first else samples / since_s,
            memory_bytes=_resident_bytes(),
            staleness_steps=metrics.get("staleness"),
            sent_bytes_per_step=metrics.get("bytes_per_step"),
            compression_ratio=metrics.get("compression_ratio"),
            last_error=strategy.warning,
        )

    def close(self) -> None:
        """Send what is unsent, within a bound."""
        self._health.close()


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
