"""A job's tables on its parameter servers: look up and push rows. Ids, births and values are
little-endian bytes, sorted by shard."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from shoal_client.parameters.calls import ParameterCalls
from shoal_client.parameters.job_shards import JobShards, JointStep, ShardPush
from shoal_client.parameters.servers import most_severe
from shoal_client.parameters.table_rows import (
    ID_BYTES,
    AskedRows,
    Bytes,
    Gradients,
    Rows,
    TablePushResult,
    Where,
    joined,
    look_up,
    note,
    part_of,
    rows_an_item,
    slot_bytes_for,
)
from shoal_client.shards.layouts import of_tables
from shoal_client.shards.parts import GradientPart
from shoal_proto.dtypes import DTYPE_BYTES
from shoal_proto.errors import ShapeMismatch, ShoalError, StalePush, StateLost, UnknownShard
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.parameters_pb2 import PushedRows, PushItem, PushOutcome
from shoal_proto.v1.shards_pb2 import Shard, ShardMap
from shoal_proto.v1.tables_pb2 import TableSpec


class TableClient:
    """A member's view of its job's tables. Not thread-safe, except `close`. Time limits, retries
    and errors are those of `ParameterClient`."""

    def __init__(
        self,
        coordinators: Sequence[str],
        token: Callable[[], Token],
        *,
        timeout_s: float = 60.0,
        acknowledgement: Acknowledgement.ValueType = Acknowledgement.ACKNOWLEDGEMENT_DEFAULT,
        transport: str | None = None,
    ) -> None:
        self._job = JobShards(
            coordinators,
            token,
            timeout_s,
            acknowledgement=acknowledgement,
            transport=transport,
            adopt=self._adopt,
            slot_bytes_for=slot_bytes_for,
            table_of=self._table_of,
        )
        self._shards: dict[Where, Shard] = {}
        self._tables: dict[str, TableSpec] = {}
        self._sequence = 0

    def fetch_map(self, wait_s: float = 0.0, *, timeout_s: float | None = None) -> ShardMap:
        """See `JobShards.fetch_map`."""
        return self._job.fetch_map(wait_s, timeout_s)

    def _adopt(self, received: ShardMap) -> ShardMap:
        self._shards = of_tables(received)
        self._tables = {table.name: table for table in received.tables}
        return received

    def look_up(self, wanted: Mapping[Where, Bytes]) -> dict[Where, Rows]:
        """Return the rows of the wanted ids (bytes of int64), by shard, in the ids' order. Creates
        no rows. Raises UnknownShard."""
        found: dict[Where, Rows] = {}

        def attempt(
            calls: ParameterCalls, shards: Sequence[Shard], timeout_s: float, todo: set[int]
        ) -> None:
            where = {shard.shard_id: _where(shard) for shard in shards}
            asked = [piece for s in shards for piece in self._cut(wanted[_where(s)], s)]
            left = Counter(piece.shard_id for piece in asked)
            taken: dict[int, dict[int, Rows]] = {shard_id: {} for shard_id in where}
            errors: list[ShoalError] = []
            for number, rows in look_up(calls, self._job.token(), asked, timeout_s):
                if isinstance(rows, ShoalError):
                    errors.append(rows)
                    continue
                shard_id = asked[number].shard_id
                taken[shard_id][number] = rows
                if len(taken[shard_id]) == left[shard_id]:
                    in_order = [rows for _, rows in sorted(taken[shard_id].items())]
                    whole = found[where[shard_id]] = joined(in_order)
                    self._job.seen.note(shard_id, whole.epoch, whole.version)
                    todo.discard(shard_id)
            if errors:
                raise most_severe(errors)

        self._job.run(attempt, shard_ids=set(self.shard_ids(wanted)))
        return found

    def _cut(self, ids: Bytes, shard: Shard) -> Iterator[AskedRows]:
        row_bytes = self._row_bytes(shard)
        size = rows_an_item(row_bytes)
        for start in range(0, max(len(ids) // ID_BYTES, 1), size):
            yield AskedRows(
                shard_id=shard.shard_id,
                epoch=shard.epoch,
                ids=ids[start * ID_BYTES : (start + size) * ID_BYTES],
                row_bytes=row_bytes,
            )

    def shard_ids(self, pushed: Collection[Where]) -> list[int]:
        """The ids of these shards. Raises UnknownShard."""
        self._check_known(pushed)
        return [self._shards[where].shard_id for where in pushed]

    def push(
        self, pushed: Mapping[Where, Gradients], *, step: JointStep | None = None
    ) -> TablePushResult:
        """Apply gradients, each exactly once.

        `step`: see `ParameterClient.joint_step`; for all pushes of this client, or none. Raises
        NonFiniteGradient with table and row, ShapeMismatch for lengths that do not fit the ids, and
        UnknownShard. After an error, some shards may have applied their rows."""
        for (name, _), rows in pushed.items():
            if name in self._tables:
                plain = row_bytes_of(self._tables[name])
                _check_lengths(name, rows, plain if rows.codec is None else rows.row_bytes)
        self._sequence = self._sequence + 1 if step is None else step.sequence
        result = TablePushResult(sequence=self._sequence)
        shard_ids = self.shard_ids(pushed)
        where = dict(zip(shard_ids, pushed, strict=True))

        def item(shard: Shard) -> PushItem:
            return _item(shard, pushed[_where(shard)])

        def part(shard: Shard) -> GradientPart:
            return part_of(shard.shard_id, pushed[_where(shard)])

        def applied(outcome: PushOutcome, epoch: int) -> None:
            note(result, where[outcome.shard_id], outcome, epoch)

        def refused(shard_id: int, error: StalePush) -> None:
            result.stale[where[shard_id]] = error

        push = ShardPush(
            span="PushRows",
            sequence=result.sequence,
            item=item,
            part=part,
            applied=applied,
            refused=refused,
            shard_ids=set(shard_ids),
            all_shard_ids=sorted(shard_ids) if step is None else step.shard_ids,
            counts_rows=step is None,
        )
        result.retries = self._job.push(push)
        return result

    def _row_bytes(self, shard: Shard) -> int:
        return row_bytes_of(self._tables[shard.table])

    def _table_of(self, lost: StateLost) -> str:
        names = {str(shard.shard_id): table for (table, _), shard in self._shards.items()}
        return names.get(lost.details.get("shard", ""), "")

    def _check_known(self, wanted: Iterable[Where]) -> None:
        unknown = [where for where in wanted if where not in self._shards]
        if unknown:
            raise UnknownShard(
                "the job has no such table, or the table has fewer shards",
                seen=f"shard {unknown[0][1]} of table {unknown[0][0]}",
                expected=", ".join(sorted(self._tables)) or "place() and fetch_map() first",
            )

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


def row_bytes_of(table: TableSpec) -> int:
    """Bytes of a row's values, and of its gradient."""
    return table.dim * DTYPE_BYTES[table.dtype]


def _check_lengths(table: str, rows: Gradients, row_bytes: int) -> None:
    expected_bytes = rows.num_rows * ID_BYTES, rows.num_rows * row_bytes
    if (len(rows.births), len(rows.gradients)) != expected_bytes or len(rows.ids) % ID_BYTES:
        raise ShapeMismatch(
            f"a push to table {table} has a length that does not fit its ids",
            seen=f"{len(rows.ids)} bytes of ids, {len(rows.births)} bytes of births, "
            f"{len(rows.gradients)} bytes of gradients",
            expected=f"{ID_BYTES}, {ID_BYTES} and {row_bytes} bytes a row",
        )


def _where(shard: Shard) -> Where:
    return shard.table, shard.table_index


def _item(shard: Shard, part: Gradients) -> PushItem:
    return PushItem(
        shard_id=shard.shard_id,
        epoch=shard.epoch,
        base_version=part.base_version,
        base_epoch=part.base_epoch,
        codec=part.codec,
        rows=PushedRows(num_rows=part.num_rows, step=part.step, lr=part.lr),
    )
