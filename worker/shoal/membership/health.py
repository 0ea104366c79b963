"""Health reports to the coordinator's status page, in the background.

They inform people and decide nothing: a report that does not get through is counted and dropped,
and training never waits for one or fails by one.
"""

import math
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx
import structlog

log = structlog.get_logger(__name__)

REQUEST_WITHIN_S = 2.0
MAX_DEVICE_LENGTH = 100
MAX_ERROR_LENGTH = 2000


class HealthReporter:
    """Posts the newest health of one member every `interval_s`, from a thread of its own.

    Newest wins: at most one report waits to be sent, and `update` changes it. The first update is
    sent at once, later ones on the interval, the last one on `close`.
    """

    def __init__(
        self,
        url: str | Callable[[], str],
        job: str,
        member_id: str,
        incarnation: str,
        interval_s: float = 1.0,
    ) -> None:
        """`url` is the coordinator's base URL, or a function that gives the current one.

        An empty URL means that there is nobody to report to for now.
        """
        if not interval_s > 0:
            raise ValueError(f"interval_s is {interval_s}; expected more than 0")
        self._url = url if callable(url) else lambda: url
        self._path = (
            f"/api/v1/jobs/{quote(job, safe='')}/members/{quote(member_id, safe='')}/health"
        )
        self._interval_s = interval_s
        self._fields: dict[str, Any] = {"incarnation": incarnation}
        self._pending = False
        self._closed = False
        self._num_sent = 0
        self._num_failed = 0
        self._outage = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="shoal-health", daemon=True)
        self._thread.start()

    @property
    def num_sent(self) -> int:
        """Reports that the coordinator took."""
        return self._num_sent

    @property
    def num_failed(self) -> int:
        """Reports that did not get through or were refused."""
        return self._num_failed

    def update(
        self,
        *,
        step: int | None = None,
        loss: float | None = None,
        step_time_s: float | None = None,
        samples_per_s: float | None = None,
        memory_bytes: int | None = None,
        device: str | None = None,
        staleness_steps: float | None = None,
        sent_bytes_per_step: float | None = None,
        compression_ratio: float | None = None,
        last_error: str | None = None,
    ) -> None:
        """Change what the next report says; what is not given stays as it was. Never blocks.

        Convert tensors before: `float(loss)` waits for the device, so do it as often as you can
        afford.
        """
        numbers = {"step_time_s": step_time_s, "samples_per_s": samples_per_s}
        numbers["staleness_steps"] = staleness_steps
        numbers["sent_bytes_per_step"] = sent_bytes_per_step
        numbers["compression_ratio"] = compression_ratio
        given: dict[str, Any] = {name: float(n) for name, n in numbers.items() if n is not None}
        counts = {"step": step, "memory_bytes": memory_bytes}
        given |= {name: int(n) for name, n in counts.items() if n is not None}
        if loss is not None:
            given["loss"] = _json_float(float(loss))
        if device is not None:
            given["device"] = device[:MAX_DEVICE_LENGTH]
        if last_error is not None:
            given["last_error"] = last_error[:MAX_ERROR_LENGTH]
        with self._changed:
            self._fields |= given
            self._pending = True
            self._changed.notify()

    def close(self, timeout_s: float = REQUEST_WITHIN_S) -> None:
        """Send what is still unsent, for at most `timeout_s`, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        # No proxy from the environment: the coordinator is a neighbour, not the internet.
        with httpx.Client(timeout=REQUEST_WITHIN_S, trust_env=False) as client:
            while (report := self._next_report()) is not None:
                sent_s = time.monotonic()
                self._send(client, report)
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._closed, max(0.0, sent_s + self._interval_s - time.monotonic())
                    )

    def _next_report(self) -> dict[str, Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closed)
            if not self._pending:
                return None
            self._pending = False
            return dict(self._fields)

    def _send(self, client: httpx.Client, report: dict[str, Any]) -> None:
        url = self._url()
        if not url:
            return
        try:
            response = client.post(url.rstrip("/") + self._path, json=report)
            problem = "" if response.is_success else f"HTTP {response.status_code} {response.text}"
            # The last report of a member that has left, or whose job has ended.
            too_late = self._closed and response.status_code == httpx.codes.NOT_FOUND
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            problem, too_late = f"{type(error).__name__}: {error}", False
        if not problem:
            self._num_sent += 1
            if self._outage:
                log.info("health_reports_resumed", url=url)
            self._outage = False
            return
        self._num_failed += 1
        if too_late:
            log.info("health_report_too_late", url=url)
        elif not self._outage:
            log.warning("health_report_failed", url=url, reason=problem[:500])
        self._outage = True


def _json_float(value: float) -> float | str:
    """JSON has no NaN and no infinity; as text they get through, and they are what people seek."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
