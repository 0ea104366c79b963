"""A job's parameters on its parameter servers: create, pull and push, without asyncio.

Values and gradients are the caller's own buffers, one a parameter. This module finds the server of
each part, and repeats calls while a server is unavailable."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from shoal_client.connection.transport import transport_of
from shoal_client.parameters.calls import ParameterCalls
from shoal_client.parameters.job_shards import JobShards
from shoal_client.parameters.joint_step import JointStep
from shoal_client.parameters.seen_versions import SeenVersions
from shoal_client.parameters.servers import Attempt, most_severe
from shoal_client.shards.blocks import Buffers, ShardBlocks, check_buffers
from shoal_client.shards.layouts import without_tables
from shoal_client.shards.parts import EncodedPush, GradientPart, Pieces
from shoal_proto import pieces
from shoal_proto.errors import MalformedMessage, ShoalError, StalePush, StateLost
from shoal_proto.status import from_detail
from shoal_proto.traces import tracing
from shoal_proto.v1.codec_pb2 import GradientCodec
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.parameters_pb2 import (
    Acknowledgement,
    CreateHeader,
    OptimizerSpec,
    PullItem,
    PullRequest,
    PushHeader,
    PushItem,
    PushReply,
    ShardData,
    ShardVersion,
)
from shoal_proto.v1.shards_pb2 import (
    ParameterSpec,
    PlaceRequest,
    Shard,
    ShardMap,
)
from shoal_proto.v1.tables_pb2 import TableSpec

PULL_WAIT_S = 10.0
"""Maximum time for which one call waits at a server for shards that do not exist yet."""


@dataclass(kw_only=True)
class PushResult:
    """Result of one push. Every shard's part was applied exactly once, except those in `stale`."""

    sequence: int
    versions: dict[int, int] = field(default_factory=dict)
    """Version of each shard right after this push."""
    staleness: dict[int, int] = field(default_factory=dict)
    """Number, by shard, of updates between the version that the gradient was computed on and this
    push."""
    retries: int = 0
    """Number of rounds of attempts beyond the first, plus the longest chain of redirects of each
    round."""
    duplicates: int = 0
    """Number of shards that answered a retry of a push that they had applied before."""
    stale: dict[int, StalePush] = field(default_factory=dict)
    """Errors by shard, of shards that refused their part as too stale: pull, compute the gradient
    again, and push it to these shards only. The others have applied their parts."""

    @property
    def staleness_max(self) -> int:
        return max(self.staleness.values(), default=0)

    @property
    def staleness_mean(self) -> float:
        return sum(self.staleness.values()) / max(len(self.staleness), 1)


class ParameterClient:
    """One member's view of its job's parameters. For one thread at a time, except `close`.

    A call is bounded by `timeout_s`, retries included; `ShardServers.run` names the longer waits.
    Only temporary failures are retried, and a retry never applies a gradient twice. Raises
    RetryError when the time is over, Fenced if the member was declared lost or the job was started
    over, StateLost if a shard is lost, ChecksumMismatch for damaged data, RefusedError for a bad
    request, InternalError before the first map. `transport`: how servers are reached (see
    `transport_of`)."""

    def __init__(
        self,
        coordinators: Sequence[str],
        token: Callable[[], Token],
        *,
        timeout_s: float = 60.0,
        acknowledgement: Acknowledgement.ValueType = Acknowledgement.ACKNOWLEDGEMENT_DEFAULT,
        transport: str | None = None,
    ) -> None:
        self._acknowledgement = acknowledgement
        self._token = token
        self._timeout_s = timeout_s
        chosen = transport_of(transport)
        self._job = JobShards(
            coordinators,
            token,
            timeout_s,
            stub_of=lambda address, channel: ParameterCalls(
                address, channel, self._job.token, transport=chosen
            ),
            close_stub=ParameterCalls.close,
            adopt=self._adopt,
        )
        self._schema_digest = ""
        self._blocks: dict[int, ShardBlocks] = {}
        self._versions: dict[int, int] = {}
        self._epochs: dict[int, int] = {}
        self._seen = SeenVersions()
        self._sequence = 0

    def place(
        self, parameters: Sequence[ParameterSpec], tables: Sequence[TableSpec] = ()
    ) -> ShardMap:
        """Return the job's shard map; make it if this is the first call for the job.

        `tables` get shards too, which are not in the returned map: see
        `shoal_client.parameters.tables`. Raises ProposalConflict or ShapeMismatch, naming the
        parameters or tables that differ from the job's, NoServers, and InvalidSpec for a schema
        that the coordinator refuses."""
        request = PlaceRequest(token=self._token(), parameters=parameters, tables=tables)
        return self._job.place(request)

    def fetch_map(self, wait_s: float = 0.0, *, timeout_s: float | None = None) -> ShardMap:
        """Fetch the newest shard map; see `JobShards.fetch_map`."""
        return self._job.fetch_map(wait_s, timeout_s)

    def create(self, optimizer: OptimizerSpec, values: Buffers) -> int:
        """Give the shards their first values; return the number of shards that this call created.
        The number is too low if an answer was lost. An existing shard is left unchanged, so any
        member may create at any time. Raises ShapeMismatch."""
        shard_map = self._job.cached_map()
        check_buffers(shard_map, values, complete=True, writable=False)
        created: list[int] = []

        def attempt(
            calls: ParameterCalls, shards: Sequence[Shard], timeout_s: float, todo: set[int]
        ) -> None:
            header = CreateHeader(token=self._job.token(), optimizer=optimizer, shards=shards)
            parts = [self._part(shard, (values,)) for shard in shards]
            created.extend(calls.create(header, parts, timeout_s).created)
            todo.difference_update(shard.shard_id for shard in shards)

        self._until_done(attempt)
        return len(created)

    def _part(self, shard: Shard, sources: Sequence[Buffers]) -> GradientPart:
        """Part of a call with the shard's bytes from each of `sources`, one after the other."""
        blocks = self._blocks[shard.shard_id]

        def pieces_of(piece_bytes: int) -> Pieces:
            for i, buffers in enumerate(sources):
                for offset_bytes, memory in blocks.gather(buffers, piece_bytes):
                    yield i * blocks.num_bytes + offset_bytes, memory

        num_bytes = max(len(sources), 1) * blocks.num_bytes
        return GradientPart(shard.shard_id, num_bytes, pieces_of)

    def pull(self, into: Buffers, *, wait_s: float | None = None) -> None:
        """Write the newest values into the buffers.

        Waits for shards that are not created yet, up to `wait_s` (None: `timeout_s`) and never
        longer than `timeout_s`; then raises ShardNotReady. Each shard's values are of one version.
        If the call fails, some buffers may have new values, others not. Raises ShapeMismatch."""
        ready_by_s = time.monotonic() + (self._timeout_s if wait_s is None else wait_s)
        check_buffers(self._job.cached_map(), into, complete=True, writable=True)

        def attempt(
            calls: ParameterCalls, shards: Sequence[Shard], timeout_s: float, todo: set[int]
        ) -> None:
            items = [PullItem(shard_id=s.shard_id, epoch=s.epoch) for s in shards]
            left_s = max(ready_by_s - time.monotonic(), 0.0)
            request = PullRequest(
                token=self._job.token(),
                shards=items,
                wait_s=min(left_s, PULL_WAIT_S, timeout_s / 2),
            )
            receiver = Receiver(self._blocks, into, self._versions, todo)
            parts = [self._part(shard, ()) for shard in shards]
            for reply in calls.pull(request, parts, timeout_s):
                receiver.take(reply)
            for shard in shards:
                self._epochs[shard.shard_id] = shard.epoch
                if shard.shard_id not in todo:
                    self._seen.note(shard.shard_id, shard.epoch, self._versions[shard.shard_id])

        self._until_done(attempt, ready_by_s)

    def joint_step(self, rows_in: Collection[int]) -> JointStep:
        """Begin a step that includes the next push of this client, to every shard, and a push of
        rows to `rows_in`. Pass the step to both pushes. See `TableClient.shard_ids`."""
        self._sequence += 1
        own = (shard.shard_id for shard in self._job.cached_map().shards)
        return JointStep(sequence=self._sequence, shard_ids=sorted({*own, *rows_in}))

    def push(
        self,
        gradients: Buffers,
        *,
        lr: Sequence[float] = (),
        into: Buffers | None = None,
        bases: Buffers | None = None,
        only: Collection[int] | None = None,
        step: JointStep | None = None,
        encoded: EncodedPush | None = None,
    ) -> PushResult:
        """Apply gradients, each exactly once, and write the resulting values into `into`.

        The optimizer does not change parameters without a gradient. `lr`: a learning rate for each
        parameter group; empty: as in `create`. `bases`: the values on which the gradients were
        computed, for servers that compensate for delay; they must not share memory with `into`.
        `only`: ids of the shards to push to; no other shard is touched or read. `step`: the result
        of `joint_step` for this push and a push of rows, which may be made at the same time.
        `encoded`: data to send for some shards in place of their gradients; `gradients` still
        states which parameters have a gradient. Raises NonFiniteGradient with the parameter's name,
        InvalidSpec if a server does not read a codec, ShapeMismatch, and ForgottenPush if a shard
        no longer knows whether it applied its part. After an error, some shards may have applied
        their parts."""
        shard_map = self._job.cached_map()
        check_buffers(shard_map, gradients, complete=False, writable=False)
        if into is not None:
            check_buffers(shard_map, into, complete=True, writable=True)
        if bases is not None:
            check_buffers(shard_map, bases, complete=True, writable=False)
            bases = {name: bases[name] for name in gradients}
        if step is None:
            self._sequence += 1
        push = _Push(
            result=PushResult(sequence=self._sequence if step is None else step.sequence),
            gradients=gradients,
            bases=bases or {},
            lr=lr,
            encoded=encoded or EncodedPush({}, _nothing),
            into=into,
            all_shard_ids=sorted(only or ()) if step is None else step.shard_ids,
            base_versions=dict(self._versions),
            # For shards without received values: the shard's present epoch.
            base_epochs={shard.shard_id: shard.epoch for shard in shard_map.shards} | self._epochs,
        )

        def attempt(
            calls: ParameterCalls, shards: Sequence[Shard], timeout_s: float, todo: set[int]
        ) -> None:
            self._push_once(calls, shards, timeout_s, todo, push)

        with tracing.span("Push"):
            push = replace(push, traceparent=tracing.current_traceparent())
            push.result.retries = self._until_done(attempt, shard_ids=only)
        return push.result

    def _push_once(
        self,
        calls: ParameterCalls,
        shards: Sequence[Shard],
        timeout_s: float,
        todo: set[int],
        push: "_Push",
    ) -> None:
        receiver = Receiver(self._blocks, push.into or {}, self._versions, todo)
        errors: list[ShoalError] = []
        epochs = {shard.shard_id: shard.epoch for shard in shards}
        calls.check_codecs(push.kinds(epochs), timeout_s)
        parts = [self._gradient_part(shard, push) for shard in shards]
        for reply in calls.push(self._push_header(push, shards), parts, timeout_s):
            if isinstance(reply, pieces.OnlyPiece) or not reply.HasField("outcome"):
                receiver.take(reply)
                continue
            outcome = reply.outcome
            if outcome.next_address:
                self._job.connect_ahead(outcome.next_address, partial(_connect, parts))
            if outcome.HasField("error"):
                error = from_detail(outcome.error)
                if isinstance(error, StalePush):
                    push.result.stale[outcome.shard_id] = error
                    todo.discard(outcome.shard_id)
                else:
                    errors.append(error)
                continue
            if outcome.shard_id in push.encoded.shards:
                push.encoded.applied(outcome.shard_id)
            push.result.versions[outcome.shard_id] = outcome.version
            self._seen.note(outcome.shard_id, epochs[outcome.shard_id], outcome.version)
            push.result.staleness[outcome.shard_id] = outcome.staleness
            push.result.duplicates += outcome.duplicate
            if push.into is None:
                todo.discard(outcome.shard_id)
            else:
                self._epochs[outcome.shard_id] = epochs[outcome.shard_id]
        if errors:
            raise most_severe(errors)

    def _gradient_part(self, shard: Shard, push: "_Push") -> GradientPart:
        gradient = push.encoded.shards.get(shard.shard_id)
        if gradient is None:
            return self._part(
                shard, (push.gradients, push.bases) if push.bases else (push.gradients,)
            )
        # The values are returned without a codec.
        return GradientPart(shard.shard_id, self._blocks[shard.shard_id].num_bytes, gradient.pieces)

    def _push_header(self, push: "_Push", shards: Sequence[Shard]) -> PushHeader:
        items = [
            PushItem(
                shard_id=shard.shard_id,
                epoch=shard.epoch,
                base_version=push.base_versions.get(shard.shard_id, 0),
                base_epoch=push.base_epochs.get(shard.shard_id, 0),
                absent_blocks=self._blocks[shard.shard_id].absent(push.gradients),
                codec=push.codec(shard.shard_id),
            )
            for shard in shards
        ]
        token = self._job.token()
        if push.traceparent:
            # Parts are sent on other threads, which lack the span.
            token.traceparent = push.traceparent
        return PushHeader(
            token=token,
            sequence=push.result.sequence,
            shards=items,
            lr=push.lr,
            return_values=push.into is not None,
            all_shard_ids=push.all_shard_ids,
            acknowledgement=self._acknowledgement,
        )

    def _until_done(
        self,
        attempt: Attempt[ParameterCalls],
        ready_by_s: float = math.inf,
        shard_ids: Collection[int] | None = None,
    ) -> int:
        """Run attempts at every server until each shard is done; return the number of rounds beyond
        the first."""
        try:
            return self._job.run(attempt, ready_by_s, shard_ids)
        except StateLost as lost:
            raise self._seen.explained(lost) from None

    @property
    def shard_map(self) -> ShardMap:
        """The shard map fetched last. Assignments may have changed since; the layout has not."""
        return self._job.cached_map()

    def _adopt(self, received: ShardMap) -> ShardMap:
        shard_map = without_tables(received)
        if self._schema_digest != shard_map.schema_digest:
            self._blocks = {shard.shard_id: ShardBlocks(shard) for shard in shard_map.shards}
            self._schema_digest = shard_map.schema_digest
        return shard_map

    @property
    def versions(self) -> Mapping[int, int]:
        """Version, by shard, of the values received last."""
        return dict(self._versions)

    @property
    def transports(self) -> Mapping[str, str]:
        """Transport of the last pull or push, by server address: `shared-memory`, `unix-socket`,
        `tcp`, `tls` or `grpc`."""
        return {address: calls.transport for address, calls in self._job.stubs.items()}

    def wait_for_lost(self, wait_s: float) -> None:
        """Make later calls wait for lost shards to come back; after `wait_s` they raise
        StateLost."""
        self._job.wait_for_lost(wait_s)

    def close(self) -> None:
        """Close every connection; a call in progress on another thread fails."""
        self._job.close()


class Receiver:
    """Writes the values of shards into the caller's buffers as they arrive. A shard is done when
    its last byte is written."""

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
        self._left_bytes = 0

    def take(self, reply: ShardData | PushReply | pieces.OnlyPiece) -> None:
        if not isinstance(reply, pieces.OnlyPiece) and reply.HasField("version"):
            self._version.CopyFrom(reply.version)
            self._left_bytes = reply.version.num_bytes
            return
        piece = reply.piece
        if piece.shard_id != self._version.shard_id or piece.shard_id not in self._blocks:
            raise MalformedMessage(
                "a piece of another shard than the one announced",
                seen=f"shard {piece.shard_id}",
                expected=f"shard {self._version.shard_id}",
            )
        self._blocks[piece.shard_id].scatter(piece, self._into)
        self._left_bytes -= len(piece.data)
        if self._left_bytes == 0:
            self._versions[piece.shard_id] = self._version.version
            self._todo.discard(piece.shard_id)


@dataclass(frozen=True, kw_only=True)
class _Push:
    """One push over all its attempts."""

    result: PushResult
    gradients: Buffers
    bases: Buffers
    lr: Sequence[float]
    encoded: EncodedPush
    into: Buffers | None
    all_shard_ids: Sequence[int]
    """Ids of all shards that the step touches; empty: every dense shard of the job."""
    base_versions: Mapping[int, int]
    base_epochs: Mapping[int, int]
    traceparent: str = ""

    def codec(self, shard_id: int) -> GradientCodec | None:
        gradient = self.encoded.shards.get(shard_id)
        return None if gradient is None else gradient.codec

    def kinds(self, shard_ids: Iterable[int]) -> set[str]:
        """Kinds of the codecs in which these shards' gradients are encoded."""
        codecs = (self.codec(shard_id) for shard_id in shard_ids)
        return {codec.kind for codec in codecs if codec is not None}


def _connect(parts: Sequence[GradientPart], calls: ParameterCalls) -> None:
    """Connect ahead of calls like the one with these parts."""
    calls.connect(max(part.num_bytes for part in parts), len(parts))


def _nothing(shard_id: int) -> None:
    """Do nothing: the callback of a push without a codec."""
