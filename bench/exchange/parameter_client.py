"""Shoal as a peer: a worker's client, and a local cluster with one parameter server."""

import tempfile
from collections.abc import Mapping
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from exchange.model import LR, SHAPES, Exchange, await_end

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.membership.member import Member
from shoal_client.membership.member_session import MemberSession
from shoal_client.parameters.dense import ParameterClient
from shoal_proto.incarnation import new_incarnation
from shoal_proto.tls import identity
from shoal_proto.tls.identity import from_environment
from shoal_proto.v1.membership_pb2 import JobSpec, MemberInfo
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import ParameterSpec

MAX_MEMBERS = 64
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=LR)])


class Trainer:
    """A member of a job, with buffers for its parameters. Entering its `with` block creates the
    job's shards, unless another member has done so."""

    def __init__(
        self,
        coordinator: str,
        *,
        job: str,
        number: int = 0,
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
        transport: str | None = None,
    ) -> None:
        self._shapes = shapes
        spec = JobSpec(job=job, min_members=1, max_members=MAX_MEMBERS, desired_members=1)
        self._membership = MemberSession(
            Member(
                coordinators=[coordinator],
                spec=spec,
                member_id=f"bench-{number}",
                incarnation=new_incarnation(),
                info=MemberInfo(host="localhost", address="127.0.0.1"),
            )
        )
        self._membership.join()
        self.client = ParameterClient(
            [coordinator], lambda: self._membership.token, transport=transport
        )
        self.values = self._buffers()
        self.gradients = self._buffers()

    def _buffers(self) -> dict[str, memoryview]:
        sizes = {name: 4 * prod(shape) for name, shape in self._shapes.items()}
        return {name: memoryview(bytearray(size)) for name, size in sizes.items()}

    def __enter__(self) -> Self:
        self.client.place(
            [
                ParameterSpec(name=name, shape=shape, dtype="float32")
                for name, shape in self._shapes.items()
            ]
        )
        self.client.create(SGD, self.values)
        self.client.pull(self.values)
        return self

    def push(self) -> None:
        self.client.push(self.gradients, into=self.values)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()
        self._membership.leave(completed=False, reason="measured")


def serve(owner: Connection, num_workers: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        # The folder has one certificate for the servers, and another one for their callers.
        files = from_environment()
        config = LocalClusterConfig(
            directory=Path(directory),
            num_parameter_servers=1,
            certificates=files.ca.parent if files is not None else None,
        )
        with LocalCluster(config) as cluster:
            owner.send(cluster.coordinator)
            await_end(owner)


def connect(address: str, number: int, num_workers: int) -> Exchange:
    identity.use(from_environment())
    return Trainer(address, job="large", number=number).__enter__().push
