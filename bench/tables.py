"""Tables of rows by id, in bench/results/tables.json.

    make bench NAME=tables

`index_lookup_{rows}` and `index_insert_{rows}` are ids that the index of one shard finds or takes
in a second on one core, of so many that it holds, in batches of 65,536 in random order.
`row_lookup_{rows}` and `row_push_{optimizer}` are rows of 16 floats a second of a whole shard: ids
looked up and values copied; gradients applied, with all that a push keeps. `initial_rows` are rows
made from nothing. `table_bytes_per_row` is the memory that a row takes with SGD, of its 64 bytes of
values. `worker_rows` are rows that one worker looks up and pushes in a second over gRPC, in steps
of 16,384 distinct ids of 10 million, with a parameter server on this machine.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rows import Row, publish

from shoal.embedding.exchange import TableExchange
from shoal.embedding.options import RowNormal, RowSGD
from shoal.embedding.table import EmbeddingTable
from shoal.membership.generation import Context
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.membership.member import Member
from shoal_client.membership.member_session import MemberSession
from shoal_client.parameters.dense import ParameterClient
from shoal_proto.incarnation import new_incarnation
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_proto.v1.membership_pb2 import JobSpec, Limits, MemberInfo
from shoal_proto.v1.shards_pb2 import Shard
from shoal_proto.v1.tables_pb2 import Initialiser, RowOptimizer, TableSpec
from shoal_server.parameters.tables.index import RowIndex
from shoal_server.parameters.tables.initial import InitialRows
from shoal_server.parameters.tables.shard import TablePush, TableShard, new_table_shard

DIM = 16
BATCH = 65_536
NUM_BATCHES = 20
INDEX_ROWS = (160_000, 10_000_000)
SHARD_ROWS = 1_000_000
STEP_IDS = 16_384
NUM_STEPS = 30
ID_RANGE = 10_000_000
NORMAL = Initialiser(kind="normal", spread=0.01)
OPTIMIZERS = {
    "sgd": RowOptimizer(kind="sgd", lr=0.1),
    "adagrad": RowOptimizer(kind="adagrad", lr=0.1, eps=1e-10),
    "rowwise_adagrad": RowOptimizer(kind="rowwise_adagrad", lr=0.1, eps=1e-10),
    "adam": RowOptimizer(kind="adam", lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8),
}

random = np.random.default_rng(0)


def rate(metric: str, num_rows: int, work: Callable[[], object], runs: int = NUM_BATCHES) -> Row:
    """Rows a second, by the median of so many runs behind one to warm up."""
    times_s = []
    for _ in range(runs + 1):
        started_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - started_s)
    return Row(
        metric=metric, value=num_rows / median(times_s[1:]) / 1e6, unit="million/s", runs=runs
    )


def index_rows(num_rows: int) -> list[Row]:
    size = min(BATCH, num_rows // 50)
    total = num_rows + (NUM_BATCHES + 1) * size
    ids = random.permutation(np.arange(total, dtype=np.int64) * 7919)
    index = RowIndex()
    index.insert(ids[:num_rows], np.arange(num_rows))
    batches = [random.choice(ids[:num_rows], BATCH) for _ in range(NUM_BATCHES + 1)]
    found = rate(f"index_lookup_{num_rows}", BATCH, lambda: index.find(batches.pop()))
    starts = count(num_rows, size)

    def insert() -> None:
        start = next(starts)
        index.insert(ids[start : start + size], np.arange(start, start + size))

    return [found, rate(f"index_insert_{num_rows}", size, insert)]


def shard_of(optimizer: RowOptimizer) -> TableShard:
    table = TableSpec(
        name="t",
        dim=DIM,
        dtype="float32",
        initialiser=NORMAL,
        optimizer=optimizer,
        num_shards=1,
        max_shard_bytes=2 * 1024**3,
    )
    return new_table_shard(Shard(shard_id=0, epoch=1, dtype="float32", table="t"), table)


def shard_rows() -> list[Row]:
    rows = []
    for kind, optimizer in OPTIMIZERS.items():
        shard = shard_of(optimizer)
        sequences = count(1)
        gradient = random.standard_normal((BATCH, DIM), np.float32).tobytes()

        def push(ids: np.ndarray, *, shard=shard, sequences=sequences, data=gradient) -> None:  # type: ignore[no-untyped-def,type-arg]
            births = shard.read(partial(shard.body.look_up, ids.tobytes())).births
            shard.push(
                TablePush(
                    session="bench",
                    sequence=next(sequences),
                    epoch=1,
                    base_version=shard.version,
                    step=0,
                    lr=None,
                    row_ids=ids.tobytes(),
                    births=births,
                    gradient=data[: len(ids) * DIM * 4],
                    at_unix_s=float(shard.version),
                ),
                lambda session: True,
            )

        for start in range(0, SHARD_ROWS, BATCH):
            push(np.arange(start, min(start + BATCH, SHARD_ROWS), dtype=np.int64))
        batches = [
            np.sort(random.choice(SHARD_ROWS, BATCH, replace=False)).astype(np.int64)
            for _ in range(NUM_BATCHES + 1)
        ]
        if kind == "sgd":
            look_up, asked = shard.body.look_up, [ids.tobytes() for ids in batches]
            work = lambda s=shard, f=look_up, a=asked: s.read(partial(f, a.pop()))  # noqa: E731
            rows.append(rate(f"row_lookup_{SHARD_ROWS}", BATCH, work))
            per_row = shard.memory_bytes / len(shard.body.content)
            rows.append(Row(metric="table_bytes_per_row", value=per_row, unit="bytes", runs=1))
        rows.append(rate(f"row_push_{kind}", BATCH, lambda: push(batches.pop())))  # noqa: B023
    return rows


def initial_rows() -> Row:
    initial = InitialRows(NORMAL, table="t", seed=0, dim=DIM, dtype=torch.float32)
    ids = np.arange(BATCH, dtype=np.int64)
    return rate("initial_rows", BATCH, lambda: initial.make(ids))


def worker_rows(cluster: LocalCluster) -> Row:
    """What one worker looks up and pushes, in the steps of a job of its own."""
    spec = JobSpec(job="tables", min_members=1, max_members=1, desired_members=1)
    membership = MemberSession(
        Member(
            coordinators=[cluster.coordinator],
            spec=spec,
            member_id="bench",
            incarnation=new_incarnation(),
            info=MemberInfo(host="localhost", address="127.0.0.1"),
        )
    )
    membership.join()
    table = EmbeddingTable(DIM, optimizer=RowSGD(lr=0.1), init=RowNormal(std=0.01), name="t")
    tables = TableExchange(table)
    client = ParameterClient([cluster.coordinator], lambda: membership.token)
    try:
        client.place([], tables.specs)
        tables.attach(
            Context(
                job="tables",
                coordinators=[cluster.coordinator],
                token=lambda: membership.token,
                limits=Limits(collective_s=60.0, bring_up_s=60.0),
            ),
            Acknowledgement.ACKNOWLEDGEMENT_DEFAULT,
        )
        tables.enter()

        def step() -> None:
            tables.begin_step()
            ids = torch.from_numpy(random.choice(ID_RANGE, STEP_IDS, replace=False))
            table(ids).sum().backward()  # type: ignore[no-untyped-call]
            pushed = tables.start_push(tables.gather())
            assert pushed is not None
            pushed.result()

        return rate("worker_rows", STEP_IDS, step, NUM_STEPS)
    finally:
        tables.close()
        client.close()
        membership.leave(completed=False, reason="measured")


def main() -> None:
    torch.set_num_threads(1)
    rows = [row for num_rows in INDEX_ROWS for row in index_rows(num_rows)]
    rows += [*shard_rows(), initial_rows()]
    with tempfile.TemporaryDirectory() as directory:
        config = LocalClusterConfig(directory=Path(directory), num_parameter_servers=1)
        with LocalCluster(config) as cluster:
            rows.append(worker_rows(cluster))
    publish("tables", rows)


if __name__ == "__main__":
    main()
