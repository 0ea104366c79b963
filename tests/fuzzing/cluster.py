"""A real cluster to be fuzzed: etcd, a coordinator, a parameter server, and a correct member."""

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
from support.clusters.coordinator_world import FIELDS
from support.clusters.etcd_fixture import running_etcd
from support.models.table_specs import new_table
from support.processes.served_process import ServedProcess, awaited

from shoal_client.local.process import Supervisor
from shoal_client.membership.member import Member
from shoal_client.membership.member_session import MemberSession
from shoal_client.parameters.dense import ParameterClient
from shoal_proto.errors import ShoalError
from shoal_proto.incarnation import new_incarnation
from shoal_proto.protocol import OWN_PROTOCOLS
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.parameters_pb2 import OpenBulkReply, OpenBulkRequest
from shoal_proto.v1.parameters_pb2_grpc import ParametersStub
from shoal_proto.v1.replication_pb2 import OpenFollowRequest
from shoal_proto.v1.replication_pb2_grpc import ReplicationStub
from shoal_proto.v1.shards_pb2 import ParameterSpec, ShardMap

OTHER_JOBS = ("second", "third")
"""Further jobs that requests name: only a few."""
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=0.1)])
NOT_FORESEEN = (
    "Traceback",
    "call_failed",
    "loop_failed",
    "loop_ended",
    "background_work_failed",
    "http_request_failed",
    "image_failed",
    "never retrieved",
)
"""Text in a log line about an exception that no code handles."""


class FuzzedCluster:
    """A cluster as a context manager: inside it all parts serve, and the job `digits` has
    shards."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._num_members = self._num_jobs = 0
        self.job = "digits"
        """The job with parameters and a member."""
        self._read_bytes: dict[Path, int] = {}
        self._num_coordinators = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.etcd = stack.enter_context(running_etcd(self._directory))
            self._supervisor = stack.enter_context(Supervisor(grace_s=1.0))
            self.coordinator = self._start_coordinator("127.0.0.1:0")
            self.server = ServedProcess(
                self._supervisor,
                self._directory,
                "ps-0",
                *("ps", "--etcd", self.etcd, "--listen", "127.0.0.1:0", "--id", "ps-0"),
                *("--journal", str(self._directory / "journal")),
                *("--memory-limit-bytes", str(256 << 20)),
            )
            for process in (self.coordinator, self.server):
                process.ready()
            self.member = self._joined()
            stack.callback(self._close_member)
            self.map = self._placed()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _start_coordinator(self, listen: str) -> ServedProcess:
        self._num_coordinators += 1
        return ServedProcess(
            self._supervisor,
            self._directory,
            f"coordinator-{self._num_coordinators}",
            *("coordinator", "--etcd", self.etcd, "--listen", listen, "--http", "127.0.0.1:0"),
            *("--snapshot-url", str(self._directory / "snapshots"), "--leader-lease-s", "2"),
        )

    def restart_coordinator(self) -> None:
        """Kill the coordinator, and start another one, which reads the records now in etcd."""
        address = self.coordinator.grpc
        self.coordinator.process.kill()
        self.coordinator.process.wait(10.0)
        self.coordinator = self._start_coordinator(address).ready()

    def _joined(self) -> MemberSession:
        self._num_members += 1
        spec = pb.JobSpec(job=self.job, min_members=1, max_members=8, desired_members=1)
        member = MemberSession(
            Member(
                coordinators=[self.coordinator.grpc],
                spec=spec,
                member_id=f"m{self._num_members % 8}",
                incarnation=new_incarnation(),
                info=pb.MemberInfo(host="h", pid=1, address="127.0.0.1"),
            )
        )
        member.join()
        member.propose(FIELDS, synchronous=False, step=0, has_state=False)
        return member

    def _close_member(self) -> None:
        self.member.close()

    def renew(self) -> None:
        """Replace the member, even if the last one was removed. If its job is over by now, start
        another job."""
        self.member.close()
        try:
            self.member = self._joined()
        except ShoalError:
            self._num_jobs += 1
            self.job = f"digits-{self._num_jobs}"
            self.member = self._joined()
            self.map = self._placed()

    def _placed(self) -> ShardMap:
        client = ParameterClient([self.coordinator.grpc], lambda: self.token, transport="grpc")
        try:
            parameters = [ParameterSpec(name="p", shape=[1000], dtype="float32")]
            found = client.place(parameters, [new_table()])
            client.create(SGD, {"p": np.zeros(1000, np.float32).data.cast("B")})
            return found
        finally:
            client.close()

    @property
    def token(self) -> Token:
        token = Token()
        token.CopyFrom(self.member.token)
        return token

    def known(self) -> Mapping[str, Sequence[Any]]:
        """Values that most requests should name, to pass the first checks."""
        token = self.token
        wrong = Token(job=OTHER_JOBS[0], generation=1, member_id="m1", incarnation="guess")
        spec = pb.JobSpec(job=self.job, min_members=1, max_members=8, desired_members=1)
        ids = [each.shard_id for each in self.map.shards]
        return {
            "Token": [token, token, token, token, wrong],
            "JobSpec": [spec],
            "Shard": list(self.map.shards) or [],
            "TableSpec": [new_table()],
            "OptimizerSpec": [SGD],
            "job": [*[self.job] * 6, *OTHER_JOBS],
            "member_id": [token.member_id, "m0", "m1"],
            "incarnation": [token.incarnation, "guess"],
            "protocol": [OWN_PROTOCOLS.newest],
            "oldest_protocol": [OWN_PROTOCOLS.oldest],
            "shard_id": [*ids, *ids, 0, 1, 99],
            "shard_ids": [*ids, 0, 1],
            "epoch": [1, 1, 1, 2],
            "version": [1, 2, 3],
            "base_version": [1, 2],
            "sequence": list(range(1, 40)),
            "generation": [token.generation, 0, 1, 2],
            "url": ["", str(self._directory / "snapshots"), "/elsewhere"],
            "key": ["k1", "k2", "k3"],
            "keys": ["k1", "k2", "k3"],
            "table": ["users"],
            "server_id": ["ps-0", "ps-1"],
            "session": [f"{token.member_id}:{token.incarnation}", "s"],
            "dtype": ["float32"],
            "dataset_size": [1000],
            "num_epochs": [1],
        }

    def offer(self, draw: random.Random) -> OpenBulkReply:
        """A key for a connection of the bulk transport; one in four is that of another server."""
        with grpc.insecure_channel(self.server.grpc) as channel:
            if draw.random() < 0.25:
                return ReplicationStub(channel).OpenBulk(OpenFollowRequest(), timeout=10.0)
            asked = OpenBulkRequest(token=self.token)
            return ParametersStub(channel).OpenBulk(asked, timeout=10.0)

    # --- findings ---

    def not_foreseen(self) -> Sequence[str]:
        """New lines of the logs that report exceptions, and processes that died."""
        found = []
        for path in sorted(self._directory.glob("*.log")):
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                if any(sign in line for sign in NOT_FORESEEN):
                    found.append(f"{path.name}: {line[:3000]}")
        for process in (self.coordinator, self.server):
            if not process.runs:
                found.append(f"{process.name} has died")
        return found

    def depositions(self) -> Sequence[str]:
        """A line of the log for each term that ended while its coordinator ran."""
        logs = sorted(self._directory.glob("coordinator-*.log"))
        lines = [line for path in logs for line in path.read_text(errors="replace").splitlines()]
        return [line for line in lines if '"event": "leader_deposed"' in line]

    def rss_bytes(self) -> Mapping[int, int]:
        """Memory of the running coordinator and parameter server, by process id."""
        pids = [each.process.pid for each in (self.coordinator, self.server)]
        return {pid: _rss_bytes(pid) for pid in pids}

    def await_served(self) -> None:
        """Wait until both processes answer."""
        for process in (self.coordinator, self.server):
            with grpc.insecure_channel(process.grpc) as channel:
                awaited(lambda c=channel: _is_served(c), 60.0, f"{process.name} answers")


def _is_served(channel: grpc.Channel) -> bool:
    try:
        grpc.channel_ready_future(channel).result(timeout=1.0)
    except grpc.FutureTimeoutError:
        return False
    return True


def _rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
