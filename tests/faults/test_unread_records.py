"""A push counts as received once it is in the memory of its backup's process, read or not."""

import signal
import time
from array import array
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.clusters.parameter_cluster import ParameterCluster
from support.processes.load import unhurried

from shoal_client.membership.member import Member
from shoal_client.membership.member_session import MemberSession
from shoal_client.parameters.dense import ParameterClient
from shoal_proto.incarnation import new_incarnation
from shoal_proto.v1.membership_pb2 import JobSpec, MemberInfo
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import ParameterSpec

JOB = "job"
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])
SIZES = {"within its message": 8, "in shared memory": 20_000}
NUM_PUSHES = 3
SILENCE_S = 2.0
"""The time after which a primary continues without a silent backup."""


def filled(num_elements: int, value: float) -> dict[str, memoryview]:
    return {"w": memoryview(array("f", [value]) * num_elements).cast("B")}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ParameterCluster]:
    with ParameterCluster(tmp_path, 2) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: ParameterCluster) -> Iterator[ParameterClient]:
    coordinators = [cluster.coordinator.grpc]
    session = MemberSession(
        Member(
            coordinators=coordinators,
            spec=JobSpec(job=JOB, min_members=1, max_members=1, desired_members=1),
            member_id="w0",
            incarnation=new_incarnation(),
            info=MemberInfo(host="localhost", address="127.0.0.1"),
        )
    )
    with closing(session):
        session.join()
        with closing(ParameterClient(coordinators, lambda: session.token)) as client:
            yield client


@pytest.mark.parametrize("how", SIZES)
@pytest.mark.long
def test_records_unread_by_a_halted_backup_survive_the_primary(
    cluster: ParameterCluster, client: ParameterClient, how: str
) -> None:
    """Pushes are acknowledged while the backup is halted; then their primary is killed. The backup
    resumes and leads with all of them."""
    num_elements = SIZES[how]
    client.place([ParameterSpec(name="w", shape=[num_elements], dtype="float32")])
    client.create(SGD, filled(num_elements, 0.0))
    client.pull(filled(num_elements, 9.0))
    for _ in range(NUM_PUSHES):
        client.push(filled(num_elements, -1.0))
    (shard,) = cluster.assignments(JOB).shards
    primary, backup = cluster[shard.primary.server_id], cluster[shard.backups[0].server_id]
    backup.send_signal(signal.SIGSTOP)
    began_s = time.monotonic()
    for _ in range(NUM_PUSHES):
        client.push(filled(num_elements, -1.0))
    # A longer wait could mean that the primary continued without its backup.
    assert time.monotonic() - began_s < SILENCE_S
    primary.kill()
    backup.send_signal(signal.SIGCONT)
    values = filled(num_elements, 9.0)
    client.pull(values, wait_s=unhurried(30.0))
    assert set(values["w"].cast("f")) == {2.0 * NUM_PUSHES}
    (shard,) = cluster.assignments(JOB).shards
    assert shard.primary.server_id == backup.server_id
