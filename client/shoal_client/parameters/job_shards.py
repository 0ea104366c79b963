"""A job's shard map, and calls to its servers, for parameters and for rows."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from shoal_client.connection.coordinators import OUTLASTED, Coordinators
from shoal_client.connection.transport import transport_of
from shoal_client.parameters.calls import ParameterCalls
from shoal_client.parameters.servers import Attempt, ShardServers, most_severe
from shoal_client.shards.blocks import Buffers, ShardBlocks
from shoal_client.shards.layouts import keep_addresses
from shoal_client.shards.parts import GradientPart
from shoal_proto.errors import (
    Fenced,
    InternalError,
    MalformedMessage,
    ShoalError,
    StalePush,
    StateLost,
)
from shoal_proto.pieces import OnlyPiece
from shoal_proto.status import from_detail
from shoal_proto.traces import tracing
from shoal_proto.traces.log_limit import LogLimit
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.parameters_pb2 import (
    PushHeader,
    PushItem,
    PushOutcome,
    PushReply,
    ShardData,
    ShardVersion,
)
from shoal_proto.v1.shards_pb2 import GetMapRequest, PlaceRequest, Shard, ShardMap
from shoal_proto.v1.shards_pb2_grpc import ShardsStub

log = structlog.get_logger(__name__)

MAP_TIMEOUT_S = 2.0
"""Longest time that a call in progress waits for a newer map: there may be no coordinator."""


@dataclass(frozen=True, kw_only=True)
class JointStep:
    """Makes a push of gradients and a push of rows one step: a snapshot has both or neither.
    Without one of the pushes, the next snapshot waits until it gives the step up."""

    sequence: int
    """Number of both pushes."""
    shard_ids: Sequence[int]
    """All shards of both pushes, on all servers."""


class Receiver:
    """Writes the values of shards into the caller's buffers as they arrive, in order. A shard is
    done with its last byte."""

    def __init__(
        self,
        blocks: Mapping[int, ShardBlocks],
        into: Buffers,
        versions: dict[int, int],
        todo: set[int],
    ) -> None:
        self._blocks = blocks
        self._into = into
        self._versions = versions
        self._todo = todo
        self._version = ShardVersion()
        self._received_bytes = 0

    def take(self, reply: ShardData | PushReply | OnlyPiece) -> None:
        """Handle the announcement of a shard's values, or a piece of them. Raises MalformedMessage
        or ChecksumMismatch."""
        if not isinstance(reply, OnlyPiece) and reply.HasField("version"):
            self._version.CopyFrom(reply.version)
            self._received_bytes = 0
            return
        piece, version = reply.piece, self._version
        shard_id, position = piece.shard_id, self._received_bytes
        is_next = (shard_id, piece.offset_bytes) == (version.shard_id, position)
        if not is_next or shard_id not in self._blocks:
            raise MalformedMessage(
                "a piece that does not continue the values that were announced",
                seen=f"shard {shard_id} from byte {piece.offset_bytes} on",
                expected=f"shard {version.shard_id} from byte {position} on",
            )
        self._received_bytes += self._blocks[shard_id].scatter(piece, self._into)
        if self._received_bytes == version.num_bytes:
            self._versions[shard_id] = version.version
            self._todo.discard(shard_id)


@dataclass(frozen=True, kw_only=True)
class ShardPush:
    """Push over all its attempts. Functions are called from several threads, by one at a time for
    each shard."""

    span: str
    """Name of the push in traces."""
    sequence: int
    """The same in every attempt."""
    item: Callable[[Shard], PushItem]
    part: Callable[[Shard], GradientPart]
    applied: Callable[[PushOutcome, int], None]
    """Called with the outcome of each applied part, and the shard's epoch."""
    refused: Callable[[int, StalePush], None]
    """Called with each shard that refused its part as too stale, and is done."""
    receiver: Callable[[set[int]], Receiver] | None = None
    """Makes the receiver of the values; None: no values are returned."""
    shard_ids: Collection[int] | None = None
    """Shards to push to; None: all of the map."""
    all_shard_ids: Sequence[int] = ()
    """All shards that the step touches; empty: every dense shard."""
    lr: Sequence[float] = ()
    counts_rows: bool = False
    """True if `sequence` counts pushes of rows alone."""


class SeenVersions:
    """Newest version seen of each shard. A later epoch is newer: a restored snapshot has lower
    versions."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}

    def note(self, shard_id: int, epoch: int, version: int) -> None:
        """Record a version that a server reported. One thread at a time for each shard."""
        self._seen[shard_id] = max(self._seen.get(shard_id, (0, 0)), (epoch, version))

    def explained(self, lost: StateLost, what: str = "") -> StateLost:
        """The error, with the newest version seen of its shard. `what`: replaces the error's,
        unless empty."""
        _, version = self._seen.get(int(lost.details.get("shard", -1)), (0, 0))
        seen_version = f"version {version}" if version else "no version of it"
        return StateLost(
            what or lost.what,
            seen=f"{lost.seen}; this member has seen {seen_version}",
            expected=lost.expected,
            fix=lost.fix,
            details={**lost.details, **({"version": str(version)} if version else {})},
        )


class JobShards:
    """Shard map of a job and calls to its servers, for one thread at a time, except `close`."""

    def __init__(
        self,
        coordinators: Sequence[str],
        token: Callable[[], Token],
        timeout_s: float,
        *,
        acknowledgement: Acknowledgement.ValueType,
        transport: str | None,
        adopt: Callable[[ShardMap], ShardMap],
        slot_bytes_for: Callable[[int], int] = int,
        table_of: Callable[[StateLost], str] = lambda lost: "",
    ) -> None:
        """`adopt` gets each map that arrives, and returns the map to use. `transport`: see
        `transport_of`. `slot_bytes_for`: see `BulkTransport`. `table_of`: returns a lost shard's
        table, or an empty text."""
        self._coordinators = Coordinators(coordinators)
        self._token = token
        self._timeout_s = timeout_s
        self._acknowledgement = acknowledgement
        self._adopt = adopt
        self._table_of = table_of
        chosen = transport_of(transport)
        self._servers = ShardServers(
            lambda address, channel: ParameterCalls(
                address, channel, self.token, transport=chosen, slot_bytes_for=slot_bytes_for
            ),
            timeout_s,
            ParameterCalls.close,
        )
        self._map: ShardMap | None = None
        self.seen = SeenVersions()
        self._log = LogLimit(log)

    def token(self) -> Token:
        """The caller's token, with the run of the known shard map."""
        token = self._token()
        if self._map is None or not self._map.run:
            return token
        named = Token()
        named.CopyFrom(token)
        named.run = self._map.run
        return named

    def place(self, request: PlaceRequest) -> ShardMap:
        """Return the job's shard map; the first call makes it."""
        return self._accept_map(
            self._coordinators.call(
                lambda channel: ShardsStub(channel).Place, request, timeout_s=self._timeout_s
            )
        )

    def fetch_map(self, wait_s: float = 0.0, timeout_s: float | None = None) -> ShardMap:
        """Fetch the newest shard map; wait up to `wait_s` for the first one, then raise
        DeadlineExceeded. `timeout_s` None: `wait_s` plus the client's. Raises Fenced if the job was
        started over since the last map."""
        request = GetMapRequest(token=self._token(), wait_s=wait_s)
        limit_s = self._timeout_s + wait_s if timeout_s is None else timeout_s
        return self._accept_map(
            self._coordinators.call(
                lambda channel: ShardsStub(channel).GetMap, request, timeout_s=limit_s
            )
        )

    def _accept_map(self, received: ShardMap) -> ShardMap:
        known = self._map.run if self._map is not None else ""
        if known and received.run and known != received.run:
            raise Fenced(
                f"job {received.job} was started over",
                seen=f"a shard map of run {received.run}",
                expected=f"run {known}, whose values this process has",
                fix="Join again to continue.",
                details={"run": received.run},
            )
        adopted = self._adopt(received)
        keep_addresses(adopted, self._map)
        self._map = adopted
        return adopted

    def _refetch_map(self) -> None:
        try:
            self.fetch_map(timeout_s=MAP_TIMEOUT_S)
        except OUTLASTED as error:
            # Go on with the known map: servers refuse calls if it is out of date.
            self._log.info("shard_map_not_fetched", reason=str(error))

    def cached_map(self) -> ShardMap:
        """The map received last. Raises InternalError if there is none."""
        if self._map is None:
            raise InternalError(
                "no shard map was fetched yet", expected="place() or fetch_map() first"
            )
        return self._map

    def run(
        self,
        attempt: Attempt[ParameterCalls],
        ready_by_s: float = math.inf,
        shard_ids: Collection[int] | None = None,
    ) -> int:
        """Run attempts at every server until each shard is done, as `ShardServers.run`; a StateLost
        also has the newest version seen, and the table."""
        try:
            return self._servers.run(
                self.cached_map, self._refetch_map, attempt, ready_by_s, shard_ids
            )
        except StateLost as lost:
            raise self._explained(lost) from None

    def _explained(self, lost: StateLost) -> StateLost:
        table = self._table_of(lost)
        what = f"{lost.what}; it has rows of table {table}" if table else ""
        explained = self.seen.explained(lost, what)
        if table:
            explained.details = {**explained.details, "table": table}
        return explained

    def push(self, push: ShardPush) -> int:
        """Push until each shard has applied its part or refused it as stale. See `run`."""

        def attempt(
            calls: ParameterCalls, shards: Sequence[Shard], timeout_s: float, todo: set[int]
        ) -> None:
            header = self._header(push, shards)
            # Parts are sent on other threads, which lack the span.
            header.token.traceparent = traceparent
            codecs = {item.codec.kind for item in header.shards if item.HasField("codec")}
            calls.check_codecs(codecs, timeout_s)
            parts = [push.part(shard) for shard in shards]
            epochs = {shard.shard_id: shard.epoch for shard in shards}
            receiver = None if push.receiver is None else push.receiver(todo)
            errors: list[ShoalError] = []
            for reply in calls.push(header, parts, timeout_s):
                if not isinstance(reply, OnlyPiece):
                    for outcome in reply.outcomes:
                        error = self._note(push, outcome, epochs[outcome.shard_id], parts)
                        if error is not None:
                            errors.append(error)
                        elif receiver is None or outcome.HasField("error"):
                            todo.discard(outcome.shard_id)
                if receiver is not None and (reply.HasField("version") or reply.HasField("piece")):
                    receiver.take(reply)
            if errors:
                raise most_severe(errors)

        with tracing.span(push.span):
            traceparent = tracing.current_traceparent()
            return self.run(attempt, shard_ids=push.shard_ids)

    def _header(self, push: ShardPush, shards: Sequence[Shard]) -> PushHeader:
        return PushHeader(
            token=self.token(),
            sequence=push.sequence,
            shards=[push.item(shard) for shard in shards],
            lr=push.lr,
            return_values=push.receiver is not None,
            all_shard_ids=push.all_shard_ids,
            acknowledgement=self._acknowledgement,
            counts_rows=push.counts_rows,
        )

    def _note(
        self, push: ShardPush, outcome: PushOutcome, epoch: int, parts: Sequence[GradientPart]
    ) -> ShoalError | None:
        """Note the outcome of one shard; return its error, unless the shard is done."""
        if outcome.next_address:
            self._servers.connect_ahead(outcome.next_address, partial(_connect, parts))
        if outcome.HasField("error"):
            error = from_detail(outcome.error)
            if not isinstance(error, StalePush):
                return error
            push.refused(outcome.shard_id, error)
        else:
            self.seen.note(outcome.shard_id, epoch, outcome.version)
            push.applied(outcome, epoch)
        return None

    def wait_for_lost(self, wait_s: float) -> None:
        """Make later calls wait for lost shards, at most `wait_s` each."""
        self._servers.lost_wait_s = wait_s

    @property
    def transports(self) -> Mapping[str, str]:
        """Transport by server address."""
        return {address: calls.transport for address, calls in self._servers.stubs.items()}

    def close(self) -> None:
        """Close every connection; a call in progress fails."""
        self._servers.close()
        self._coordinators.close()


def _connect(parts: Sequence[GradientPart], calls: ParameterCalls) -> None:
    calls.connect(max(part.num_bytes for part in parts), len(parts))
