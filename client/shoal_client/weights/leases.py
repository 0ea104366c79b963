"""A reader's reports to the coordinator."""

import threading
import time
from collections import Counter
from dataclasses import dataclass

import structlog

from shoal_client.connection.coordinators import OUTLASTED, Coordinators
from shoal_proto.errors import Overloaded, Regressed, RetryError, ShoalError, VersionGone
from shoal_proto.v1.weights_pb2 import ReaderReport, ReaderReportReply
from shoal_proto.v1.weights_pb2_grpc import WeightSeriesStub

log = structlog.get_logger(__name__)

FIRST_LEASE_S = 30.0
"""Length of a lease until the coordinator has sent it."""
ATTEMPT_S = 10.0
LEAVING_S = 1.0


@dataclass(frozen=True, slots=True)
class InstalledVersion:
    """The version that a reader installed last (0: none), and the cost of the fetch."""

    number: int = 0
    digest: bytes = b""
    fetch_s: float = 0.0
    fetch_bytes: int = 0


class ReaderLeases:
    """Leases that a reader holds on versions, renewed by its reports. Thread-safe."""

    def __init__(
        self, coordinators: Coordinators, series: str, reader: str, serves_at: str = ""
    ) -> None:
        self._coordinators = coordinators
        self._series = series
        self._reader = reader
        self.serves_at = serves_at
        """Address for other relays; empty: this reader is not a relay."""
        self._lock = threading.Lock()
        self._reporting = threading.Lock()
        """Held during a report: each report replaces the one before."""
        self._sequence = time.time_ns() // 1000
        """Higher than in earlier processes of this reader."""
        self._leased: Counter[int] = Counter()
        self._gone: set[int] = set()
        self._reported: set[int] = set()
        """Leases in the last report, which the coordinator holds until the next."""
        self._until_s: dict[int, float] = {}
        self._relays: dict[int, str] = {}
        self._lease_s = FIRST_LEASE_S
        self.installed = InstalledVersion()
        self.head = 0
        """Newest version as of the last report; 0 from the coordinator of an earlier release."""
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._beat, name="shoal-reader", daemon=True)
        self._thread.start()

    def take(self, number: int, timeout_s: float) -> None:
        """Take a lease on a version; call `release` once for each `take`. Raises VersionGone if the
        version is not kept any more, Overloaded if the series has its maximum of readers or leases,
        another RetryError without an answer in time, and refusals."""
        with self._lock:
            self._leased[number] += 1
            is_held = self._until_s.get(number, 0.0) > time.monotonic()
        try:
            if not is_held:
                self.report_now(timeout_s)
            self.check(number)
        except BaseException:
            self.release(number)
            raise

    def release(self, number: int) -> None:
        """Give up a lease."""
        with self._lock:
            self._leased[number] -= 1
            if self._leased[number] <= 0:
                del self._leased[number]
                self._gone.discard(number)
                self._until_s.pop(number, None)
                self._relays.pop(number, None)
        self._wake.set()

    def relay_of(self, number: int) -> str:
        """Relay to fetch a leased version from; empty: fetch from the servers."""
        with self._lock:
            return self._relays.get(number, "")

    def check(self, number: int) -> None:
        """Raise VersionGone if a leased version was dropped."""
        with self._lock:
            is_gone = number in self._gone
        if is_gone:
            raise VersionGone(
                f"version {number} of series {self._series} is not kept any more",
                expected="one that `shoal weights list` shows",
                fix="Fetch the newest version; publish with a larger `keep` if readers are slow.",
            )

    def report_now(self, timeout_s: float) -> None:
        """Report, and wait for the answer. Raises Overloaded if the series has its maximum of
        readers, another RetryError without an answer in time, and refusals."""
        self._report_until(time.monotonic() + timeout_s)

    def report(self, installed: InstalledVersion) -> None:
        """Report an installed version in the background. Raises Regressed after a newer version."""
        with self._lock:
            if installed.number < self.installed.number:
                raise Regressed(
                    f"a reader of series {self._series} reports an older version than it had"
                    " installed before",
                    seen=f"version {installed.number}",
                    expected=f"at least version {self.installed.number}",
                    fix="To go back, roll the series back (`shoal weights rollback`): that makes a"
                    " new version with the old bytes.",
                )
            self.installed = installed
        self._wake.set()

    def close(self) -> None:
        """End the reports; the last one says that this reader leaves."""
        with self._lock:
            self._is_closed = True
        self._wake.set()
        self._thread.join()
        try:
            self._call(self._request(is_leaving=True), LEAVING_S)
        except ShoalError as error:
            log.info("reader_leave_not_reported", series=self._series, reason=str(error))

    def _beat(self) -> None:
        while True:
            self._wake.wait(self._lease_s / 3)
            self._wake.clear()
            with self._lock:
                if self._is_closed:
                    return
                is_needed = bool(self._leased or self._reported or self.installed.number)
            if not is_needed:
                continue
            try:
                self._report(self._lease_s / 3)
            except OUTLASTED as error:
                log.info("reader_not_reported", series=self._series, reason=str(error))
            except ShoalError as error:
                log.warning("reader_refused", series=self._series, reason=str(error))

    def _report_until(self, give_up_s: float) -> None:
        """Report, and wait for a coordinator meanwhile. Raises another error at once."""
        while True:
            left_s = give_up_s - time.monotonic()
            try:
                self._report(min(left_s, ATTEMPT_S))
                return
            except RetryError as error:
                if isinstance(error, Overloaded) or left_s <= ATTEMPT_S or self._is_closed:
                    raise

    def _report(self, timeout_s: float) -> None:
        with self._reporting:
            request = self._request()
            sent_s = time.monotonic()
            self._reported |= set(request.leased)
            reply = self._call(request, timeout_s)
            self._reported = set(request.leased)
            with self._lock:
                self._lease_s = reply.lease_s or FIRST_LEASE_S
                self.head = max(self.head, reply.head)
                self._gone |= {each for each in reply.gone if each in self._leased}
                for number, relay in zip(reply.leased, reply.relays, strict=True):
                    if number in self._leased:
                        self._until_s[number] = sent_s + reply.lease_s
                        self._relays[number] = relay

    def _request(self, *, is_leaving: bool = False) -> ReaderReport:
        with self._lock:
            self._sequence += 1
            return ReaderReport(
                series=self._series,
                reader=self._reader,
                leased=sorted(set(self._leased) - self._gone),
                installed=self.installed.number,
                installed_digest=self.installed.digest,
                serves_at=self.serves_at,
                leaving=is_leaving,
                fetch_s=self.installed.fetch_s,
                fetch_bytes=self.installed.fetch_bytes,
                sequence=self._sequence,
            )

    def _call(self, request: ReaderReport, timeout_s: float) -> ReaderReportReply:
        return self._coordinators.call(
            lambda channel: WeightSeriesStub(channel).Report, request, timeout_s=timeout_s
        )
