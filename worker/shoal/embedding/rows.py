"""A table in a worker: rows for a step, gradients for the push."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.embedding.cache import CachedRows, HotRows
from shoal.embedding.routing import Ids, RoutedIds, route
from shoal.embedding.row_codec import RowCodec
from shoal.model.gradients import is_finite
from shoal_client.parameters.table_rows import Gradients, Rows, TablePushResult, Where
from shoal_proto.errors import InvalidSpec, NonFiniteGradient
from shoal_proto.v1.tables_pb2 import RowFate, TableSpec

log = structlog.get_logger(__name__)

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
FATES = {
    RowFate.ROW_FATE_APPLIED: "applied",
    RowFate.ROW_FATE_MADE: "made",
    RowFate.ROW_FATE_NOT_ADMITTED: "not_admitted",
    RowFate.ROW_FATE_EVICTED: "evicted",
    RowFate.ROW_FATE_FULL: "full",
}


@dataclass(frozen=True)
class UsedRows:
    """Rows of one lookup in a forward pass. `values` is a leaf of the graph."""

    routed: RoutedIds
    held: CachedRows
    values: Tensor


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """A lookup in progress."""

    routed: RoutedIds
    is_missing: NDArray[np.bool_]
    kept: CachedRows
    missing: RoutedIds
    table: str
    step: int

    def ids_by_shard(self) -> dict[Where, bytes]:
        """Return the missing ids by shard."""
        return {
            (self.table, shard): self.missing.ids[start:stop].tobytes()
            for shard, start, stop in self.missing.spans()
        }

    def merged(self, found: CachedRows) -> CachedRows:
        """Return cached and found rows, in the order of the ids."""
        if self.is_missing.all():
            return found
        positions = np.empty(len(self.routed.ids), np.int64)
        positions[~self.is_missing] = np.arange(len(self.kept.births))
        positions[self.is_missing] = len(self.kept.births) + np.arange(len(found.births))
        return CachedRows(
            values=torch.cat([self.kept.values, found.values])[torch.from_numpy(positions)],
            births=np.concatenate([self.kept.births, found.births])[positions],
            versions=np.concatenate([self.kept.versions, found.versions])[positions],
            epochs=np.concatenate([self.kept.epochs, found.epochs])[positions],
        )


class TableRows:
    """Rows of one table, for one thread at a time.

    `TableExchange` passes its lookups and gradients to the servers.
    """

    def __init__(
        self,
        spec: TableSpec,
        *,
        cache_rows: int,
        staleness_bound: int,
        codec: RowCodec | None = None,
    ) -> None:
        """`codec`: encodes gradients, if that makes them smaller. Raises InvalidSpec for an
        unsupported dtype."""
        if spec.dtype not in DTYPES:
            raise InvalidSpec(
                f"table {spec.name} has a dtype that no row optimizer supports",
                seen=repr(spec.dtype),
                expected=", ".join(DTYPES),
            )
        self.spec = spec
        self._dtype = DTYPES[spec.dtype]
        self._codec = codec if codec and codec.reduces_size(spec.dim, self._dtype) else None
        self._bound = staleness_bound
        self._cache = HotRows(cache_rows, spec.dim, self._dtype)
        self._seen_versions: Ids = np.zeros(spec.num_shards, np.int64)
        self._seen_epochs: Ids = np.zeros(spec.num_shards, np.int64)
        self._step = self._kept_from_step = 0
        self._table_step = 0
        self._uses: list[UsedRows] = []
        self._is_training = True
        self.fates = dict.fromkeys(FATES.values(), 0)

    def begin_step(self) -> None:
        """Begin a step: gradients of earlier lookups are not pushed any more. Cached rows stay."""
        self._uses.clear()
        self._is_training = True
        self._step += 1

    def forget(self) -> None:
        """End training: the next lookups return the servers' present rows, and no gradients are
        pushed before the next step begins."""
        self.begin_step()
        self._is_training = False
        self._cache.clear()
        self._kept_from_step = self._step

    # --- lookups ---

    def begin(self, routed: RoutedIds) -> "Lookup":
        """Begin a lookup: take cached rows, and determine the missing ids."""
        oldest = self._seen_versions[routed.shards] - self._bound
        epochs = self._seen_epochs[routed.shards]
        slots = self._cache.find(routed.ids, self._step - self._bound, oldest, epochs)
        is_missing = slots < 0
        return Lookup(
            routed=routed,
            is_missing=is_missing,
            # Copied now, as rows looked up next may replace them.
            kept=self._cache.take(slots[~is_missing]),
            missing=routed.only(is_missing),
            table=self.spec.name,
            step=self._step,
        )

    def finish(self, lookup: "Lookup", found: Mapping[Where, Rows]) -> CachedRows:
        """Cache the servers' rows, unless `forget` was called since `begin`; return all rows of the
        lookup."""
        spans = lookup.missing.spans()
        rows = [found[self.spec.name, shard] for shard, _, _ in spans]
        for (shard, _, _), each in zip(spans, rows, strict=True):
            self._note_version(shard, each.version, each.epoch)
            self._table_step = max(self._table_step, each.step)
        counts = [stop - start for _, start, stop in spans]
        received = _joined(rows, counts, self.spec.dim, self._dtype)
        if lookup.step >= self._kept_from_step:
            self._cache.store_rows(lookup.missing.ids, received, lookup.step)
        return lookup.merged(received)

    def _note_version(self, shard: int, version: int, epoch: int) -> None:
        """Note a shard's version. In a later epoch the versions seen in earlier epochs no longer
        count, as an epoch may begin with a lower version."""
        if epoch > self._seen_epochs[shard]:
            self._seen_versions[shard], self._seen_epochs[shard] = version, epoch
        elif epoch == self._seen_epochs[shard]:
            self._seen_versions[shard] = max(self._seen_versions[shard], version)

    def make_leaf(self, routed: RoutedIds, held: CachedRows, device: torch.device) -> Tensor:
        """Return the rows' values on the device. With gradients enabled, the values are a leaf of
        the graph; during training, it is kept for `gradients` until the next step."""
        values = held.values.to(device)
        if torch.is_grad_enabled():
            values.requires_grad_()
            if self._is_training:
                self._uses.append(UsedRows(routed, held, values))
        return values

    # --- pushes ---

    def gradients(self, lr: float) -> dict[Where, Gradients]:
        """Return the gradients since the step began, by shard, summed for each row.

        Raises NonFiniteGradient, with the row's id, for NaN, infinity and values beyond the codec's
        range.
        """
        uses = [use for use in self._uses if use.values.grad is not None]
        if not uses:
            return {}
        routed, births, bases, total = _added_up(uses, self.spec.num_shards)
        if not is_finite(total):
            self._refuse(routed, torch.isfinite(total).all(dim=1), "NaN or Inf")
        step = self._table_step + 1
        data = self._encoded(routed, total)
        parts = {}
        for shard, start, stop in routed.spans():
            parts[self.spec.name, shard] = Gradients(
                ids=routed.ids[start:stop].tobytes(),
                births=births[start:stop].tobytes(),
                gradients=data[start:stop].tobytes(),
                base_version=int(bases[start:stop, 0].min()),
                base_epoch=int(bases[start:stop, 1].min()),
                step=step,
                lr=lr,
                codec=self._codec.message if self._codec else None,
            )
        return parts

    def _encoded(self, routed: RoutedIds, total: Tensor) -> NDArray[np.uint8]:
        if self._codec is None:
            return total.view(torch.uint8).numpy()
        data, is_in_range = self._codec.encode(total)
        if not is_in_range.all():
            self._refuse(routed, is_in_range, f"beyond the range of {self._codec.message.kind}")
        return data.numpy()

    def pushed(self, parts: Mapping[Where, Gradients], result: TablePushResult) -> None:
        """Record the outcome of a push."""
        for where in parts:
            table, shard = where
            if table != self.spec.name:
                continue
            if where in result.stale:
                # The shard was lost with its rows, and started over.
                log.warning("row_gradients_dropped", table=table, reason=str(result.stale[where]))
                continue
            self._note_version(shard, result.versions[where], result.epochs[where])
            self._table_step = max(self._table_step, result.steps[where])
            fates = np.frombuffer(result.fates[where] or bytes(parts[where].num_rows), np.uint8)
            for fate, count in enumerate(np.bincount(fates, minlength=len(FATES))):
                self.fates[FATES[RowFate.ValueType(fate)]] += int(count)

    def _refuse(self, routed: RoutedIds, is_good: Tensor, seen: str) -> None:
        row = int((~is_good).nonzero()[0])
        raise NonFiniteGradient(
            f"the gradient of row {routed.ids[row]} of table {self.spec.name} cannot be pushed",
            seen=seen,
            expected="finite numbers",
            fix="Look for a division by zero, or lower the learning rate.",
            details={"parameter": self.spec.name, "row": str(routed.ids[row])},
        )


def _joined(
    rows: Sequence[Rows], counts: Sequence[int], dim: int, dtype: torch.dtype
) -> CachedRows:
    values = bytearray().join(each.values for each in rows)
    flat = torch.frombuffer(values, dtype=dtype) if values else torch.zeros(0, dtype=dtype)
    return CachedRows(
        values=flat.view(-1, dim),
        births=np.frombuffer(b"".join(each.births for each in rows), "<i8"),
        versions=np.repeat(np.array([each.version for each in rows], np.int64), counts),
        epochs=np.repeat(np.array([each.epoch for each in rows], np.int64), counts),
    )


def _added_up(uses: Sequence[UsedRows], num_shards: int) -> tuple[RoutedIds, Ids, Ids, Tensor]:
    """Return ids, births, each row's oldest version and epoch, and its summed gradient."""
    gradients = [use.values.grad.cpu() for use in uses if use.values.grad is not None]
    bases = [np.stack([use.held.versions, use.held.epochs], axis=1) for use in uses]
    if len(uses) == 1:
        return uses[0].routed, uses[0].held.births, bases[0], gradients[0].contiguous()
    routed, positions = route(np.concatenate([use.routed.ids for use in uses]), num_shards)
    births = np.concatenate([use.held.births for use in uses])
    newest = np.zeros(len(routed.ids), np.int64)
    np.maximum.at(newest, positions, births)
    oldest = np.full((len(routed.ids), 2), np.iinfo(np.int64).max)
    np.minimum.at(oldest, positions, np.concatenate(bases))
    # If a row was evicted and created again between two lookups, drop the gradients for the earlier
    # row (an older birth). Gradients of initial values (birth 0) count.
    is_current = torch.from_numpy((births == 0) | (births == newest[positions]))
    stacked = torch.cat(gradients) * is_current[:, None]
    total: Tensor = torch.ops.aten.embedding_dense_backward(
        stacked, torch.from_numpy(positions), len(routed.ids), -1, False
    )
    return routed, newest, oldest, total
