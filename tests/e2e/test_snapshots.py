"""`shoal snapshot` while members push, and `shoal restore` in another cluster."""

import json
import re
from array import array
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.processes.commands import Shoal, finish

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.membership.member import Member
from shoal_client.membership.member_session import MemberSession
from shoal_client.parameters.dense import ParameterClient
from shoal_proto.incarnation import new_incarnation
from shoal_proto.v1.membership_pb2 import JobSpec, MemberInfo
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import ParameterSpec

NUM_ELEMENTS = 1000
SCHEMA = [
    ParameterSpec(name=f"w{group}", shape=[NUM_ELEMENTS], dtype="float32", group=group)
    for group in range(4)
]
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)] * 4)


def buffers(value: float) -> dict[str, memoryview]:
    return {spec.name: memoryview(array("f", [value] * NUM_ELEMENTS)).cast("B") for spec in SCHEMA}


def numbers(values: dict[str, memoryview]) -> set[float]:
    return {value for data in values.values() for value in data.cast("f")}


class Joined:
    """A member of the job `snapped`, closed at the end of the block at the latest."""

    def __init__(self, cluster: LocalCluster, stack: ExitStack) -> None:
        spec = JobSpec(job="snapped", min_members=1, max_members=2, desired_members=1)
        self.membership = MemberSession(
            Member(
                coordinators=[cluster.coordinator],
                spec=spec,
                member_id="m",
                incarnation=new_incarnation(),
                info=MemberInfo(host="localhost", address="127.0.0.1"),
            )
        )
        stack.callback(self.membership.close)
        self.membership.join()
        self.client = ParameterClient([cluster.coordinator], lambda: self.membership.token)
        stack.callback(self.client.close)
        self.client.place(SCHEMA)
        self.client.create(SGD, buffers(0.0))
        self.values = buffers(0.0)
        self.client.pull(self.values)

    def push(self) -> None:
        self.client.push(buffers(1.0), into=self.values)


def started(stack: ExitStack, directory: Path, num_servers: int) -> LocalCluster:
    config = LocalClusterConfig(
        directory=directory,
        num_parameter_servers=num_servers,
        snapshot_roots=[str(directory.parent / "snapshots")],
    )
    return stack.enter_context(LocalCluster(config))


@pytest.mark.long
def test_a_job_continues_in_another_cluster(shoal_command: Shoal, tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = started(stack, tmp_path / "first", 1)
        asked = ("--coordinator", cluster.coordinator)
        member = Joined(cluster, stack)
        taking = shoal_command.start("snapshot", "snapped", "--to", "snapshots", *asked)
        while taking.poll() is None:
            member.push()
        code, output = finish(taking)
        assert code == 0, output
        assert re.match(
            rf"snapshot 1 of job snapped at {tmp_path}/snapshots: 4 shards, [0-9.]+ KiB, of which"
            r" [0-9.]+ KiB are new; new pushes waited \d+ ms$",
            output.strip(),
        )
        code, output = finish(
            shoal_command.start("restore", "snapped", "--from", "snapshots", *asked)
        )
        assert code == 1 and "has members" in output
        member.membership.leave(completed=False, reason="the cluster goes")

    with ExitStack() as stack:
        cluster = started(stack, tmp_path / "second", 2)
        asked = ("--coordinator", cluster.coordinator)
        restoring = shoal_command.start("restore", "snapped", "--from", "snapshots", *asked)
        code, output = finish(restoring)
        assert code == 0, output
        assert "4 shards on ps-0, ps-1" in output
        member = Joined(cluster, stack)
        (value,) = numbers(member.values)
        member.push()
        assert numbers(member.values) == {value - 1.0}
        listed = shoal_command.start("snapshots", "snapped", "--at", "snapshots", "--json", *asked)
        code, output = finish(listed)
        assert code == 0, output
        (snapshot,) = json.loads(output)["snapshots"]
        assert (snapshot["number"], snapshot["num_shards"]) == ("1", 4)
        elsewhere = shoal_command.start("snapshots", "snapped", "--at", "elsewhere", *asked)
        code, output = finish(elsewhere)
        assert code == 1 and "--snapshot-root" in output and f"{tmp_path}/snapshots" in output
        code, output = finish(shoal_command.start("snapshot", "snapped", *asked))
        assert code == 0 and f"at {tmp_path}/second/snapshots" in output
