"""Tables for tests, and pushes to them."""

from functools import partial
from typing import Any

import numpy as np

from shoal_proto.v1.shards_pb2 import Shard
from shoal_proto.v1.tables_pb2 import Initialiser, RowOptimizer, TableSpec
from shoal_server.parameters.tables.shard import TablePush, TableShard, new_table_shard

SGD = RowOptimizer(kind="sgd", lr=1.0)
OPTIMIZERS = {
    "sgd": RowOptimizer(kind="sgd", lr=0.1, weight_decay=0.01),
    "momentum": RowOptimizer(kind="sgd", lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": RowOptimizer(kind="adagrad", lr=0.1, eps=1e-10),
    "rowwise_adagrad": RowOptimizer(kind="rowwise_adagrad", lr=0.1, eps=1e-8),
    "adam": RowOptimizer(kind="adam", lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8),
    "sparse_adam": RowOptimizer(kind="sparse_adam", lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8),
}
NUMPY = {"float32": np.float32, "float64": np.float64, "float16": np.float16}


def new_table(**changes: Any) -> TableSpec:
    """Make the spec of a table with one shard, whose rows start at zero and move by their negated
    gradient."""
    fields: dict[str, Any] = {
        "name": "users",
        "dim": 2,
        "dtype": "float32",
        "seed": 7,
        "initialiser": Initialiser(kind="constant"),
        "optimizer": SGD,
        "num_shards": 1,
    }
    return TableSpec(**(fields | changes))


def new_shard(table: TableSpec, index: int = 0) -> TableShard:
    spec = Shard(shard_id=3, epoch=1, dtype=table.dtype, table=table.name, table_index=index)
    return new_table_shard(spec, table)


def new_push(
    ids: Any, gradient: Any, *, births: Any = None, dtype: Any = np.float32, **changes: Any
) -> TablePush:
    """Make a push of these rows by session "a"."""
    rows = np.asarray(ids, np.int64)
    fields: dict[str, Any] = {
        "session": "a",
        "sequence": 1,
        "epoch": 1,
        "base_version": 1,
        "step": 0,
        "lr": None,
        "at_unix_s": 1e9,
        "row_ids": rows.tobytes(),
        "births": np.asarray(np.zeros(len(rows)) if births is None else births, np.int64).tobytes(),
        "gradient": np.asarray(gradient, dtype).tobytes(),
    }
    return TablePush(**(fields | changes))


def look_up(shard: TableShard, ids: Any) -> tuple[Any, Any]:
    """Return the births and values of rows."""
    found = shard.read(partial(shard.body.look_up, np.asarray(ids, np.int64).tobytes()))
    values = np.frombuffer(found.values, NUMPY[shard.body.table.dtype])
    return np.frombuffer(found.births, np.int64), values.reshape(-1, shard.body.table.dim)


def live(session: str) -> bool:
    """True for every session."""
    return True
