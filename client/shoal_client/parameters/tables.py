"""A job's tables on its parameter servers: rows looked up and pushed, from an ordinary thread.

Ids, births and values are little-endian bytes, and come sorted by shard: `route` does it for those
who have no arrays. Which server holds which shard, and what happens when a server is away for a
while, is dealt with here.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import structlog

from shoal_client.connection.coordinators import Coordinators
from shoal_client.parameters.joint_step import JointStep
from shoal_client.parameters.servers import Attempt, ShardServers, worst_of
from shoal_client.parameters.table_rows import (
    ID_BYTES,
    MESSAGE_BYTES,
    Bytes,
    Gradients,
    Rows,
    TablePushResult,
    Where,
    check,
    joined,
    note,
    packed,
)
from shoal_client.shards.layouts import keep_addresses, of_tables
from shoal_proto.checksum import crc32
from shoal_proto.dtypes import DTYPE_BYTES
from shoal_proto.errors import InternalError, RetryError, ShoalError, UnknownShard
from shoal_proto.status import from_detail
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.shards_pb2 import GetMapRequest, Shard, ShardMap
from shoal_proto.v1.shards_pb2_grpc import ShardsStub
from shoal_proto.v1.tables_pb2 import (
    FoundRows,
    RowGradients,
    RowIds,
    TableLookupHeader,
    TableLookupRequest,
    TablePushHeader,
    TablePushItem,
    TablePushRequest,
    TableSpec,
)
from shoal_proto.v1.tables_pb2_grpc import TablesStub

log = structlog.get_logger(__name__)

MAP_TIMEOUT_S = 2.0
"""A call under way spends no more on asking for a newer map: the coordinator may be away."""


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
        acknowledgement: Acknowledgement.ValueType = Acknowledgement.ACKNOWLEDGEMENT_DEFAULT,
    ) -> None:
        self._acknowledgement = acknowledgement
        self._coordinators = Coordinators(coordinators)
        self._token = token
        self._timeout_s = timeout_s
        self._servers = ShardServers(lambda address, channel: TablesStub(channel), timeout_s)
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
        keep_addresses(found, self._map)
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
            by_id = {shard.shard_id: _where(shard) for shard in shards}
            pieces = [
                (RowIds(shard_id=s.shard_id, epoch=s.epoch, ids=bytes(ids)), size)
                for s in shards
                for ids, size in self._cut(wanted[_where(s)], s)
            ]
            left = Counter(rows.shard_id for rows, _ in pieces)
            taken: dict[int, list[FoundRows]] = {shard_id: [] for shard_id in by_id}
            errors: list[ShoalError] = []
            for reply in stub.Lookup(self._lookup_requests(pieces), timeout=timeout_s):
                for rows in reply.rows:
                    if rows.HasField("error"):
                        errors.append(from_detail(rows.error))
                        continue
                    check(rows)
                    taken[rows.shard_id].append(rows)
                    left[rows.shard_id] -= 1
                    if not left[rows.shard_id]:
                        found[by_id[rows.shard_id]] = joined(taken[rows.shard_id])
                        todo.discard(rows.shard_id)
            if errors:
                raise worst_of(errors)

        self._until_done(attempt, wanted)
        return found

    def _cut(self, ids: Bytes, shard: Shard) -> Iterator[tuple[Bytes, int]]:
        """Pieces of the ids whose rows fit into a message, and the bytes of these; at least one."""
        size = self._rows_a_message(shard)
        for start in range(0, max(len(ids) // ID_BYTES, 1), size):
            piece = ids[start * ID_BYTES : (start + size) * ID_BYTES]
            yield piece, len(piece) // ID_BYTES * (self._row_bytes(shard) + ID_BYTES)

    def _lookup_requests(
        self, pieces: Iterable[tuple[RowIds, int]]
    ) -> Iterator[TableLookupRequest]:
        header = TableLookupHeader(token=self._token())
        for number, rows in enumerate(packed(pieces)):
            yield TableLookupRequest(header=None if number else header, rows=rows)

    def shard_ids(self, pushed: Iterable[Where]) -> list[int]:
        """The ids of these shards. Raises UnknownShard."""
        self._check_known(pushed)
        return [self._shards[where].shard_id for where in pushed]

    def push(
        self, pushed: Mapping[Where, Gradients], *, step: JointStep | None = None
    ) -> TablePushResult:
        """Apply gradients, each exactly once.

        `step`: what `ParameterClient.joint_step` gave for this push and one of parameters; for all
        pushes of this client, or for none. Raises NonFiniteGradient with table and row; then what
        lies in other shards may have been applied.
        """
        self._sequence = self._sequence + 1 if step is None else step.sequence
        result = TablePushResult(sequence=self._sequence)

        def attempt(
            stub: TablesStub, shards: Sequence[Shard], timeout_s: float, todo: set[int]
        ) -> None:
            by_id = {shard.shard_id: _where(shard) for shard in shards}
            errors: list[ShoalError] = []
            requests = self._push_requests(pushed, shards, result.sequence, step)
            for reply in stub.Push(requests, timeout=timeout_s):
                for outcome in reply.outcomes:
                    if outcome.HasField("error"):
                        errors.append(from_detail(outcome.error))
                        continue
                    note(result, by_id[outcome.shard_id], outcome)
                    todo.discard(outcome.shard_id)
            if errors:
                raise worst_of(errors)

        result.retries = self._until_done(attempt, pushed)
        return result

    def _push_requests(
        self,
        pushed: Mapping[Where, Gradients],
        shards: Sequence[Shard],
        sequence: int,
        step: JointStep | None,
    ) -> Iterator[TablePushRequest]:
        header = TablePushHeader(
            token=self._token(),
            sequence=sequence,
            shards=[_item(shard, pushed[_where(shard)]) for shard in shards],
            all_shard_ids=sorted(self.shard_ids(pushed)) if step is None else step.shard_ids,
            acknowledgement=self._acknowledgement,
            with_parameters=step is not None,
        )
        pieces = (piece for s in shards for piece in self._gradients(pushed[_where(s)], s))
        for number, rows in enumerate(packed(pieces)):
            yield TablePushRequest(header=None if number else header, rows=rows)

    def _gradients(self, part: Gradients, shard: Shard) -> Iterator[tuple[RowGradients, int]]:
        """Pieces of one shard's rows that fit into a message, and their bytes."""
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
                checksum=crc32(data, crc32(births, crc32(ids))),
            )
            yield rows, len(ids) + len(births) + len(data)

    def _row_bytes(self, shard: Shard) -> int:
        table = self._tables[shard.table]
        return table.dim * DTYPE_BYTES[table.dtype]

    def _rows_a_message(self, shard: Shard) -> int:
        return max(1, MESSAGE_BYTES // max(self._row_bytes(shard), 2 * ID_BYTES))

    def _until_done(self, attempt: Attempt[TablesStub], wanted: Mapping[Where, object]) -> int:
        ids = set(self.shard_ids(wanted))
        return self._servers.run(self._known_map, self._refetch_map, attempt, math.inf, ids)

    def _check_known(self, wanted: Iterable[Where]) -> None:
        unknown = [where for where in wanted if where not in self._shards]
        if unknown:
            raise UnknownShard(
                "the job has no such table, or not so many shards of it",
                seen=f"shard {unknown[0][1]} of table {unknown[0][0]}",
                expected=", ".join(sorted(self._tables)) or "place() and fetch_map() first",
            )

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
