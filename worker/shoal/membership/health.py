"""Health reports to the coordinator's status page, in the background: training never waits for one
or fails because of one."""

import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from numbers import Integral
from types import TracebackType
from typing import Any, Self, SupportsFloat
from urllib.parse import quote

import httpcore
import structlog

from shoal.membership.health_connection import CoordinatorHttp
from shoal_proto.health import MAX_COUNT, CourseFigures, HealthFigures, StepParts, max_lengths
from shoal_proto.protocol import OWN_PROTOCOLS
from shoal_proto.short_lists import sendable

log = structlog.get_logger(__name__)

REQUEST_WITHIN_S = 2.0
NOT_FOUND = 404
UNAVAILABLE = 503
"""Status of a coordinator that does not lead, or not yet."""
LIMITS = dict.fromkeys(("connect", "read", "write", "pool"), REQUEST_WITHIN_S)
_MAX_LENGTHS = max_lengths()
_NOT_SENT = (
    httpcore.NetworkError,
    httpcore.TimeoutException,
    httpcore.ProtocolError,
    httpcore.UnsupportedProtocol,
)


class HealthReporter:
    """Posts the newest health of one member after updates, at most once in `interval_s`, on a
    thread of its own. The first update is posted at once, the last one by `close`."""

    def __init__(
        self,
        url: str | Callable[[], str],
        job: str,
        member_id: str,
        incarnation: str,
        interval_s: float = 1.0,
    ) -> None:
        """`url`: the coordinator's base URL, or a function that returns the current one. While
        it is empty, reports are dropped."""
        if not interval_s > 0:
            raise ValueError(f"interval_s is {interval_s}; expected more than 0")
        self._url = url if callable(url) else lambda: url
        self._path = (
            f"/api/v1/jobs/{quote(job, safe='')}/members/{quote(member_id, safe='')}/health"
        )
        self._interval_s = interval_s
        self._fields: dict[str, Any] = {
            "incarnation": incarnation,
            "protocol": OWN_PROTOCOLS.newest,
        }
        self._pending = False
        self._closed = False
        self._outage = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, args=(CoordinatorHttp(),), name="shoal-health", daemon=True
        )
        self._thread.start()

    def update(self, figures: HealthFigures) -> None:
        """Change the next report; figures that are None stay unchanged. Never blocks. Convert
        tensors seldom: `float(loss)` waits for the device."""
        changed = {
            name: sendable(value, _MAX_LENGTHS[name]) if isinstance(value, str) else _json(value)
            for name, value in figures.known_figures().items()
        }
        with self._changed:
            self._fields |= changed
            self._pending = True
            self._changed.notify()

    def close(self, timeout_s: float = REQUEST_WITHIN_S) -> None:
        """Send the last report and end the thread, within `timeout_s`."""
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

    def _run(self, connections: CoordinatorHttp) -> None:
        with connections:
            while (report := self._next_report()) is not None:
                sent_s = time.monotonic()
                self._send(connections, report)
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

    def _posted(
        self, connections: CoordinatorHttp, url: str, report: dict[str, Any]
    ) -> httpcore.Response:
        content = json.dumps(report).encode()
        return connections.post(url.rstrip("/") + self._path, content, LIMITS)

    def _send(self, connections: CoordinatorHttp, report: dict[str, Any]) -> None:
        url = self._url()
        if not url:
            return
        try:
            response = self._posted(connections, url, report)
            if response.status == UNAVAILABLE:
                log.debug("health_report_unread", url=url)
                return
            body = response.content.decode("utf-8", "replace")
            problem = "" if response.status < 300 else f"HTTP {response.status} {body}"
            # A report may arrive after the member has left.
            is_member = not self._closed and "UnknownMember" not in body
            too_late = response.status == NOT_FOUND and not is_member
        except (*_NOT_SENT, ValueError) as error:
            problem, too_late = f"{type(error).__name__}: {error}", False
        if not problem:
            if self._outage:
                log.info("health_reports_resumed", url=url)
            self._outage = False
            return
        if too_late:
            log.debug("health_report_too_late", url=url)
        elif not self._outage:
            log.warning("health_report_failed", url=url, reason=problem[:500])
        self._outage = True


def _json(value: Any) -> Any:
    if isinstance(value, StepParts):
        return asdict(value)
    if not isinstance(value, CourseFigures):
        return _json_number(value)
    logged = {name: [step, _json_number(number)] for name, (step, number) in value.logged.items()}
    # `epochs=sys.maxsize` is a job without an end: the coordinator would refuse the whole report.
    is_endless = value.num_steps is not None and value.num_steps > MAX_COUNT
    num_steps = None if is_endless else value.num_steps
    return {**asdict(value), "logged": logged, "num_steps": num_steps}


def _json_number(value: SupportsFloat) -> float | str:
    if isinstance(value, Integral):
        return int(value)
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else f"{'-' if number < 0 else ''}Infinity"
