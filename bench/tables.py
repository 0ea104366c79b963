"""Tables of rows by id, in bench/results/tables.json.

    make bench NAME=tables
    .venv/bin/python bench/tables.py workers             # `worker_rows`, `worker_wide_rows` only
    .venv/bin/python bench/tables.py workers --record    # and docs/benchmarks/results/rows.json

Rates are in millions per second. Those of one shard are measured in batches of 65,536 ids in random
order, rows of 16 floats:

- `index_lookup_{rows}`, `index_insert_{rows}`: ids that the index of a shard with this many rows
  finds or adds on one core.
- `row_lookup_{rows}`: rows of a whole shard looked up, with their values copied.
- `row_push_{optimizer}`: gradients of rows applied, with all that a shard records of a push.
- `initial_rows`: new rows made.
- `table_bytes_per_row`: memory of a row with SGD, including its 64 bytes of values.
- `worker_rows`: rows that one worker looks up and pushes, in steps of 16,384 distinct ids of 10
  million, with a parameter server on this machine: by shared memory, by a socket (`_tcp`) and by
  gRPC (`_grpc`). Peers take turns with them: `raw-socket` exchanges the same number of bytes over
  TCP with a process that does nothing else; `torch-rpc` and, if `ray` is installed, `ray-actor`
  have a table in another process (`exchange/row_peers.py`).
- `worker_wide_rows`: the same with rows of 256 floats and 20,000 ids, nearly all of which have a
  row already.
"""

import argparse
import importlib.util
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import torch
from exchange.row_peers import PEERS, Shape, Step
from rows import Row, publish, record

from shoal.embedding.exchange import TableExchange
from shoal.embedding.options import RowNormal, RowSGD
from shoal.embedding.table import EmbeddingTable
from shoal.membership.generation import Context
from shoal_client.connection.transport import TRANSPORT_VARIABLE
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
WARM_UP = 8
RAW = "raw-socket"
TABLES: dict[str, Shape] = {"worker_rows": (10_000_000, DIM), "worker_wide_rows": (20_000, 256)}
"""Number of ids and floats in a row of the table of each metric."""
NORMAL = Initialiser(kind="normal", spread=0.01)
OPTIMIZERS = {
    "sgd": RowOptimizer(kind="sgd", lr=0.1),
    "adagrad": RowOptimizer(kind="adagrad", lr=0.1, eps=1e-10),
    "rowwise_adagrad": RowOptimizer(kind="rowwise_adagrad", lr=0.1, eps=1e-10),
    "adam": RowOptimizer(kind="adam", lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8),
}

random = np.random.default_rng(0)


def rate(metric: str, num_rows: int, work: Callable[[], object], runs: int = NUM_BATCHES) -> Row:
    """Return millions of rows per second: the median of `runs` runs, after one that does not
    count."""
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
            births = bytes(shard.read(partial(shard.body.look_up, ids.tobytes())).births)
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


class Worker:
    """A worker in a job of its own: each step looks up rows and pushes them."""

    def __init__(
        self, cluster: LocalCluster, transport: str, stack: ExitStack, dim: int, id_range: int
    ) -> None:
        name = f"tables-{transport}-{dim}"
        self._id_range = id_range
        spec = JobSpec(job=name, min_members=1, max_members=1, desired_members=1)
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
        stack.callback(membership.leave, completed=False, reason="measured")
        self._table = EmbeddingTable(
            dim, optimizer=RowSGD(lr=0.1), init=RowNormal(std=0.01), name="t"
        )
        self._exchange = TableExchange(self._table)
        stack.callback(self._exchange.close)
        with closing(ParameterClient([cluster.coordinator], lambda: membership.token)) as client:
            client.place([], self._exchange.specs)
        # The client reads the variable when it is created.
        os.environ[TRANSPORT_VARIABLE] = transport
        self._exchange.attach(
            Context(
                job=name,
                coordinators=[cluster.coordinator],
                token=lambda: membership.token,
                limits=Limits(collective_s=60.0, bring_up_s=60.0),
            ),
            Acknowledgement.ACKNOWLEDGEMENT_DEFAULT,
        )
        self._exchange.enter()

    def step(self) -> None:
        self._exchange.begin_step()
        ids = torch.from_numpy(random.choice(self._id_range, STEP_IDS, replace=False))
        self._table(ids).sum().backward()  # type: ignore[no-untyped-call]
        pushed = self._exchange.start_push(self._exchange.collect_gradients())
        assert pushed is not None
        pushed.result()


def raw_step(stack: ExitStack, dim: int) -> Callable[[], None]:
    """Return a step that only exchanges its bytes with another process, over a socket."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_answer_bytes, args=(there, dim))
    process.start()
    stack.callback(process.kill)
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", here.recv())))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def step() -> None:
        for sent, received in exchanges(dim):
            connection.sendall(bytes(sent))
            receive(connection, received)

    return step


def exchanges(dim: int) -> Sequence[tuple[int, int]]:
    """Return the bytes sent and received by each call of a step. The first sends ids and receives
    births and values; the second sends ids, births and gradients, and receives one byte."""
    return [(8 * STEP_IDS, (8 + 4 * dim) * STEP_IDS), ((16 + 4 * dim) * STEP_IDS, 1)]


def receive(connection: socket.socket, num_bytes: int) -> None:
    into = memoryview(bytearray(num_bytes))
    while into:
        count = connection.recv_into(into)
        if not count:
            raise ConnectionError("the other end closed the connection")
        into = into[count:]


def _answer_bytes(owner: Connection, dim: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        owner.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            for sent, answered in exchanges(dim):
                receive(connection, sent)
                connection.sendall(bytes(answered))


def worker_rows(
    cluster: LocalCluster, metric: str, shape: Shape, peers: Mapping[str, Step]
) -> list[Row]:
    """Measure lookups and pushes of one worker over each transport and by the peers, in turns."""
    id_range, dim = shape
    with ExitStack() as stack:
        steps: dict[str, Callable[[], None]] = {
            f"{metric}{suffix}": Worker(cluster, transport, stack, dim, id_range).step
            for suffix, transport in (("", "auto"), ("_tcp", "tcp"), ("_grpc", "grpc"))
        }
        own = list(steps)
        steps[RAW] = raw_step(stack, dim)
        for peer, step_of_peer in peers.items():
            steps[peer] = partial(_with_ids, step_of_peer, id_range)
        for step in steps.values():
            for _ in range(WARM_UP):
                step()
        times_s: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(NUM_STEPS):
            for name, step in steps.items():
                started_s = time.perf_counter()
                step()
                times_s[name].append(time.perf_counter() - started_s)
    rates = {name: STEP_IDS / median(times) / 1e6 for name, times in times_s.items()}
    return [
        Row(
            metric=name,
            value=rates[name],
            unit="million/s",
            runs=NUM_STEPS,
            peer=peer,
            peer_value=rates[peer],
        )
        for name in own
        for peer in rates
        if peer not in own
    ]


def _with_ids(step: Step, id_range: int) -> None:
    step(torch.from_numpy(random.choice(id_range, STEP_IDS, replace=False)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "part", nargs="?", choices=["workers"], help="only worker_rows and worker_wide_rows"
    )
    parser.add_argument(
        "--record", action="store_true", help="also write docs/benchmarks/results/rows.json"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    if asked.part is None:
        rows += [row for num_rows in INDEX_ROWS for row in index_rows(num_rows)]
        rows += [*shard_rows(), initial_rows()]
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        config = LocalClusterConfig(directory=Path(directory), num_parameter_servers=1)
        cluster = stack.enter_context(LocalCluster(config))
        installed = [p for p in PEERS if p != "ray-actor" or importlib.util.find_spec("ray")]
        steps = {peer: PEERS[peer](stack, [*TABLES.values()]) for peer in installed}
        for number, (metric, shape) in enumerate(TABLES.items()):
            peers = {peer: of_table[number] for peer, of_table in steps.items()}
            rows += worker_rows(cluster, metric, shape, peers)
    publish("tables", rows)
    if asked.record:
        compared = [row.as_json() for row in rows if row.peer]
        record("rows", compared, keys=("metric", "peer"))


if __name__ == "__main__":
    main()
