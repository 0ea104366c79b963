"""Embeddings with rows on the parameter servers, instead of `nn.Embedding(sparse=True)`.

A forward pass looks up the rows that it needs, each once. The backward pass leaves gradients on the
worker, and the strategy pushes them.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal.embedding.options import (
    Admission,
    Eviction,
    RowAdagrad,
    RowInit,
    RowNormal,
    RowOptimizer,
)
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import as_index
from shoal_proto.v1.tables_pb2 import TableSpec

DEFAULT_NUM_SHARDS = 16
MAX_STALENESS = 1 << 20


class Source(Protocol):
    """A source of rows."""

    def rows(self, table: str, ids: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the rows of the distinct ids, as a leaf of the graph, and each id's row index."""
        ...

    def prefetch(self, table: str, ids: Tensor) -> None: ...


class EmbeddingTable(nn.Module):
    """`nn.Embedding` over ids of 64 bits, without a limit on their number.

    Train it with `session.distribute(model, optimizer, strategy="async-sgd")`, or "ssp" or "bsp".
    The table's own option `optimizer` updates its rows: a table has no parameters.
    """

    def __init__(
        self,
        embedding_dim: int,
        *,
        optimizer: RowOptimizer | None = None,
        init: RowInit | None = None,
        num_embeddings: int | None = None,
        padding_idx: int | None = None,
        name: str = "",
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        admission: Admission | None = None,
        eviction: Eviction | None = None,
        staleness_bound: int = 0,
        cache_rows: int = 65536,
        num_shards: int = DEFAULT_NUM_SHARDS,
    ) -> None:
        """`num_embeddings`: only ids from 0 to this number minus 1 are accepted; None: all ids are.
        `padding_idx`: an id whose row is zeros and is not trained. `name`: the table's name in the
        job; empty: the module's path.

        `staleness_bound`: number of this worker's later steps in which a cached row may be used,
        unless its shard is known to have more later updates than that. `cache_rows`: size of the
        cache, rounded up to a power of two. The attribute `lr` is sent with every push.

        Raises InvalidSpec for sizes, bounds and `padding_idx` out of range. The coordinator checks
        `optimizer`, `init`, `admission` and `eviction` when it places the table.
        """
        super().__init__()
        self.embedding_dim = as_index("embedding_dim", embedding_dim, least=1, most=2**31 - 1)
        self.num_embeddings = (
            None if num_embeddings is None else as_index("num_embeddings", num_embeddings, least=1)
        )
        self.padding_idx = None if padding_idx is None else as_index("padding_idx", padding_idx)
        self.name = name
        self.cache_rows = as_index("cache_rows", cache_rows, least=1)
        self.staleness_bound = as_index(
            "staleness_bound", staleness_bound, least=0, most=MAX_STALENESS
        )
        self._dtype = dtype
        row_optimizer = (optimizer or RowAdagrad()).to_proto()
        self.lr = row_optimizer.lr
        bounds = eviction or Eviction()
        self._spec = TableSpec(
            dim=self.embedding_dim,
            dtype=str(dtype).removeprefix("torch."),
            seed=as_index("seed", seed, least=0, most=2**64 - 1),
            initialiser=(init or RowNormal()).to_proto(),
            optimizer=row_optimizer,
            admission=(admission or Admission()).to_proto(),
            eviction=bounds.to_proto(),
            num_shards=as_index("num_shards", num_shards, least=1, most=2**31 - 1),
            max_rows=bounds.max_rows,
            max_shard_bytes=bounds.max_shard_bytes,
        )
        self._source: Source | None = None
        # An empty buffer follows the module's device.
        self.register_buffer("_device", torch.empty(0), persistent=False)
        _check(self)

    def spec(self) -> TableSpec:
        """Return the table's description for the servers."""
        spec = TableSpec()
        spec.CopyFrom(self._spec)
        spec.name = self.name
        return spec

    def connect(self, source: Source) -> None:
        """Set the source of lookups."""
        self._source = source

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of the ids, in shape (*ids.shape, embedding_dim). Raises TypeError or
        IndexError for bad ids, InvalidSpec if the table is not connected yet, and `TableClient`'s
        RetryError, StateLost or Fenced."""
        rows, positions, padding = self._look_up(ids)
        return functional.embedding(positions, rows, padding_idx=padding)

    def prefetch(self, ids: Tensor) -> None:
        """Begin to look up rows for a later step, unless four prefetches are in progress.

        With a `staleness_bound` of 0, a later step looks the rows up again. Raises TypeError or
        IndexError for bad ids, and InvalidSpec if the table is not connected yet. Errors of the
        lookup are dropped.
        """
        self._connected().prefetch(self.name, self._checked(ids))

    def _look_up(self, ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
        host_ids = self._checked(ids)
        device = self.get_buffer("_device").device
        if self.padding_idx is None:
            rows, positions = self._connected().rows(self.name, host_ids.reshape(-1), device)
            return rows, positions.view(ids.shape).to(ids.device), None
        is_padding = (host_ids == self.padding_idx).reshape(-1)
        rows, indices = self._connected().rows(self.name, host_ids.reshape(-1)[~is_padding], device)
        positions = torch.full(is_padding.shape, rows.shape[0], dtype=torch.int64)
        positions[~is_padding] = indices
        zeros = rows.new_zeros((1, self.embedding_dim))
        return torch.cat([rows, zeros]), positions.view(ids.shape).to(ids.device), rows.shape[0]

    def _checked(self, ids: Tensor) -> Tensor:
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"ids of table {self.name} are {ids.dtype}; expected int64 or int32")
        host_ids = ids.detach().to(device="cpu", dtype=torch.int64)
        bound = self.num_embeddings
        if bound is not None and host_ids.numel():
            low, high = int(host_ids.min()), int(host_ids.max())
            if low < 0 or high >= bound:
                raise IndexError(
                    f"id {low if low < 0 else high} is out of range of table {self.name};"
                    f" expected 0 to {bound - 1}"
                )
        return host_ids

    def _connected(self) -> Source:
        if self._source is None:
            raise InvalidSpec(
                f"table {self.name or '(not named yet)'} is not connected to parameter servers",
                expected="a model given to session.distribute(), after its first batch has begun",
                fix='Use strategy="async-sgd".',
            )
        return self._source

    def extra_repr(self) -> str:
        return f"{self.embedding_dim}, name={self.name!r}, num_embeddings={self.num_embeddings}"


class EmbeddingBagTable(EmbeddingTable):
    """`nn.EmbeddingBag` over a table, with the options of `EmbeddingTable`."""

    def __init__(self, embedding_dim: int, *, mode: str = "mean", **options: object) -> None:
        """`mode`: "sum", "mean" or "max" over a bag's rows. Raises InvalidSpec for another mode,
        and what `EmbeddingTable` raises."""
        super().__init__(embedding_dim, **options)  # type: ignore[arg-type]
        if mode not in ("sum", "mean", "max"):
            raise InvalidSpec("bad mode of a bag", seen=repr(mode), expected="sum, mean or max")
        self.mode = mode

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Return one row for each bag.

        A bag is a row of a two-dimensional `ids`, or the ids from one entry of `offsets` to the
        next. Raises what `EmbeddingTable.forward` raises.
        """
        rows, positions, padding = self._look_up(ids)
        return functional.embedding_bag(
            positions,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            padding_idx=padding,
        )


def tables_of(model: nn.Module) -> dict[str, EmbeddingTable]:
    """Return a model's tables by name, which is by default the module's path. Raises InvalidSpec
    for two tables of one name."""
    tables: dict[str, EmbeddingTable] = {}
    for path, module in model.named_modules():
        if not isinstance(module, EmbeddingTable):
            continue
        module.name = module.name or path or "table"
        if module.name in tables:
            raise InvalidSpec(
                "two tables have one name",
                seen=module.name,
                expected="a name for each; use the same module twice to share its rows",
            )
        tables[module.name] = module
    return tables


def _check(table: EmbeddingTable) -> None:
    bound, padding = table.num_embeddings, table.padding_idx
    if bound is not None and padding is not None and not 0 <= padding < bound:
        raise InvalidSpec(
            "padding_idx is out of range", seen=str(padding), expected=f"0 to {bound - 1}"
        )
