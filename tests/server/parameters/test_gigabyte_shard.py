"""A shard of a gigabyte is copied between two server processes with their default settings."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from support.clusters.one_tensor import OneTensor
from support.clusters.parameter_cluster import ParameterCluster

from shoal_client.membership.member import Member
from shoal_client.membership.member_session import MemberSession
from shoal_client.parameters.dense import ParameterClient
from shoal_client.parameters.table_rows import Gradients
from shoal_client.parameters.tables import TableClient
from shoal_proto.incarnation import new_incarnation
from shoal_proto.v1.membership_pb2 import JobSpec, MemberInfo
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.replication_pb2 import IdentifyRequest
from shoal_proto.v1.replication_pb2_grpc import ReplicationStub
from shoal_proto.v1.tables_pb2 import Initialiser, RowOptimizer, TableSpec

JOB, USERS = "gigabyte", ("users", 0)
NUM_ROWS, DIM, NUM_ROWS_A_PUSH = 1_100_000, 64, 50_000
MODEL = OneTensor(100_000)
LIMIT_S = 120.0
IN_STEP_WITHIN_S = 60.0
LONGEST_PUSH_S = 5.0
"""Bound on a push to another shard: far above usual times, far below the limit of a call."""
TABLE = TableSpec(
    name="users",
    dim=DIM,
    dtype="float32",
    seed=3,
    initialiser=Initialiser(kind="constant"),
    optimizer=RowOptimizer(kind="adam", lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8),
    num_shards=1,
)
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ParameterCluster]:
    with ParameterCluster(tmp_path, 1) as cluster:
        yield cluster


class Trainer:
    """A member of a job with one small dense shard and the large shard of a table."""

    def __init__(self, cluster: ParameterCluster, stack: ExitStack) -> None:
        coordinators = [cluster.coordinator.grpc]
        member = MemberSession(
            Member(
                coordinators=coordinators,
                spec=JobSpec(job=JOB, min_members=1, max_members=2, desired_members=1),
                member_id="w0",
                incarnation=new_incarnation(),
                info=MemberInfo(host="localhost", address="127.0.0.1"),
            )
        )
        stack.callback(member.close)
        member.join(LIMIT_S)
        self.dense = stack.enter_context(
            closing(ParameterClient(coordinators, lambda: member.token, timeout_s=LIMIT_S))
        )
        self.rows = stack.enter_context(
            closing(TableClient(coordinators, lambda: member.token, timeout_s=LIMIT_S))
        )
        self.dense.place(MODEL.schema, [TABLE])
        self.dense.create(SGD, MODEL.filled(0.0))
        self.dense.pull(MODEL.filled(9.0))
        self.rows.fetch_map()

    def push_rows(self, ids: NDArray[np.int64]) -> int:
        """Push these rows, and return the new version."""
        found = self.rows.look_up({USERS: ids.tobytes()})[USERS]
        gradients = Gradients(
            ids=ids.tobytes(),
            births=found.births,
            gradients=np.ones((len(ids), DIM), np.float32).tobytes(),
            base_version=found.version,
            base_epoch=found.epoch,
        )
        return self.rows.push({USERS: gradients}).versions[USERS]


class Repeated(threading.Thread):
    """Thread that repeats some work, and records how long each repetition took."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self._work = work
        self._is_over = threading.Event()
        self.took_s: list[float] = []

    def run(self) -> None:
        while not self._is_over.wait(0.005):
            began_s = time.monotonic()
            self._work()
            self.took_s.append(time.monotonic() - began_s)

    def __enter__(self) -> "Repeated":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self.join()

    def summary(self) -> str:
        took = sorted(self.took_s)
        p50_s, p99_s = np.quantile(took, [0.5, 0.99])
        return f"{len(took)}, p50 {p50_s:.3f}, p99 {p99_s:.3f}, longest {took[-1]:.3f} s"


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_shard_of_a_gigabyte_gets_its_copy_under_pushes(cluster: ParameterCluster) -> None:
    """The copy gets in step during pushes to this shard and to another one, whose pushes are not
    delayed for long. Then the copy leads, with every acknowledged push."""
    with ExitStack() as stack:
        trainer = Trainer(cluster, stack)
        ids = np.random.default_rng(1).permutation(NUM_ROWS)
        for at in range(0, NUM_ROWS, NUM_ROWS_A_PUSH):
            trainer.push_rows(ids[at : at + NUM_ROWS_A_PUSH])
        channel = stack.enter_context(grpc.insecure_channel(cluster.address("ps-0")))
        identify = ReplicationStub(channel).Identify
        pushes = Repeated(lambda: trainer.dense.push(MODEL.filled(-1.0)))
        answers = Repeated(lambda: identify(IdentifyRequest(), timeout=LIMIT_S))
        cluster.start("ps-1")
        cluster.await_ready()
        began_s, num_row_pushes, version = time.monotonic(), 0, 0
        with pushes, answers:
            while not cluster.is_in_step(JOB):
                assert time.monotonic() < began_s + IN_STEP_WITHIN_S
                version = trainer.push_rows(ids[:64])
                num_row_pushes += 1
        in_step_s = time.monotonic() - began_s
        print(f"in step after {in_step_s:.1f} s, {num_row_pushes} pushes of rows meanwhile")
        print("pushes of another shard:", pushes.summary())
        print("answers of the primary's event loop:", answers.summary())
        assert max(pushes.took_s) < LONGEST_PUSH_S
        print(
            cluster["ps-0"].log_path.read_text()[-6000:],
            "=====",
            cluster["ps-1"].log_path.read_text()[-3000:],
        )
        assert "replication_stream_broke" not in cluster["ps-0"].log_path.read_text()
        leader = cluster[cluster.assignments(JOB).shards[-1].primary.server_id]
        leader.kill()
        assert trainer.push_rows(ids[:64]) == version + 1
