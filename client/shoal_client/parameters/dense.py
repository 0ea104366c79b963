"""A job's parameters on its parameter servers: create, pull and push. Values and gradients are the
caller's own buffers, one for each parameter.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from shoal_client.parameters.calls import ParameterCalls
from shoal_client.parameters.job_shards import JobShards, JointStep, Receiver, ShardPush
from shoal_client.shards.blocks import Buffers, ShardBlocks, check_buffers
from shoal_client.shards.layouts import without_tables
from shoal_client.shards.parts import EncodedPush, GradientPart, Pieces
from shoal_proto.errors import StalePush
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.parameters_pb2 import (
    Acknowledgement,
    CreateHeader,
    OptimizerSpec,
    PullItem,
    PullRequest,
    PushItem,
    PushOutcome,
)
from shoal_proto.v1.shards_pb2 import (
    ParameterSpec,
    PlaceRequest,
    Shard,
    ShardMap,
)
from shoal_proto.v1.tables_pb2 import TableSpec

PULL_WAIT_S = 1.0
"""A call waits this long at a server for shards that do not exist yet. Lost ones are then
reported."""


@dataclass(kw_only=True)
class PushResult:
    """Result of a push. Every shard has applied its part once, except those in `stale`."""

    sequence: int
    versions: dict[int, int] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    """Updates, by shard, since the version that the gradient was computed on."""
    retries: int = 0
    """Rounds of attempts beyond the first, plus the longest chain of redirects of each round."""
    duplicates: int = 0
    """Shards that had applied the push before a retry."""
    stale: dict[int, StalePush] = field(default_factory=dict)
    """Shards that refused their part as too stale: pull, compute the gradient again, and push it to
    these shards only."""

    @property
    def staleness_max(self) -> int:
        return max(self.staleness.values(), default=0)

    @property
    def staleness_mean(self) -> float:
        return sum(self.staleness.values()) / max(len(self.staleness), 1)


class ParameterClient:
    """A member's view of its job's parameters. Not thread-safe, except `close`.

    A call is bounded by `timeout_s`; `ShardServers.run` names longer waits. A retry never applies a
    gradient twice. Raises RetryError when the time is over, Fenced if the member was declared lost
    or the job was started over, StateLost if a shard is lost, ChecksumMismatch for damaged data,
    RefusedError for a bad request, InternalError before the first map. `transport`: see
    `transport_of`."""

    def __init__(
        self,
        coordinators: Sequence[str],
        token: Callable[[], Token],
        *,
        timeout_s: float = 60.0,
        acknowledgement: Acknowledgement.ValueType = Acknowledgement.ACKNOWLEDGEMENT_DEFAULT,
        transport: str | None = None,
    ) -> None:
        self._token = token
        self._timeout_s = timeout_s
        self._job = JobShards(
            coordinators,
            token,
            timeout_s,
            acknowledgement=acknowledgement,
            transport=transport,
            adopt=self._adopt,
        )
        self._schema_digest = ""
        self._blocks: dict[int, ShardBlocks] = {}
        self._versions: dict[int, int] = {}
        self._epochs: dict[int, int] = {}
        self._sequence = 0

    def place(
        self, parameters: Sequence[ParameterSpec], tables: Sequence[TableSpec] = ()
    ) -> ShardMap:
        """Return the job's shard map without the shards of `tables`; the first call makes it.
        Raises ProposalConflict or ShapeMismatch if parameters or tables differ from the job's,
        NoServers, and InvalidSpec for a schema that the coordinator does not take."""
        request = PlaceRequest(token=self._token(), parameters=parameters, tables=tables)
        return self._job.place(request)

    def fetch_map(self, wait_s: float = 0.0, *, timeout_s: float | None = None) -> ShardMap:
        """See `JobShards.fetch_map`."""
        return self._job.fetch_map(wait_s, timeout_s)

    def create(self, optimizer: OptimizerSpec, values: Buffers) -> int:
        """Give the shards their first values; return the number of created shards, too low if an
        answer was lost. Existing shards stay unchanged: any member may create at any time. Raises
        ShapeMismatch."""
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

        self._job.run(attempt)
        return len(created)

    def _part(self, shard: Shard, sources: Sequence[Buffers]) -> GradientPart:
        blocks = self._blocks[shard.shard_id]

        def pieces_of(piece_bytes: int) -> Pieces:
            for i, buffers in enumerate(sources):
                for offset_bytes, memory in blocks.gather(buffers, piece_bytes):
                    yield i * blocks.num_bytes + offset_bytes, memory

        num_bytes = max(len(sources), 1) * blocks.num_bytes
        return GradientPart(shard.shard_id, num_bytes, pieces_of)

    def pull(self, into: Buffers, *, wait_s: float | None = None) -> None:
        """Write the newest values into the buffers. Each shard's values are of one version.

        Waits for shards without values, e.g. while they are created or restored, up to `wait_s`,
        but never longer than for other temporary failures (None: as long); then raises
        ShardNotReady. After an error, some buffers may have new values. Raises ShapeMismatch."""
        ready_by_s = math.inf if wait_s is None else time.monotonic() + wait_s
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
                    self._job.seen.note(shard.shard_id, shard.epoch, self._versions[shard.shard_id])

        self._job.run(attempt, ready_by_s)

    def joint_step(self, rows_in: Collection[int]) -> JointStep:
        """Begin a step that includes the next push of this client, to every shard, and a push of
        rows to `rows_in` (see `TableClient.shard_ids`). Pass the step to both pushes."""
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

        Parameters without a gradient do not change. `lr`: a learning rate for each parameter group;
        empty: as in `create`. `bases`: the values on which the gradients were computed, for servers
        that compensate for delay; not in the memory of `into`. `only`: ids of the shards to push
        to. `step`: see `joint_step`. `encoded`: data to send for some shards in place of their
        gradients; `gradients` still names the parameters with a gradient. Raises NonFiniteGradient
        with the parameter's name, InvalidSpec if a server does not read a codec, ShapeMismatch, and
        ForgottenPush if a shard no longer knows whether it applied its part. After an error, some
        shards may have applied their parts."""
        shard_map = self._job.cached_map()
        check_buffers(shard_map, gradients, complete=False, writable=False)
        if into is not None:
            check_buffers(shard_map, into, complete=True, writable=True)
        if bases is not None:
            check_buffers(shard_map, bases, complete=True, writable=False)
            bases = {name: bases[name] for name in gradients}
        if step is None:
            self._sequence += 1
        sequence = self._sequence if step is None else step.sequence
        result, versions = PushResult(sequence=sequence), dict(self._versions)
        # Shards without received values: the present epoch.
        epochs = {shard.shard_id: shard.epoch for shard in shard_map.shards} | self._epochs
        sources = (gradients, bases) if bases else (gradients,)
        shards_encoded = {} if encoded is None else encoded.shards

        def item(shard: Shard) -> PushItem:
            gradient = shards_encoded.get(shard.shard_id)
            return PushItem(
                shard_id=shard.shard_id,
                epoch=shard.epoch,
                base_version=versions.get(shard.shard_id, 0),
                base_epoch=epochs.get(shard.shard_id, 0),
                absent_blocks=self._blocks[shard.shard_id].absent(gradients),
                codec=None if gradient is None else gradient.codec,
            )

        def part(shard: Shard) -> GradientPart:
            gradient = shards_encoded.get(shard.shard_id)
            if gradient is None:
                return self._part(shard, sources)
            num_bytes = self._blocks[shard.shard_id].num_bytes
            return GradientPart(shard.shard_id, num_bytes, gradient.pieces)

        def applied(outcome: PushOutcome, epoch: int) -> None:
            shard_id = outcome.shard_id
            if encoded is not None and shard_id in shards_encoded:
                encoded.applied(shard_id)
            result.versions[shard_id] = outcome.version
            result.staleness[shard_id] = outcome.staleness
            result.duplicates += outcome.duplicate
            if into is not None:
                self._epochs[shard_id] = epoch

        def receiver(todo: set[int]) -> Receiver:
            assert into is not None
            return Receiver(self._blocks, into, self._versions, todo)

        push = ShardPush(
            span="Push",
            sequence=sequence,
            item=item,
            part=part,
            applied=applied,
            refused=result.stale.__setitem__,
            receiver=None if into is None else receiver,
            shard_ids=only,
            all_shard_ids=sorted(only or ()) if step is None else step.shard_ids,
            lr=lr,
        )
        result.retries = self._job.push(push)
        return result

    @property
    def shard_map(self) -> ShardMap:
        """The shard map fetched last; assignments may have changed since."""
        return self._job.cached_map()

    def _adopt(self, received: ShardMap) -> ShardMap:
        shard_map = without_tables(received)
        if self._schema_digest != shard_map.schema_digest:
            self._blocks = {shard.shard_id: ShardBlocks(shard) for shard in shard_map.shards}
            self._schema_digest = shard_map.schema_digest
        return shard_map

    @property
    def versions(self) -> Mapping[int, int]:
        """Versions of the values received last, by shard."""
        return dict(self._versions)

    @property
    def transports(self) -> Mapping[str, str]:
        """Transport by server address: see `BulkTransport.name`."""
        return self._job.transports

    def wait_for_lost(self, wait_s: float) -> None:
        """Make later calls wait for lost shards; after `wait_s` they raise StateLost."""
        self._job.wait_for_lost(wait_s)

    def close(self) -> None:
        """Close every connection; a call in progress fails."""
        self._job.close()
