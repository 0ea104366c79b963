"""Lookups, prefetches and pushes of all tables of a model."""

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from shoal.embedding.cache import CachedRows
from shoal.embedding.routing import RoutedIds, route
from shoal.embedding.row_codec import RowCodec
from shoal.embedding.rows import TableRows
from shoal.embedding.table import EmbeddingTable, tables_of
from shoal.membership.generation import Context
from shoal_client.parameters.job_shards import JointStep
from shoal_client.parameters.table_rows import Gradients, TablePushResult, Where
from shoal_client.parameters.tables import TableClient
from shoal_proto.errors import InternalError
from shoal_proto.numbers_given import as_number
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_proto.v1.tables_pb2 import TableSpec

MAX_PREFETCHES = 4


class TableExchange:
    """Exchange of rows with the servers. All methods but `metrics` are for the trainer's thread."""

    def __init__(self, model: nn.Module, codec: RowCodec | None = None) -> None:
        """`codec`: encodes gradients of rows. Raises InvalidSpec for two tables of one name, and
        for an unsupported dtype."""
        self._tables: Mapping[str, EmbeddingTable] = tables_of(model)
        self._rows = {
            name: TableRows(
                table.spec(),
                cache_rows=table.cache_rows,
                staleness_bound=table.staleness_bound,
                codec=codec,
            )
            for name, table in self._tables.items()
        }
        self._client: TableClient | None = None
        self._lock = threading.Lock()
        """Held for work on the rows, not during calls."""
        self._calling = threading.Lock()
        """Held during a call, and taken before `_lock`: prefetches and pushes use the same client,
        from the pool's threads."""
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: list[Future[None]] = []

    def __bool__(self) -> bool:
        return bool(self._tables)

    @property
    def specs(self) -> list[TableSpec]:
        return [table.spec() for table in self._tables.values()]

    def fields(self) -> Mapping[str, str]:
        """Return the fields that members must have in common; empty without tables."""
        if not self._tables:
            return {}
        return {"tables": " | ".join(" ".join(str(spec).split()) for spec in self.specs)}

    def attach(self, context: Context, acknowledgement: Acknowledgement.ValueType) -> None:
        """Connect the tables, for pushes with this acknowledgement."""
        if not self._tables:
            return
        self._client = TableClient(
            context.coordinators,
            context.token,
            timeout_s=context.limits.collective_s or 60.0,
            acknowledgement=acknowledgement,
        )
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="shoal-tables")
        for table in self._tables.values():
            table.connect(self)

    def enter(self) -> None:
        """Wait until every shard answers, once the tables are placed. Raises what `TableClient`
        raises."""
        if not self._tables:
            return
        with self._calling:
            client = self._connected()
            client.fetch_map()
            client.look_up(
                {(s.name, index): b"" for s in self.specs for index in range(s.num_shards)}
            )

    def wait_for_lost(self, wait_s: float) -> None:
        """Make lookups and pushes wait up to `wait_s` for lost shards."""
        if self._client is not None:
            self._client.wait_for_lost(wait_s)

    def begin_step(self) -> None:
        with self._lock:
            for rows in self._rows.values():
                rows.begin_step()

    def forget_rows(self) -> None:
        """End training: the next lookups return the servers' present rows."""
        with self._lock:
            for rows in self._rows.values():
                rows.forget()

    def rows(self, table: str, ids: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the rows of the distinct ids, as a leaf of the graph, and for each id the index of
        its row. Raises what `TableClient` raises."""
        routed, positions = route(ids.numpy(), self._rows[table].spec.num_shards)
        held = self._look_up(table, routed)
        with self._lock:
            values = self._rows[table].make_leaf(routed, held, device)
        return values, torch.from_numpy(positions)

    def prefetch(self, table: str, ids: Tensor) -> None:
        """Begin to look rows up, unless MAX_PREFETCHES prefetches are in progress. Errors are
        dropped: the step's own lookup raises them."""
        self._ahead = [lookup for lookup in self._ahead if not lookup.done()]
        if self._pool is None or len(self._ahead) >= MAX_PREFETCHES:
            return
        routed, _ = route(ids.reshape(-1).numpy(), self._rows[table].spec.num_shards)
        self._ahead.append(self._pool.submit(self._look_ahead, table, routed))

    def _look_ahead(self, table: str, routed: RoutedIds) -> None:
        self._look_up(table, routed)

    def _look_up(self, table: str, routed: RoutedIds) -> CachedRows:
        rows = self._rows[table]
        with self._lock:
            lookup = rows.begin(routed)
            if not lookup.ids_by_shard():
                return rows.finish(lookup, {})
        with self._calling:
            with self._lock:
                # The call in progress until now may have brought the rows.
                lookup = rows.begin(routed)
                requested = lookup.ids_by_shard()
            replies = self._connected().look_up(requested) if requested else {}
            with self._lock:
                return rows.finish(lookup, replies)

    def collect_gradients(self) -> dict[Where, Gradients]:
        """Return this worker's gradients of the step by table and shard, summed for each row.
        Raises NonFiniteGradient with table and row."""
        with self._lock:
            parts: dict[Where, Gradients] = {}
            for name, table in self._tables.items():
                parts |= self._rows[name].gradients(as_number("lr", table.lr))
            return parts

    def shard_ids(self, parts: Mapping[Where, Gradients]) -> list[int]:
        """Return the shards that these parts change."""
        with self._calling:
            return self._connected().shard_ids(parts)

    def start_push(
        self, parts: Mapping[Where, Gradients], step: JointStep | None = None
    ) -> "Future[TablePushResult] | None":
        """Begin to push, as part of `step`, on another thread; None if there is nothing to push."""
        if not parts or self._pool is None:
            return None
        return self._pool.submit(self._push, parts, step)

    def _push(self, parts: Mapping[Where, Gradients], step: JointStep | None) -> TablePushResult:
        with self._calling:
            result = self._connected().push(parts, step=step)
            with self._lock:
                for rows in self._rows.values():
                    rows.pushed(parts, result)
            return result

    def metrics(self) -> Mapping[str, float]:
        """Return the number of rows pushed, by fate, for the health report."""
        return {
            f"table_{name}_rows_{fate}": float(count)
            for name, rows in self._rows.items()
            for fate, count in rows.fates.items()
        }

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _connected(self) -> TableClient:
        if self._client is None:
            raise InternalError("the tables were not attached", expected="attach() before enter()")
        return self._client
