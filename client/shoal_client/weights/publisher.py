"""Publication of one rank's part."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import structlog

from shoal_client.connection.coordinators import OUTLASTED, Coordinators, chance
from shoal_client.weights.cut_parts import check_layout, cut_parts
from shoal_client.weights.stores import WeightStores
from shoal_proto.back_off import BackOff
from shoal_proto.errors import (
    ChecksumMismatch,
    NoServers,
    Overloaded,
    PublicationAbandoned,
    RetryError,
    ShoalError,
    Unavailable,
)
from shoal_proto.segments.sealed import Segment
from shoal_proto.v1 import weights_pb2 as pb
from shoal_proto.v1.weights_pb2_grpc import WeightSeriesStub

log = structlog.get_logger(__name__)

TIMEOUT_S = 600.0
OVERLOADED_S = 10.0
"""Retry this long while servers have no space: leases may end meanwhile."""
CALL_S = 10.0
PART_S = 30.0
"""A call that adds a part waits this long for the other ranks."""
MAX_ABANDONED = 64
MAX_FAILURE = 500
"""Characters of a rank's failure that the errors of the other ranks show."""


class SeriesPublisher:
    """Publisher of one rank's parts, for one thread at a time, except `close` and
    `report_failure`."""

    def __init__(
        self,
        coordinators: Sequence[str],
        series: str,
        publisher: Callable[[], pb.Publisher],
        *,
        rank: int = 0,
        world: int = 1,
        options: pb.SeriesOptions | None = None,
        may_be_local: bool | None = None,
    ) -> None:
        """`publisher`: returns a member's current token, or a script's incarnation. `may_be_local`:
        see `WeightStores`."""
        self._series = series
        self._publisher = publisher
        self._rank = rank
        self._world = world
        self._options = options or pb.SeriesOptions()
        self._coordinators = Coordinators(coordinators)
        self._stores = WeightStores(series, may_be_local=may_be_local)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        """Held during `Begin`: a script's lease is renewed on another thread."""
        self._epoch = 0
        self._lease_s = 0.0
        self._abandoned: list[int] = []
        self._renewing: threading.Thread | None = None

    def begin(self, timeout_s: float = TIMEOUT_S) -> pb.BeginPublicationReply:
        """Announce a publication; return epoch, newest version and servers for the rank's segment.
        Raises StaleEpoch, SeriesHeld and other refusals at once, Overloaded after CALL_S, and the
        last other RetryError, JobQuarantined or CertificateRefused after `timeout_s` or `close`."""
        give_up_s = time.monotonic() + timeout_s
        with self._lock:
            reply = self._persist(lambda: self._begin(CALL_S), give_up_s)
            if reply.epoch != self._epoch:
                self._abandoned.clear()
            self._epoch, self._lease_s = reply.epoch, reply.lease_s
        if self._lease_s and (self._renewing is None or not self._renewing.is_alive()):
            renewing = threading.Thread(
                target=self._renew, name="shoal-publisher-lease", daemon=True
            )
            # RuntimeError: no further thread is possible, for example once the script has ended.
            with suppress(RuntimeError):
                renewing.start()
                self._renewing = renewing
        return reply

    def contribute(
        self,
        segment: Segment,
        layout: pb.Layout,
        *,
        publication: int,
        step: int = 0,
        metadata: Mapping[str, str] | None = None,
        tied: Mapping[str, str] | None = None,
        on_replicated: Callable[[], None] = lambda: None,
        timeout_s: float = TIMEOUT_S,
    ) -> pb.VersionRecord:
        """Publish this rank's part. Returns the version once the parts of all ranks are committed.
        If that fails, call `report_failure`: the other ranks wait for this part.

        `publication`: a number that must be the same on all ranks, and rise with each publication.
        `tied`, given by a single rank: the version also has the parameters and tables on the job's
        parameter servers, as of one cut; `tied` maps each further name of a parameter to its first.
        `on_replicated`: called once, when every holder has the segment.

        Raises StaleEpoch if another publisher has replaced this one, SeriesHeld or another refusal,
        PublicationAbandoned, InvalidSpec for a reserved name or a layout of more than
        MAX_PART_LAYOUT_BYTES, and Overloaded or NoServers after OVERLOADED_S without space for the
        segment. Raises other RetryErrors or ChecksumMismatch after `timeout_s` or `close`: the
        version may or may not be committed then."""
        part = pb.ContributePartRequest(
            series=self._series,
            publication=publication,
            rank=self._rank,
            world=self._world,
            layout=layout,
            step=step,
            metadata=metadata or {},
        )
        try:
            check_layout(layout)
            return self._send_part(part, segment, tied, on_replicated, timeout_s)
        except PublicationAbandoned:
            self._note_abandoned(publication)
            raise

    def report_failure(
        self, publication: int, failure: BaseException, timeout_s: float = CALL_S
    ) -> None:
        """Let the coordinator abandon the publication, since the other ranks wait for this part.
        Waits up to `timeout_s`, or until `close`, for a coordinator. Does nothing if there are no
        other ranks, or if the failure is PublicationAbandoned: the coordinator knows of it."""
        is_known = isinstance(failure, PublicationAbandoned)
        if is_known or self._world == 1 or self._closing.is_set():
            return
        try:
            if not self._epoch:
                # The coordinator ignores reports of an earlier or unknown publisher.
                with suppress(Overloaded):
                    self.begin(timeout_s)
            if self._send_failure(publication, failure).abandoned:
                self._note_abandoned(publication)
        except ShoalError as error:
            log.info("failure_not_reported", series=self._series, reason=str(error))

    def close(self) -> None:
        """Close every connection; a call in progress fails. A script's lease is released, or
        expires without a coordinator."""
        self._closing.set()
        if self._renewing is not None:
            self._renewing.join()
        if self._lease_s:
            self._release_series()
        self._stores.close()
        self._coordinators.close()

    def _send_part(
        self,
        part: pb.ContributePartRequest,
        segment: Segment,
        tied: Mapping[str, str] | None,
        on_replicated: Callable[[], None],
        timeout_s: float,
    ) -> pb.VersionRecord:
        give_up_s = time.monotonic() + timeout_s
        back_off, is_replicated, full_since_s = BackOff(), False, float("inf")
        while True:
            try:
                begun = self.begin(give_up_s - time.monotonic())
                part.epoch = begun.epoch
                part.segment.CopyFrom(
                    self._send_segment(begun, part.publication, segment, give_up_s)
                )
                if tied is not None and not part.cut_parts:
                    # A part that is sent again must be the same.
                    self._add_cut(part, tied, give_up_s)
                if not is_replicated:
                    is_replicated = True
                    on_replicated()
                return self._contribute(part, give_up_s)
            except (RetryError, ChecksumMismatch, NoServers) as error:
                now_s = time.monotonic()
                full_since_s = min(full_since_s, now_s) if _is_full(error) else float("inf")
                if now_s >= min(give_up_s, full_since_s + OVERLOADED_S):
                    raise
                log.info(
                    "part_not_published",
                    series=self._series,
                    publication=part.publication,
                    reason=str(error),
                )
                if self._closing.wait(back_off.pause_s(chance())):
                    raise

    def _note_abandoned(self, publication: int) -> None:
        """Let the next put free the publication's segments."""
        self._abandoned = [*self._abandoned, publication][-MAX_ABANDONED:]

    def _send_failure(self, publication: int, failure: BaseException) -> pb.ContributePartReply:
        text = str(failure) if isinstance(failure, ShoalError) else repr(failure)
        request = pb.ContributePartRequest(
            publisher=self._publisher(),
            series=self._series,
            publication=publication,
            rank=self._rank,
            world=self._world,
            failure=text[:MAX_FAILURE],
        )
        return self._coordinators.call(
            lambda channel: WeightSeriesStub(channel).Contribute,
            request,
            timeout_s=CALL_S,
            gives_up=self._closing.is_set,
        )

    def _begin(self, timeout_s: float, *, is_ending: bool = False) -> pb.BeginPublicationReply:
        request = pb.BeginPublicationRequest(
            publisher=self._publisher(),
            series=self._series,
            options=self._options,
            rank=self._rank,
            world=self._world,
            epoch=self._epoch,
            ending=is_ending,
        )
        return self._coordinators.call(
            lambda channel: WeightSeriesStub(channel).Begin,
            request,
            timeout_s=timeout_s,
            gives_up=self._closing.is_set,
        )

    def _send_segment(
        self,
        begun: pb.BeginPublicationReply,
        publication: int,
        segment: Segment,
        give_up_s: float,
    ) -> pb.Segment:
        """Raises a server's error, NoServers, or Unavailable if a server did not get the
        segment."""
        if not begun.servers:
            raise NoServers(
                f"there is no parameter server for series {self._series}",
                seen="none registered",
                expected="one or more",
                fix="Start one with `shoal ps`.",
            )
        described = pb.Segment(digest=segment.digest, num_bytes=segment.num_bytes)
        request = pb.PutSegmentRequest(
            series=self._series,
            epoch=begun.epoch,
            publication=publication,
            rank=self._rank,
            segment=described,
            chain=begun.servers[1:],
            abandoned=self._abandoned,
        )
        left_s = give_up_s - time.monotonic()
        reply = self._stores.put(begun.servers[0], request, segment, left_s)
        lacking = {server.id for server in begun.servers} - set(reply.holders)
        if lacking:
            raise Unavailable(
                f"not every server has the segment of series {self._series}",
                seen=f"{', '.join(reply.holders)}, not {', '.join(sorted(lacking))}",
                expected="all servers that are to hold it",
            )
        self._abandoned.clear()
        described.holders.extend(reply.holders)
        return described

    def _add_cut(
        self, part: pb.ContributePartRequest, tied: Mapping[str, str], give_up_s: float
    ) -> None:
        request = pb.CutTablesRequest(
            publisher=self._publisher(),
            series=self._series,
            epoch=part.epoch,
            publication=part.publication,
        )
        cut = self._coordinators.call(
            lambda channel: WeightSeriesStub(channel).CutTables,
            request,
            # Servers copy all rows meanwhile, however many there are.
            timeout_s=max(give_up_s - time.monotonic(), 0.001),
            gives_up=self._closing.is_set,
        )
        if cut.partial_steps:
            log.warning(
                "steps_partly_published",
                series=self._series,
                publication=part.publication,
                steps=list(cut.partial_steps),
            )
        part.cut_parts.extend(cut_parts(cut, tied))
        part.tables_cut = cut.tables_cut

    def _contribute(self, part: pb.ContributePartRequest, give_up_s: float) -> pb.VersionRecord:
        part.publisher.CopyFrom(self._publisher())
        timeout_s = min(PART_S, max(give_up_s - time.monotonic(), 0.001))
        reply = self._coordinators.call(
            lambda channel: WeightSeriesStub(channel).Contribute, part, timeout_s=timeout_s
        )
        return reply.version

    def _persist(
        self, call: Callable[[], pb.BeginPublicationReply], give_up_s: float
    ) -> pb.BeginPublicationReply:
        """Repeat the call until a coordinator answers. Overloaded counts as an answer."""

        def attempt() -> pb.BeginPublicationReply | Overloaded:
            try:
                return call()
            except Overloaded as error:
                return error

        answer = self._coordinators.persist(
            attempt,
            waits_for=f"an epoch of series {self._series}",
            gives_up=lambda: self._closing.is_set() or time.monotonic() >= give_up_s,
        )
        if isinstance(answer, Overloaded):
            raise answer
        return answer

    # --- the lease of a plain script ---

    def _renew(self) -> None:
        while not self._closing.wait(self._lease_s / 3):
            try:
                with self._lock:
                    self._begin(self._lease_s / 3)
            except OUTLASTED as error:
                log.warning("publisher_lease_not_renewed", series=self._series, reason=str(error))
            except ShoalError as error:
                # The next publication is refused too.
                log.error("publisher_lease_lost", series=self._series, reason=str(error))
                return

    def _release_series(self) -> None:
        try:
            self._begin(1.0, is_ending=True)
        except ShoalError as error:
            log.info("series_not_released", series=self._series, reason=str(error))


def _is_full(error: ShoalError) -> bool:
    return isinstance(error, Overloaded | NoServers)
