"""A job's tables on its parameter servers: rows looked up and pushed, from an ordinary thread.

Ids, births and values are little-endian bytes, and come sorted by shard: `route` does it for those
who have no arrays. Which server holds which shard, and what happens when a server is away for a
while, is dealt with here.
"""

import math
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from shoal_client.channel import Coordinators
from shoal_client.layouts import of_tables
from shoal_client.shard_servers import Attempt, ShardServers, worst_of
from shoal_proto.errors import ChecksumMismatch, InternalError, RetryError, ShoalError, UnknownShard
from shoal_proto.row_hash import shard_of
from shoal_proto.status import from_detail
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.shards_pb2 import GetMapRequest, Shard, ShardMap
from shoal_proto.v1.shards_pb2_grpc import ShardsStub
from shoal_proto.v1.tables_pb2 import (
    RowGradients,
    RowIds,
    TableLookupHeader,
    TableLookupReply,
    TableLookupRequest,
    TablePushHeader,
    TablePushItem,
    TablePushReply,
    TablePushRequest,
    TableSpec,
)
from shoal_proto.v1.tables_pb2_grpc import TablesStub

log = structlog.get_logger(__name__)

ID_BYTES = 8
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
MESSAGE_BYTES = 1024 * 1024
"""Rows that travel in one message, unless a single one is larger."""
MAP_TIMEOUT_S = 2.0
"""A call under way spends no more on asking for a newer map: the coordinator may be away."""

Where = tuple[str, int]
"""Name of a table, index of one of its virtual shards."""
Bytes = bytes | memoryview


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one shard as they were at `version`, or since, in the order asked for."""

    version: int
    epoch: int
    births: bytes
    """A little-endian uint64 a row: the version that made it; 0 for one that has its first values
    and was not made."""
    values: bytes
    step: int
    """Steps of the table that the shard knew of."""


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Gradients for rows of one shard, and what they were computed on."""

    ids: Bytes
    births: Bytes
    gradients: Bytes
    base_version: int
    base_epoch: int
    step: int = 0
    """Which step of the table this is, as far as is known here."""
    lr: float | None = None
    """None: as the table was specified."""

    @property
    def num_rows(self) -> int:
        return len(self.ids) // ID_BYTES


@dataclass(kw_only=True)
class TablePushResult:
    """What became of one push. Every shard's part was applied exactly once."""

    sequence: int
    versions: dict[Where, int] = field(default_factory=dict)
    """Per shard: its version right after this push."""
    staleness: dict[Where, int] = field(default_factory=dict)
    """Per shard: how many updates of others the gradients did not know of."""
    fates: dict[Where, bytes] = field(default_factory=dict)
    """Per shard: a RowFate for each row as pushed; empty: all were applied."""
    steps: dict[Where, int] = field(default_factory=dict)
    """Per shard: steps of the table that it knows of."""
    retries: int = 0
    """Attempts beyond the first."""
    duplicates: int = 0
    """Shards that answered a retry of what they had applied before."""


def route(ids: Iterable[int], num_shards: int) -> "dict[int, array[int]]":
    """Each id once, by index of the virtual shard that has it, in rising order."""
    routed: dict[int, array[int]] = {}
    for row_id in sorted(set(ids)):
        routed.setdefault(shard_of(row_id, num_shards), array("q")).append(row_id)
    return routed


class TableClient:
    """One member's view of its job's tables. For one thread at a time, but for `close`.

    Every call is bounded by `timeout_s`, retries included; a retry never applies a gradient twice.
    Raises RetryError when the time is over, Fenced when the member was declared lost, RefusedError
    for what is wrong with the request.
    """

    def __init__(
        self,
        coordinators: Sequence[str],
        token: Callable[[], Token],
        *,
        timeout_s: float = 60.0,
    ) -> None:
        self._coordinators = Coordinators(coordinators)
        self._token = token
        self._timeout_s = timeout_s
        self._servers = ShardServers(TablesStub, timeout_s)
        self._map: ShardMap | None = None
        self._shards: dict[Where, Shard] = {}
        self._tables: dict[str, TableSpec] = {}
        self._sequence = 0

    def fetch_map(self, wait_s: float = 0.0, *, timeout_s: float | None = None) -> ShardMap:
        """The shard map as it is now; waits up to `wait_s` for there to be one."""
        request = GetMapRequest(token=self._token(), wait_s=wait_s)
        limit_s = self._timeout_s + wait_s if timeout_s is None else timeout_s
        found = self._coordinators.call(
            lambda channel: ShardsStub(channel).GetMap, request, timeout_s=limit_s
        )
        self._map = found
        self._shards = of_tables(found)
        self._tables = {table.name: table for table in found.tables}
        return found

    def look_up(self, wanted: Mapping[Where, Bytes]) -> dict[Where, Rows]:
        """The rows of these ids, which are bytes of int64, by shard. Changes nothing."""
        found: dict[Where, Rows] = {}

        def attempt(
            stub: TablesStub, shards: Sequence[Shard], timeout_s: float, todo: set[int]
        ) -> None:
            asked = [
                (shard, ids) for shard in shards for ids in self._cut(wanted[_where(shard)], shard)
            ]
            replies = stub.Lookup(self._lookup_requests(asked), timeout=timeout_s)
            taken: dict[int, list[TableLookupReply]] = {}
            errors: list[ShoalError] = []
            for (shard, _), reply in zip(asked, replies, strict=False):
                if reply.HasField("error"):
                    errors.append(from_detail(reply.error))
                    continue
                _check(reply)
                taken.setdefault(shard.shard_id, []).append(reply)
            for shard in shards:
                parts = taken.get(shard.shard_id, [])
                if len(parts) == sum(s is shard for s, _ in asked):
                    found[_where(shard)] = _joined(parts)
                    todo.discard(shard.shard_id)
            if errors:
                raise worst_of(errors)

        self._until_done(attempt, wanted)
        return found

    def _cut(self, ids: Bytes, shard: Shard) -> Iterator[Bytes]:
        """Pieces of the ids whose rows fit into a message; at least one."""
        size = self._rows_a_message(shard) * ID_BYTES
        for start in range(0, max(len(ids), 1), size):
            yield ids[start : start + size]

    def _lookup_requests(
        self, asked: Sequence[tuple[Shard, Bytes]]
    ) -> Iterator[TableLookupRequest]:
        yield TableLookupRequest(header=TableLookupHeader(token=self._token()))
        for shard, ids in asked:
            rows = RowIds(shard_id=shard.shard_id, epoch=shard.epoch, ids=bytes(ids))
            yield TableLookupRequest(rows=rows)

    def push(self, pushed: Mapping[Where, Gradients]) -> TablePushResult:
        """Apply gradients, each exactly once.

        Raises NonFiniteGradient with table and row; then what lies in other shards may have been
        applied.
        """
        self._sequence += 1
        result = TablePushResult(sequence=self._sequence)

        def attempt(
            stub: TablesStub, shards: Sequence[Shard], timeout_s: float, todo: set[int]
        ) -> None:
            by_id = {shard.shard_id: _where(shard) for shard in shards}
            errors: list[ShoalError] = []
            requests = self._push_requests(pushed, shards, result.sequence)
            for reply in stub.Push(requests, timeout=timeout_s):
                if reply.HasField("error"):
                    errors.append(from_detail(reply.error))
                    continue
                _note(result, by_id[reply.shard_id], reply)
                todo.discard(reply.shard_id)
            if errors:
                raise worst_of(errors)

        result.retries = self._until_done(attempt, pushed)
        return result

    def _push_requests(
        self, pushed: Mapping[Where, Gradients], shards: Sequence[Shard], sequence: int
    ) -> Iterator[TablePushRequest]:
        header = TablePushHeader(
            token=self._token(),
            sequence=sequence,
            shards=[_item(shard, pushed[_where(shard)]) for shard in shards],
            all_shard_ids=sorted(self._shards[where].shard_id for where in pushed),
        )
        yield TablePushRequest(header=header)
        for shard in shards:
            part = pushed[_where(shard)]
            row_bytes = self._row_bytes(shard)
            size = self._rows_a_message(shard)
            for start in range(0, part.num_rows, size):
                ids = bytes(part.ids[start * ID_BYTES : (start + size) * ID_BYTES])
                births = bytes(part.births[start * ID_BYTES : (start + size) * ID_BYTES])
                data = bytes(part.gradients[start * row_bytes : (start + size) * row_bytes])
                rows = RowGradients(
                    shard_id=shard.shard_id,
                    ids=ids,
                    births=births,
                    gradients=data,
                    checksum=zlib.crc32(data, zlib.crc32(births, zlib.crc32(ids))),
                )
                yield TablePushRequest(rows=rows)

    def _row_bytes(self, shard: Shard) -> int:
        table = self._tables[shard.table]
        return table.dim * DTYPE_BYTES[table.dtype]

    def _rows_a_message(self, shard: Shard) -> int:
        return max(1, MESSAGE_BYTES // max(self._row_bytes(shard), 2 * ID_BYTES))

    def _until_done(self, attempt: Attempt[TablesStub], wanted: Mapping[Where, object]) -> int:
        unknown = [where for where in wanted if where not in self._shards]
        if unknown:
            raise UnknownShard(
                "the job has no such table, or not so many shards of it",
                seen=f"shard {unknown[0][1]} of table {unknown[0][0]}",
                expected=", ".join(sorted(self._tables)) or "place() and fetch_map() first",
            )
        ids = {self._shards[where].shard_id for where in wanted}
        return self._servers.run(self._known_map, self._refetch_map, attempt, math.inf, ids)

    def _refetch_map(self) -> None:
        try:
            self.fetch_map(timeout_s=MAP_TIMEOUT_S)
        except RetryError as error:
            # The map in hand is the best there is; the servers say if it is not good enough.
            log.info("shard_map_not_fetched", reason=str(error))

    def _known_map(self) -> ShardMap:
        if self._map is None:
            raise InternalError("no shard map was fetched yet", expected="fetch_map() first")
        return self._map

    def close(self) -> None:
        """Close every connection; a call under way on another thread fails."""
        self._servers.close()
        self._coordinators.close()


def _where(shard: Shard) -> Where:
    return shard.table, shard.table_index


def _item(shard: Shard, part: Gradients) -> TablePushItem:
    return TablePushItem(
        shard_id=shard.shard_id,
        epoch=shard.epoch,
        base_version=part.base_version,
        base_epoch=part.base_epoch,
        num_rows=part.num_rows,
        step=part.step,
        lr=part.lr,
    )


def _note(result: TablePushResult, where: Where, reply: TablePushReply) -> None:
    result.versions[where] = reply.version
    result.staleness[where] = reply.staleness
    result.fates[where] = reply.fates
    result.steps[where] = reply.step
    result.duplicates += reply.duplicate


def _check(reply: TableLookupReply) -> None:
    seen = zlib.crc32(reply.values, zlib.crc32(reply.births))
    if seen != reply.checksum:
        raise ChecksumMismatch(
            f"rows of shard {reply.shard_id} changed on the way",
            seen=f"CRC-32 {seen:#010x}",
            expected=f"{reply.checksum:#010x}",
        )


def _joined(parts: Sequence[TableLookupReply]) -> Rows:
    """The oldest version counts: what came later may be newer, but not older."""
    return Rows(
        version=min(part.version for part in parts),
        epoch=min(part.epoch for part in parts),
        births=b"".join(part.births for part in parts),
        values=b"".join(part.values for part in parts),
        step=max(part.step for part in parts),
    )


__all__ = ["Gradients", "Rows", "TableClient", "TablePushResult", "Where", "route"]
