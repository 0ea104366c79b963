"""The content of a table shard, and the effect of a push on it, which depends only on the content
and the push."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal_proto.errors import Overloaded
from shoal_proto.v1.tables_pb2 import RowFate, TableSpec
from shoal_server.parameters.images.shard_image import OpenImages
from shoal_server.parameters.shard.gradients import DTYPES
from shoal_server.parameters.tables.admission import new_gate
from shoal_server.parameters.tables.batch import Fates, RowBatch
from shoal_server.parameters.tables.hashing import Ids
from shoal_server.parameters.tables.index import MAX_ROWS, Rows
from shoal_server.parameters.tables.initial import InitialRows
from shoal_server.parameters.tables.optimizers import RowAdamRule, new_rule
from shoal_server.parameters.tables.row_chunks import RowChunks
from shoal_server.parameters.tables.row_image import RowImage
from shoal_server.parameters.tables.rows import RowStore

DEFAULT_SHARD_BYTES = 1024**3
MIN_ROWS = 1
SWEEPS_PER_IDLE_TIME = 8
LOOKED_AT_BYTES = 16
"""Bytes of each row that a search for idle or old rows reads."""
EVICTED_AT_A_TIME = 1 / 16

APPLIED = RowFate.ROW_FATE_APPLIED
MADE = RowFate.ROW_FATE_MADE
NOT_ADMITTED = RowFate.ROW_FATE_NOT_ADMITTED
EVICTED = RowFate.ROW_FATE_EVICTED
FULL = RowFate.ROW_FATE_FULL


@dataclass(kw_only=True)
class Counts:
    """Counts since this server got the shard."""

    made: int = 0
    evicted: int = 0
    not_admitted: int = 0


class TableContent:
    """The rows of a table shard, with their admission gate and optimizer. Used by one thread at a
    time."""

    def __init__(
        self,
        table: TableSpec,
        small: Mapping[str, Tensor] | None = None,
        *,
        expected_rows: int = 0,
    ) -> None:
        """Make a content without rows. Takes ownership of `small`, the small tensors of an image;
        None for a new shard. `expected_rows`: number of rows that `fill` will add."""
        dtype = DTYPES[table.dtype]
        held = small or {}
        self._table = table
        self._initial = InitialRows(
            table.initialiser, table=table.name, seed=table.seed, dim=table.dim, dtype=dtype
        )
        self._rule = new_rule(table.optimizer)
        self._gate = new_gate(table.admission, held)
        self.rows = RowStore(table.dim, dtype, self._rule.columns())
        self.max_rows = _max_rows(table, self.rows.row_bytes)
        self.rows.limit(self.max_rows)
        self.counts = Counts()
        self.table_step = 0
        self._now_s = self._next_sweep_s = 0.0
        if expected_rows:
            self.rows.reserve(expected_rows, expected_rows)
        if small is not None:
            self._now_s, self._next_sweep_s = small["times_unix_s"].tolist()
            self.table_step = int(small["table_step"])

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the rows of an image. Raises InternalError for other columns."""
        self.rows.load(tensors)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_bytes(self) -> int:
        return self.rows.num_bytes + sum(t.nbytes for t in self._gate.tensors().values())

    def look_up(self, ids: Ids) -> tuple[Ids, Tensor]:
        """Return births and values of rows. A missing row has birth 0 and its initial values."""
        rows = self.rows.find(ids)
        births = self.rows.births(rows)
        absent = np.flatnonzero(rows < 0)
        if absent.size == len(ids):
            return births, self._initial.make(ids)
        values_rc = self.rows.values(np.maximum(rows, 0))
        if absent.size:
            values_rc[torch.from_numpy(absent)] = self._initial.make(ids[absent])
        return births, values_rc

    def regrown_bytes(self, num_rows: int) -> int:
        """Return the most bytes that a push processes besides its rows."""
        is_full = len(self.rows) + num_rows > self.max_rows
        looks = bool(self._table.eviction.max_idle_s) or is_full
        return self.rows.moved_bytes(num_rows) + LOOKED_AT_BYTES * len(self.rows) * looks

    @property
    def now_s(self) -> float:
        """Time of the newest push, in Unix seconds; 0 before the first."""
        return self._now_s

    def growth_bytes(self, batch: RowBatch, at_unix_s: float) -> int:
        """Return the most bytes by which a push at `at_unix_s` may grow the memory, beyond that of
        evicted rows."""
        if len(batch.ids) <= self.rows.num_spare:
            return 0
        return self.rows.growth_bytes(self._most_rows(batch, at_unix_s)[0])

    def reserve(self, batch: RowBatch, at_unix_s: float) -> None:
        """Allocate the memory by which a push at `at_unix_s` may grow. Raises Overloaded, without a
        change, if the system has none."""
        if self.rows.has_memory_for(len(batch.ids)):
            return
        try:
            self.rows.reserve(*self._most_rows(batch, at_unix_s))
        except (OSError, MemoryError) as error:
            raise Overloaded(
                f"the system refuses memory for more rows of table {self._table.name}",
                seen=str(error),
                expected="memory below the server's limit",
                fix="Start the server with a lower --memory-limit-bytes, or give its host or"
                " container more memory.",
            ) from error

    def _most_rows(self, batch: RowBatch, at_unix_s: float) -> tuple[int, int]:
        """Upper bounds on the number of rows after a push, and on how many of them it makes."""
        rows = self.rows.find(batch.ids)
        idle = self._idle(self.time_of(at_unix_s))
        num_live = len(self.rows) - len(idle)
        num_new = int(np.count_nonzero((rows < 0) | np.isin(rows, idle)))
        return num_live + min(num_new, max(self.max_rows - num_live, 0)), num_new

    def push(
        self, batch: RowBatch, *, version: int, at_unix_s: float, step: int, lr: float
    ) -> Fates:
        """Apply gradients; return the fate of each row of the batch.

        A gradient of an evicted row is dropped, even if the id has a new row. A gradient of initial
        values is applied to the row that the id has now, or gets.
        """
        self._now_s = self.time_of(at_unix_s)
        self.table_step = max(self.table_step + 1, step)
        self._evict_idle()
        rows = self.rows.find(batch.ids)
        births = self.rows.births(rows)
        fates: Fates = np.full(len(batch.ids), APPLIED, np.uint8)
        fates[(batch.births != 0) & (batch.births != births)] = EVICTED
        self.rows.touch(rows[(fates == APPLIED) & (rows >= 0)], self._now_s)
        fates[(fates == APPLIED) & (rows < 0)] = NOT_ADMITTED
        self._make(batch, rows, fates, version)
        chosen = np.flatnonzero(fates <= MADE)
        if chosen.size:
            gradient_rc = batch.gradient_rc.index_select(0, torch.from_numpy(chosen))
            self._step(rows[chosen], gradient_rc, lr)
        self.counts.not_admitted += int(np.count_nonzero(fates == NOT_ADMITTED))
        return fates

    def time_of(self, at_unix_s: float) -> float:
        """Return the table's time for a push with that timestamp. A push advances it by at most
        half of `max_idle_s`: after a pause, rows in use must not be idle."""
        max_idle_s = self._table.eviction.max_idle_s
        if max_idle_s and self._now_s:
            at_unix_s = min(at_unix_s, self._now_s + max_idle_s / 2)
        return max(self._now_s, at_unix_s)

    def _make(self, batch: RowBatch, rows: Rows, fates: Fates, version: int) -> None:
        """Make rows for the admitted ids. Sets `rows` and `fates`."""
        absent = np.flatnonzero(fates == NOT_ADMITTED)
        admitted = absent[self._gate.admit(batch.ids[absent], version)]
        num_free = self.max_rows - len(self.rows)
        if len(admitted) > num_free and self._table.eviction.oldest_when_full:
            wanted = max(len(admitted) - num_free, int(self.max_rows * EVICTED_AT_A_TIME))
            self._evict(self.rows.oldest(wanted, spared=rows[fates == APPLIED]))
            # A row whose gradient is dropped may be evicted.
            num_free = self.max_rows - len(self.rows)
        fates[admitted[num_free:]] = FULL
        admitted = admitted[:num_free]
        if not admitted.size:
            return
        ids = batch.ids[admitted]
        rows[admitted] = self.rows.add(ids, self._initial.make(ids), birth=version)
        self.rows.touch(rows[admitted], self._now_s)
        fates[admitted] = MADE
        self.counts.made += len(admitted)

    def _step(self, rows: Rows, gradient_rc: Tensor, lr: float) -> None:
        values_rc = self.rows.values(rows)
        if values_rc.dtype.itemsize < 4:
            values_rc, gradient_rc = values_rc.float(), gradient_rc.float()
        if decay := self._table.optimizer.weight_decay:
            gradient_rc.add_(values_rc, alpha=decay)
        if isinstance(self._rule, RowAdamRule):
            self._rule.table_step = self.table_step
        state = {name: self.rows.state(name, rows) for name in self.rows.state_names}
        self._rule.step(values_rc, gradient_rc, state, lr)
        self.rows.write_rows(rows, values_rc, state)

    def _evict_idle(self) -> None:
        max_idle_s = self._table.eviction.max_idle_s
        if not max_idle_s or self._now_s < self._next_sweep_s:
            return
        self._evict(self._idle(self._now_s))
        self._next_sweep_s = self._now_s + max_idle_s / SWEEPS_PER_IDLE_TIME

    def _idle(self, now_s: float) -> Rows:
        max_idle_s = self._table.eviction.max_idle_s
        if not max_idle_s or now_s < self._next_sweep_s:
            return np.zeros(0, np.int64)
        return self.rows.idle_since(now_s - max_idle_s)

    def _evict(self, rows: Rows) -> None:
        self.rows.remove(rows)
        self.counts.evicted += len(rows)

    @property
    def images(self) -> OpenImages[RowImage]:
        """Open images. A push saves rows to each of them before it changes the rows."""
        return self.rows.images

    def image(self) -> tuple[RowImage, Mapping[str, Tensor]]:
        """Return an image of the rows, to be closed after use; and copies of the small tensors."""
        flat = {name: tensor.clone() for name, tensor in self.flat_tensors().items()}
        return self.rows.image(), flat

    def flat_tensors(self) -> dict[str, Tensor]:
        """Return, not copied, the small tensors: all state but the rows."""
        scalars = {
            "times_unix_s": torch.tensor([self._now_s, self._next_sweep_s], dtype=torch.float64),
            "table_step": torch.tensor([self.table_step]),
        }
        return dict(self._gate.tensors()) | scalars

    def row_ids(self, start: int, num_bytes: int) -> tuple[Ids, int]:
        """See `ShardBody.row_ids`."""
        return self.rows.ids_from(start, max(num_bytes // self.rows.row_bytes, 1))

    def rows_of(self, ids: Ids) -> tuple[Ids, list[Tensor]]:
        """See `RowStore.columns_of`."""
        return self.rows.columns_of(ids)

    def row_chunks(self, num_rows: int, chunk_bytes: int) -> RowChunks:
        """Return the layout in chunks of `num_rows` rows."""
        columns = {n: (each.shape[1:], each.dtype) for n, each in self.rows.columns.items()}
        return RowChunks(columns, num_rows, chunk_bytes)

    def fill(self, rows: slice, columns: Mapping[str, Tensor]) -> None:
        """See `RowStore.fill`."""
        self.rows.fill(rows, columns)


def _max_rows(table: TableSpec, row_bytes: int) -> int:
    by_bytes = (table.max_shard_bytes or DEFAULT_SHARD_BYTES) // row_bytes
    by_rows = -(-table.max_rows // table.num_shards) or MAX_ROWS
    return max(min(by_bytes, by_rows, MAX_ROWS), MIN_ROWS)
