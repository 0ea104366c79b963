"""Publishing: one rank's segment to the servers, and its part to the coordinator."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import structlog

from shoal_client.connection.coordinators import OUTLASTED, Coordinators, chance
from shoal_client.weights.cut_parts import check_names, cut_parts
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
"""Time for which an overloaded publication is retried: readers may end leases meanwhile."""
CALL_S = 10.0
PART_S = 30.0
"""A call that hands in a part waits as long for the other ranks, and is then repeated."""
CUT_S = 90.0
"""A cut waits for steps in progress, and for servers that copy their shards; see `CutTables`."""
MAX_ABANDONED = 64


class SeriesPublisher:
    """Publisher of one rank's parts of a series. One thread at a time, except for `close`."""

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
        """`publisher` gives the identity for each call: the token as it is now, or always the same
        incarnation. `may_be_local`: False to send segments through TCP on one host, too; None:
        as SHOAL_TRANSPORT says."""
        self._series = series
        self._publisher = publisher
        self._rank = rank
        self._world = world
        self._options = options or pb.SeriesOptions()
        self._coordinators = Coordinators(coordinators)
        self._stores = WeightStores(series, may_be_local=may_be_local)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        """Held while the series is begun: a script's lease is renewed beside its publications."""
        self._epoch = 0
        self._lease_s = 0.0
        self._abandoned: list[int] = []
        self._renewing: threading.Thread | None = None

    def begin(self, timeout_s: float = TIMEOUT_S) -> pb.BeginPublicationReply:
        """Announce a publication: epoch, newest version, and servers for this rank's segment.

        Raises StaleEpoch, SeriesHeld, Overloaded, or Unavailable once the time is over.
        """
        give_up_s = time.monotonic() + timeout_s
        with self._lock:
            reply = self._persist(lambda: self._begin(CALL_S), give_up_s)
            if reply.epoch != self._epoch:
                self._abandoned.clear()
            self._epoch, self._lease_s = reply.epoch, reply.lease_s
        if self._lease_s and self._renewing is None:
            self._renewing = threading.Thread(
                target=self._renew, name="shoal-publisher-lease", daemon=True
            )
            self._renewing.start()
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
        """Publish this rank's part; the version, once all ranks' parts are committed.

        `layout`: this rank's tensors and slices. `publication`: the same on all ranks, rises from
        one to the next. `on_replicated` is called once, when every server that is to hold the
        segment has it.

        With `tied`, from a single rank, the version also has what the job's parameter servers hold,
        as of one cut: parameters and rows of tables. For each further name of a parameter it has
        the first one.

        Raises StaleEpoch if another publisher has replaced this one, PublicationAbandoned if the
        version will never be, Overloaded or NoServers if there is no room for it, and other
        RetryErrors once `timeout_s` has passed: then it is not known whether it becomes a version.
        """
        give_up_s = time.monotonic() + timeout_s
        back_off, is_replicated, full_since_s = BackOff(), False, float("inf")
        check_names(layout)
        part = pb.ContributePartRequest(
            series=self._series,
            publication=publication,
            rank=self._rank,
            world=self._world,
            layout=layout,
            step=step,
            metadata=metadata or {},
        )
        while True:
            try:
                begun = self.begin(give_up_s - time.monotonic())
                part.epoch = begun.epoch
                part.segment.CopyFrom(self._put(begun, publication, segment, give_up_s))
                if tied is not None and not part.cut_parts:
                    # Once: a part that is handed in again is to be the same one.
                    self._add_cut(part, tied, give_up_s)
                if not is_replicated:
                    is_replicated = True
                    on_replicated()
                return self._contribute(part, give_up_s)
            except PublicationAbandoned:
                self._abandoned = [*self._abandoned, publication][-MAX_ABANDONED:]
                raise
            except (RetryError, ChecksumMismatch, NoServers) as error:
                now_s = time.monotonic()
                full_since_s = min(full_since_s, now_s) if _is_full(error) else float("inf")
                if now_s >= min(give_up_s, full_since_s + OVERLOADED_S):
                    raise
                log.info(
                    "part_not_published",
                    series=self._series,
                    publication=publication,
                    reason=str(error),
                )
                if self._closing.wait(back_off.pause_s(chance())):
                    raise

    def close(self) -> None:
        """End; a call under way fails. A plain script lets the series go."""
        self._closing.set()
        if self._renewing is not None:
            self._renewing.join()
            self._release_series()
        self._stores.close()
        self._coordinators.close()

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

    def _put(
        self,
        begun: pb.BeginPublicationReply,
        publication: int,
        segment: Segment,
        give_up_s: float,
    ) -> pb.Segment:
        """The segment, held by every server that it was to go to. Raises what a server raises, or
        Unavailable if one did not get it."""
        if not begun.servers:
            raise Unavailable(
                f"no parameter server can hold a segment of series {self._series}",
                expected="at least one (`shoal ps`)",
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
                expected="all to which it was to go",
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
            timeout_s=min(CUT_S, max(give_up_s - time.monotonic(), 0.001)),
            gives_up=self._closing.is_set,
        )
        if cut.partial_steps:
            log.warning(
                "steps_in_part",
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
        """Call while no coordinator answers. One that answers Overloaded has answered."""

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
        """Keep the lease until the publisher is closed or replaced."""
        while not self._closing.wait(self._lease_s / 3):
            try:
                with self._lock:
                    self._begin(self._lease_s / 3)
            except OUTLASTED as error:
                log.warning("publisher_lease_not_renewed", series=self._series, reason=str(error))
            except ShoalError as error:
                # The next publication is refused for the same reason.
                log.error("publisher_lease_lost", series=self._series, reason=str(error))
                return

    def _release_series(self) -> None:
        try:
            self._begin(1.0, is_ending=True)
        except ShoalError as error:
            log.info("series_not_let_go", series=self._series, reason=str(error))


def _is_full(error: ShoalError) -> bool:
    return isinstance(error, Overloaded | NoServers)
