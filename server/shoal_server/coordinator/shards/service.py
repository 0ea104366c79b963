"""The Shards service: places a job's shards on servers, and returns the current shard map."""

import asyncio
import secrets
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

import structlog

from shoal_proto.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidSpec,
    MalformedMessage,
    NoServers,
    ProposalConflict,
    RetryError,
    ShapeMismatch,
    ShoalError,
    Unavailable,
)
from shoal_proto.names import NAME_RULE, is_name
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.shards_pb2 import (
    AcceptLossReply,
    AcceptLossRequest,
    Block,
    GetMapRequest,
    ParameterSpec,
    PlaceRequest,
    Shard,
    ShardMap,
)
from shoal_proto.v1.shards_pb2_grpc import ShardsServicer
from shoal_proto.v1.tables_pb2 import TableSpec
from shoal_server.coordinator.servers.answering import Choose, answering, servers_for
from shoal_server.coordinator.shards import table_specs
from shoal_server.coordinator.shards.controller import num_bytes_of
from shoal_server.coordinator.shards.loss_acceptance import LossAcceptance
from shoal_server.core.processes import Holder
from shoal_server.core.shards import placement
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment
from shoal_server.core.shards.rebalance import Servers, rebalance
from shoal_server.etcd import keys
from shoal_server.etcd.api import absent
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.etcd.mirror import follow_key
from shoal_server.etcd.records import assignments, shard_map
from shoal_server.etcd.records.deflated_chunks import MAX_LAYOUT_BYTES
from shoal_server.etcd.repeat import is_outcome_unknown
from shoal_server.serving.admission.config import JobLimits
from shoal_server.serving.rpc import Context
from shoal_server.serving.unix_clock import unix_s

log = structlog.get_logger(__name__)

ASKS_AGAIN_WITHIN_S = 5.0
"""Time after its last call for which a member counts as waiting."""
MAX_SHOWN_DIFFERENCES = 8
MAX_JOBS_READ = 16

Authorize = Callable[[Token], Awaitable[None]]


class _WithoutServers:
    """Members refused for lack of parameter servers."""

    def __init__(self) -> None:
        self._refused: dict[str, dict[str, tuple[str, float, float]]] = {}
        """Reason, and times of the first and last refusal, by job and member."""

    def refused(self, token: Token, why: str) -> None:
        now_s = unix_s()
        known = dict(self._of(token.job, now_s))
        since_s = known.get(token.member_id, ("", now_s, now_s))[1]
        self._refused[token.job] = {**known, token.member_id: (why, since_s, now_s)}

    def placed(self, job: str) -> None:
        self._refused.pop(job, None)

    def waiting(self, job: str) -> Mapping[str, tuple[str, float]]:
        return {name: (why, since_s) for name, (why, since_s, _) in self._of(job, unix_s())}

    def _of(self, job: str, now_s: float) -> list[tuple[str, tuple[str, float, float]]]:
        entries = self._refused.get(job, {}).items()
        return [(name, entry) for name, entry in entries if now_s - entry[2] < ASKS_AGAIN_WITHIN_S]


@dataclass(slots=True)
class _MapRead:
    """Newest reading of a job's shard map, numbered from 1."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    begun: int = 0
    done: int = 0
    """Number of the newest complete reading."""
    layout: ShardMap | None = None


class _CurrentMaps:
    """Reader of current shard maps. Calls that arrive during a reading share the next one: all
    workers of a large job ask at once."""

    def __init__(self, store: LeaderStore, layouts: shard_map.ShardMapReader) -> None:
        self._store = store
        self._layouts = layouts
        self._reads: OrderedDict[str, _MapRead] = OrderedDict()

    async def read(self, job: str) -> ShardMap | None:
        """Return the layout with each shard's primary, read after this call began; None without
        one. Do not change the result. Raises what `ShardMapReader.read` and `shard_map.fill` raise.
        """
        read = self._reads.setdefault(job, _MapRead())
        self._reads.move_to_end(job)
        begun_before = read.begun
        async with read.lock:
            if read.done <= begun_before:
                read.begun += 1
                layout = await self._layouts.read(job)
                read.layout = layout and await shard_map.fill(self._store, layout)
                read.done = read.begun
            current = read.layout
        self._forget_oldest()
        return current

    def _forget_oldest(self) -> None:
        for job in [name for name, read in self._reads.items() if not read.lock.locked()]:
            if len(self._reads) <= MAX_JOBS_READ:
                return
            del self._reads[job]


class ShardsService(ShardsServicer):
    """Places shards and serves shard maps. `authorize` raises for a stale token."""

    def __init__(
        self,
        store: LeaderStore,
        authorize: Authorize,
        copies: int = 2,
        choose: Choose = answering,
        *,
        accepting: LossAcceptance | None = None,
        call_wait_s: float = JobLimits.call_wait_s,
    ) -> None:
        """`copies`: wanted copies of each shard, the primary included. `accepting`: serves
        AcceptLoss. `call_wait_s`: maximum wait for a map."""
        self._call_wait_s = call_wait_s
        self._accepting = accepting
        self._choose = choose
        self._store = store
        self._layouts = shard_map.ShardMapReader(store)
        self._current = _CurrentMaps(store, self._layouts)
        self._authorize = authorize
        self._copies = copies
        self._without_servers = _WithoutServers()

    def waiting(self, job: str) -> Mapping[str, tuple[str, float]]:
        """Members without a parameter server: the reason, and the start of the wait."""
        return self._without_servers.waiting(job)

    async def Place(self, request: PlaceRequest, context: Context) -> ShardMap:
        job = _job(request.token)
        await self._authorize(request.token)
        parameters = [_parameter(spec) for spec in request.parameters]
        table_specs.check_tables(request.tables)
        try:
            # A model may consist of tables alone.
            if parameters or not request.tables:
                placement.check_schema(parameters)
        except placement.SchemaProblem as problem:
            raise InvalidSpec(
                problem.what, seen=problem.seen, expected=problem.expected
            ) from problem
        held = await self._layouts.read(job)
        if held is None:
            try:
                held = await self._place(job, request, parameters)
            except NoServers as error:
                why = f"a parameter server to hold the shards: {error.seen}"
                self._without_servers.refused(request.token, why)
                raise
            self._without_servers.placed(job)
        table_specs.check_same(job, request.tables, held.tables)
        if held.schema_digest != _digest(parameters, request.tables):
            raise _conflict(job, parameters, [_parameter(spec) for spec in held.parameters])
        return await self._read_current(job)

    async def GetMap(self, request: GetMapRequest, context: Context) -> ShardMap:
        job = _job(request.token)
        await self._authorize(request.token)
        wait_s = min(max(request.wait_s, 0.0), self._call_wait_s)
        if wait_s > 0 and await self._layouts.read(job) is None:
            await self._await_map(job, wait_s)
        return await self._read_current(job, wait_s)

    async def _read_current(self, job: str, waited_s: float = 0.0) -> ShardMap:
        current = await self._current.read(job)
        if current is None:
            raise DeadlineExceeded(
                f"job {job} has no shard map",
                seen=f"none within {waited_s:g} s",
                expected="a member that places the parameters",
            )
        return current

    async def AcceptLoss(self, request: AcceptLossRequest, context: Context) -> AcceptLossReply:
        if self._accepting is None:
            raise InternalError("this service was made without `accepting`")
        return await self._accepting.accept(request)

    async def _place(
        self,
        job: str,
        request: PlaceRequest,
        parameters: Sequence[placement.Parameter],
    ) -> ShardMap:
        """Write the first map, or return that of a concurrent call. Raises NoServers, InvalidSpec
        for a map that is too large, Unavailable if no map is found, and what `authorize` and the
        store raise."""
        addresses = await servers_for(self._store, self._choose, job)
        # Again: the job may have been started over.
        await self._authorize(request.token)
        by_id = {holder.server_id: address for holder, address in addresses.items()}
        # Compute in threads: a large model takes seconds.
        draft = await asyncio.to_thread(_draft, job, request, parameters, by_id)
        if draft.ByteSize() > MAX_LAYOUT_BYTES:
            raise InvalidSpec(
                f"the shard map of job {job} is too large to keep",
                seen=f"{draft.ByteSize()} bytes for {len(parameters)} parameters",
                expected=f"at most {MAX_LAYOUT_BYTES} bytes",
                fix="Use fewer parameters or shorter names.",
            )
        first = await asyncio.to_thread(first_assignments, draft, addresses, self._copies)
        layout = await asyncio.to_thread(shard_map.stored, draft)
        try:
            is_placed = await self._write(layout, first)
        except RetryError as error:
            # After an unknown outcome, the layout read below decides.
            if not is_outcome_unknown(error):
                raise
            is_placed = False
        if is_placed:
            log.info(
                "shards_placed",
                job=job,
                num_shards=len(draft.shards),
                servers=sorted(by_id),
                num_bytes=sum(p.num_bytes for p in parameters),
            )
            return draft
        held = await self._layouts.read(job)
        if held is None:
            raise Unavailable(
                f"the shards of job {job} could not be placed",
                seen="records that were deleted, or an unknown outcome",
                fix="Place them again.",
            )
        return held

    async def _write(self, layout: shard_map.StoredLayout, first: JobAssignments) -> bool:
        chunks_exist = await shard_map.write_chunks(self._store, layout)
        result = await assignments.place(
            self._store,
            first,
            compares=[chunks_exist, absent(layout.head.key)],
            operations=[layout.head],
        )
        if result.succeeded:
            await shard_map.delete_other_layouts(self._store, layout, result.revision)
        return result.succeeded

    async def _await_map(self, job: str, wait_s: float) -> None:
        with suppress(TimeoutError):
            async with (
                asyncio.timeout(wait_s),
                aclosing(follow_key(self._store, keys.shard_map(job))) as written,
            ):
                async for item in written:
                    if item is not None:
                        return


def first_assignments(layout: ShardMap, present: Iterable[Holder], copies: int) -> JobAssignments:
    """Assign the primaries that the layout names, and servers that are to become backups."""
    by_id = {holder.server_id: holder for holder in present}
    first = JobAssignments(
        job=layout.job,
        copies=copies,
        shards=tuple(
            ShardAssignment(
                shard_id=shard.shard_id, epoch=shard.epoch, primary=by_id[shard.server_id]
            )
            for shard in layout.shards
        ),
        placement_id=secrets.token_hex(8),
    )
    return rebalance(first, Servers(present=frozenset(by_id.values())), num_bytes_of(layout))


def _draft(
    job: str,
    request: PlaceRequest,
    parameters: Sequence[placement.Parameter],
    addresses: dict[str, str],
) -> ShardMap:
    shards = placement.cut_into_shards(parameters, len(addresses))
    layout = ShardMap(
        job=job,
        schema_digest=_digest(parameters, request.tables),
        parameters=request.parameters,
        tables=request.tables,
    )
    for placed in placement.place(shards, addresses, turn=zlib.crc32(job.encode())):
        shard = placed.shard
        blocks = [
            Block(parameter=b.parameter, offset=b.offset, num_elements=b.num_elements)
            for b in shard.blocks
        ]
        layout.shards.append(
            Shard(
                shard_id=shard.shard_id,
                server_id=placed.server_id,
                address=addresses[placed.server_id],
                epoch=1,
                dtype=shard.dtype,
                group=shard.group,
                blocks=blocks,
            )
        )
    layout.shards.extend(table_specs.lay_out(request.tables, addresses, len(shards)))
    return layout


def _digest(parameters: Sequence[placement.Parameter], tables: Sequence[TableSpec]) -> str:
    return table_specs.schema_digest(placement.schema_digest(parameters), tables)


def _conflict(
    job: str, seen: Sequence[placement.Parameter], expected: Sequence[placement.Parameter]
) -> ShoalError:
    """Return ShapeMismatch if only shapes differ, else ProposalConflict."""
    differences = placement.find_differences(seen, expected)
    names = {p.name for p in seen} == {p.name for p in expected}
    alike = {(p.name, p.dtype, p.group) for p in seen} == {
        (p.name, p.dtype, p.group) for p in expected
    }
    shown = differences[:MAX_SHOWN_DIFFERENCES]
    more = len(differences) - len(shown)
    kind = ShapeMismatch if names and alike else ProposalConflict
    return kind(
        f"the model's parameters differ from those of job {job}",
        seen="; ".join(f"{d.parameter}: {d.seen}" for d in shown)
        + (f"; and {more} more" if more else ""),
        expected="; ".join(f"{d.parameter}: {d.expected}" for d in shown),
        fix="Train the same model in every worker, or use another job name.",
        details={d.parameter: f"saw {d.seen}, expected {d.expected}" for d in shown},
    )


def _job(token: Token) -> str:
    if not is_name(token.job):
        raise MalformedMessage(
            "the token names no job", seen=repr(token.job), expected=f"a name of {NAME_RULE}"
        )
    return token.job


def _parameter(spec: ParameterSpec) -> placement.Parameter:
    return placement.Parameter(
        name=spec.name, shape=tuple(spec.shape), dtype=spec.dtype, group=spec.group
    )
