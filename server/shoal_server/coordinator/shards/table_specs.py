"""Table specs of a request: checks, placement, and comparison with the job's."""

import hashlib
import math
from collections.abc import Iterator, Sequence

from shoal_proto.dtypes import DTYPE_BYTES, LARGEST, MAX_SETTING
from shoal_proto.errors import InvalidSpec, ProposalConflict, UnsupportedOptimizer
from shoal_proto.names import NAME_RULE, is_name
from shoal_proto.v1.shards_pb2 import Shard
from shoal_proto.v1.tables_pb2 import RowOptimizer, TableSpec
from shoal_server.core.shards.placement import spread_tables

MAX_TABLES = 256
MAX_SHARDS = 1024
"""Bound for one table."""
MAX_ALL_SHARDS = 16384
"""Bound for all tables of a job."""
MAX_ROW_BYTES = 512 * 1024
INITIALISERS = ("constant", "uniform", "normal")
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "sparse_adam")
ADMISSIONS = ("", "all", "count", "probability")


def check_tables(tables: Sequence[TableSpec]) -> None:
    """Raise InvalidSpec or UnsupportedOptimizer for tables that no server can hold."""
    names = [table.name for table in tables]
    if len(set(names)) != len(names) or len(names) > MAX_TABLES:
        raise InvalidSpec(
            "two tables have the same name, or there are too many tables",
            seen=", ".join(sorted(names))[:200],
            expected=f"at most {MAX_TABLES} names, each once",
        )
    num_shards = sum(table.num_shards for table in tables)
    if num_shards > MAX_ALL_SHARDS:
        raise InvalidSpec(
            "the tables have too many shards altogether",
            seen=f"{num_shards} shards of {len(tables)} tables",
            expected=f"at most {MAX_ALL_SHARDS}",
            fix="Give tables fewer shards: a few for each server are enough.",
        )
    for table in tables:
        if not is_name(table.name):
            raise InvalidSpec("bad name of a table", seen=repr(table.name), expected=NAME_RULE)
        _check_shape(table)
        _check_optimizer(table.name, table.optimizer)
        _check_rows(table)


def _check_shape(table: TableSpec) -> None:
    if table.dtype not in DTYPE_BYTES:
        raise InvalidSpec(
            f"table {table.name} has a dtype that no row optimizer supports",
            seen=repr(table.dtype),
            expected=" or ".join(DTYPE_BYTES),
        )
    widest = MAX_ROW_BYTES // DTYPE_BYTES[table.dtype]
    _check_range(table.name, "dim", table.dim, 1, widest)
    _check_range(table.name, "num_shards", table.num_shards, 1, MAX_SHARDS)


def _check_optimizer(name: str, optimizer: RowOptimizer) -> None:
    if optimizer.kind not in OPTIMIZERS:
        raise UnsupportedOptimizer(
            f"no such row optimizer for table {name}",
            seen=repr(optimizer.kind),
            expected=" or ".join(OPTIMIZERS),
        )
    for setting in ("lr", "weight_decay", "momentum", "eps", "initial_accumulator"):
        _check_range(name, setting, getattr(optimizer, setting), 0.0, MAX_SETTING)
    for setting in ("beta1", "beta2"):
        _check_range(name, setting, getattr(optimizer, setting), 0.0, 1.0)
    if optimizer.kind.endswith("adam") and not (optimizer.beta1 < 1.0 and optimizer.beta2 < 1.0):
        raise InvalidSpec(
            f"a beta of table {name} is out of range",
            seen=f"{optimizer.beta1:g}, {optimizer.beta2:g}",
            expected="below 1",
        )
    if optimizer.nesterov and not optimizer.momentum:
        raise InvalidSpec(
            f"nesterov of table {name} needs a momentum", seen="0", expected="above 0"
        )


def _check_rows(table: TableSpec) -> None:
    initialiser, admission = table.initialiser, table.admission
    if initialiser.kind not in INITIALISERS:
        raise InvalidSpec(
            f"no such initialiser for table {table.name}",
            seen=repr(initialiser.kind),
            expected=" or ".join(INITIALISERS),
        )
    largest = LARGEST[table.dtype]
    _check_range(table.name, "center of initialiser", initialiser.center, -largest, largest)
    _check_range(table.name, "spread of initialiser", initialiser.spread, 0.0, largest)
    if admission.kind not in ADMISSIONS:
        raise InvalidSpec(
            f"no such admission for table {table.name}",
            seen=repr(admission.kind),
            expected=" or ".join(ADMISSIONS[1:]),
        )
    if admission.kind == "count":
        _check_range(table.name, "min_pushes", admission.min_pushes, 1, 2**15)
    if admission.kind == "probability":
        _check_range(table.name, "probability", admission.probability, 0.0, 1.0)
    _check_range(table.name, "max_idle_s", table.eviction.max_idle_s, 0.0, math.inf)


def _check_range(table: str, setting: str, value: float, low: float, high: float) -> None:
    if not (low <= value <= high and math.isfinite(value)):
        raise InvalidSpec(
            f"{setting} of table {table} is out of range",
            seen=f"{value:g}",
            expected=f"{low:g} to {high:g}, finite",
        )


def schema_digest(of_parameters: str, tables: Sequence[TableSpec]) -> str:
    """Digest of the parameters and tables; without tables, the parameters' digest."""
    if not tables:
        return of_parameters
    digest = hashlib.sha256(of_parameters.encode())
    for table in sorted(tables, key=lambda table: table.name):
        digest.update(table.SerializeToString(deterministic=True))
    return digest.hexdigest()


def check_same(job: str, seen: Sequence[TableSpec], held: Sequence[TableSpec]) -> None:
    """Raise ProposalConflict if `seen` differ from the job's tables (`held`)."""
    of_seen = {table.name: _one_line(table) for table in seen}
    of_held = {table.name: _one_line(table) for table in held}
    differing = sorted(
        name for name in of_seen.keys() | of_held.keys() if of_seen.get(name) != of_held.get(name)
    )
    if differing:
        first = differing[0]
        raise ProposalConflict(
            f"the model's tables differ from those of job {job}",
            seen=of_seen.get(first, f"no table {first}"),
            expected=of_held.get(first, f"no table {first}"),
            fix="Train the same model in every worker, or use another job name.",
            details={
                name: f"saw {of_seen.get(name, '(absent)')},"
                f" expected {of_held.get(name, '(absent)')}"
                for name in differing
            },
        )


def lay_out(
    tables: Sequence[TableSpec], addresses: dict[str, str], first_id: int
) -> Iterator[Shard]:
    """Spread the tables' shards over the servers, with ids from `first_id` on."""
    dtypes = {table.name: table.dtype for table in tables}
    spread = spread_tables({table.name: table.num_shards for table in tables}, addresses)
    for shard_id, (name, index, server_id) in enumerate(spread, first_id):
        yield Shard(
            shard_id=shard_id,
            server_id=server_id,
            address=addresses[server_id],
            epoch=1,
            dtype=dtypes[name],
            table=name,
            table_index=index,
        )


def _one_line(table: TableSpec) -> str:
    return " ".join(str(table).split())
