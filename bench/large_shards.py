"""Copying of a large table shard while pushes continue, in bench/results/large_shards.json.

    make bench NAME=large_shards
    .venv/bin/python bench/large_shards.py --gigabytes 4

One shard of a table, of 2 GB with Adam's state, is filled at one server; then a second one starts.
A worker pushes 64 random rows of the table again and again, and a worker of another job pushes
20,000 parameters. `large_shard_in_step`: time from the second server being ready until its copy of
the table's shard is in step. `loop_lag_p99`: 99th percentile of the delay with which an event loop
resumed tasks, the worst of both servers and of all spans of ten seconds until then;
`loop_lag_p99_afterwards`: the worst of both servers in the last ten seconds of the bench.
`push_p99_ratio`: 99th percentile of the time of pushes of parameters while the large shard was
copied, over the same figure afterwards, when both jobs' shards have copies, under the same load.
"""

import argparse
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

# A server as a process is part of the tests' support code.
sys.path.append(str(Path(__file__).parent.parent / "tests"))

import grpc
import numpy as np
from rows import Row, p99, publish
from support.processes.served_process import ServedProcess

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.local.process import Supervisor
from shoal_client.membership.member import Member
from shoal_client.membership.member_session import MemberSession
from shoal_client.parameters.dense import ParameterClient
from shoal_client.parameters.table_rows import Gradients
from shoal_client.parameters.tables import TableClient
from shoal_proto.incarnation import new_incarnation
from shoal_proto.v1.membership_pb2 import JobSpec, MemberInfo
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.parameters_pb2 import DescribeReply, DescribeRequest
from shoal_proto.v1.parameters_pb2_grpc import ParametersStub
from shoal_proto.v1.shards_pb2 import ParameterSpec
from shoal_proto.v1.tables_pb2 import Initialiser, RowOptimizer, TableSpec

DIM = 64
ROW_BYTES = 8 + 8 + 8 + 4 + 3 * 4 * DIM
"""Id, birth, time of the last push, Adam's step; values and Adam's two averages."""
NUM_ROWS_A_FILL, NUM_ROWS_A_PUSH = 50_000, 64
NUM_PARAMETERS = 20_000
AFTERWARDS_S = 20.0
LIMIT_S = 600.0
TABLE_JOB, OTHER_JOB, ROWS = "large", "other", ("rows", 0)
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])


class Worker:
    """A member of a job of its own."""

    def __init__(self, cluster: LocalCluster, job: str, stack: ExitStack) -> None:
        self.coordinators = [cluster.coordinator]
        self._member = MemberSession(
            Member(
                coordinators=self.coordinators,
                spec=JobSpec(job=job, min_members=1, max_members=1, desired_members=1),
                member_id="w0",
                incarnation=new_incarnation(),
                info=MemberInfo(host="localhost", address="127.0.0.1"),
            )
        )
        stack.callback(self._member.close)
        self._member.join(LIMIT_S)
        self.dense = stack.enter_context(
            closing(ParameterClient(self.coordinators, self._token, timeout_s=LIMIT_S))
        )
        self.rows = stack.enter_context(
            closing(TableClient(self.coordinators, self._token, timeout_s=LIMIT_S))
        )

    def _token(self):  # type: ignore[no-untyped-def]
        return self._member.token

    def push_rows(self, ids: np.ndarray) -> None:  # type: ignore[type-arg]
        found = self.rows.look_up({ROWS: ids.tobytes()})[ROWS]
        gradients = Gradients(
            ids=ids.tobytes(),
            births=found.births,
            gradients=np.ones((len(ids), DIM), np.float32).tobytes(),
            base_version=found.version,
            base_epoch=found.epoch,
        )
        self.rows.push({ROWS: gradients})


class Repeated(threading.Thread):
    """Repeats an operation, and records when it began and how long it took, in seconds."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self._work = work
        self._stop_asked = threading.Event()
        self.took_s: list[tuple[float, float]] = []

    def run(self) -> None:
        while not self._stop_asked.wait(0.005):
            began_s = time.monotonic()
            self._work()
            self.took_s.append((began_s, time.monotonic() - began_s))

    def __enter__(self) -> "Repeated":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop_asked.set()
        self.join()

    def between(self, start_s: float, stop_s: float) -> list[float]:
        return [took_s for at_s, took_s in self.took_s if start_s <= at_s < stop_s]


class Watch:
    """Reads the description of each server."""

    def __init__(self, addresses: Sequence[str], stack: ExitStack) -> None:
        self.addresses = list(addresses)
        self._stack = stack
        self._stubs: dict[str, ParametersStub] = {}
        self.lags_s: list[float] = []

    def describe(self, job: str) -> list[DescribeReply]:
        for address in self.addresses:
            if address not in self._stubs:
                channel = self._stack.enter_context(grpc.insecure_channel(address))
                self._stubs[address] = ParametersStub(channel)
        replies = [
            stub.Describe(DescribeRequest(job=job), timeout=LIMIT_S)
            for stub in self._stubs.values()
        ]
        self.lags_s += [reply.loop_lag_p99_s for reply in replies]
        return replies

    def await_copies(self, job: str) -> None:
        """Return once every shard of the job has a copy in step. Raises TimeoutError."""
        give_up_s = time.monotonic() + LIMIT_S
        while True:
            shards = [shard for reply in self.describe(job) for shard in reply.shards]
            if shards and all(
                shard.copies and not any(copy.joining for copy in shard.copies) for shard in shards
            ):
                return
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"job {job} has no copies after {LIMIT_S:g} s: {shards}")
            threading.Event().wait(0.1)


def measured(cluster: LocalCluster, num_rows: int, stack: ExitStack) -> list[Row]:
    other = Worker(cluster, OTHER_JOB, stack)
    other.dense.place([ParameterSpec(name="w", shape=[NUM_PARAMETERS], dtype="float32")])
    values = {"w": memoryview(array("f", [0.0]) * NUM_PARAMETERS).cast("B")}
    other.dense.create(SGD, values)
    other.dense.pull(values)
    large = Worker(cluster, TABLE_JOB, stack)
    table = TableSpec(
        name=ROWS[0],
        dim=DIM,
        dtype="float32",
        initialiser=Initialiser(kind="constant"),
        optimizer=RowOptimizer(kind="adam", lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8),
        num_shards=1,
        max_shard_bytes=2 * num_rows * ROW_BYTES,
    )
    large.dense.place([], [table])
    large.rows.fetch_map()
    random = np.random.default_rng(0)
    ids = random.permutation(num_rows).astype(np.int64)
    for at in range(0, num_rows, NUM_ROWS_A_FILL):
        large.push_rows(ids[at : at + NUM_ROWS_A_FILL])
    watch = Watch(cluster.parameter_servers, stack)
    supervisor = stack.enter_context(Supervisor())
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    pushes = Repeated(lambda: other.dense.push(values))
    row_pushes = Repeated(
        lambda: large.push_rows(np.unique(random.integers(0, num_rows, NUM_ROWS_A_PUSH)))
    )
    with pushes, row_pushes:
        options = ("--etcd", cluster.etcd, "--listen", "127.0.0.1:0", "--id", "ps-1")
        added = ServedProcess(supervisor, directory, "ps-1", "ps", *options).ready()
        watch.addresses.append(added.grpc)
        began_s = time.monotonic()
        watch.await_copies(TABLE_JOB)
        in_step_s = time.monotonic()
        lags_s = list(watch.lags_s)
        watch.await_copies(OTHER_JOB)
        after_s = time.monotonic()
        threading.Event().wait(AFTERWARDS_S)
        watch.lags_s.clear()
        watch.describe(TABLE_JOB)
        ended_s = time.monotonic()
    during, after = pushes.between(began_s, in_step_s), pushes.between(after_s, ended_s)
    rows_during = row_pushes.between(began_s, in_step_s)
    return [
        row("large_shard_in_step", in_step_s - began_s, "s", 1),
        row("loop_lag_p99", max(lags_s), "s", len(lags_s)),
        row("loop_lag_p99_afterwards", max(watch.lags_s), "s", len(watch.lags_s)),
        row("push_p99_ratio", p99(during) / p99(after), "ratio", len(during)),
        row("push_p99_during", 1e3 * p99(during), "ms", len(during)),
        row("push_p99_afterwards", 1e3 * p99(after), "ms", len(after)),
        row("row_push_p99_during", 1e3 * p99(rows_during), "ms", len(rows_during)),
    ]


def row(metric: str, value: float, unit: str, runs: int) -> Row:
    return Row(metric=metric, value=value, unit=unit, runs=runs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Copying of a large table shard.")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    num_rows = int(parser.parse_args().gigabytes * 1e9 / ROW_BYTES)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        config = LocalClusterConfig(directory=Path(directory), num_parameter_servers=1)
        cluster = stack.enter_context(LocalCluster(config))
        publish("large_shards", measured(cluster, num_rows, stack))


if __name__ == "__main__":
    main()
