"""Pushing gradients and taking the new values back, in bench/results/parameters.json.

    make bench NAME=parameters

One worker, SGD applied on the server, everything over gRPC on this machine. `pull_push_100mb`
counts the bytes of both directions: 100 MB of gradients go there, 100 MB of values come back.
`push_20k_parameters` is what a step of a small model spends on its parameters, with one server and
with two.
"""

import tempfile
import time
from collections.abc import Mapping
from math import prod
from pathlib import Path
from statistics import median

from rows import Row, publish

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.membership import Member, Membership
from shoal_client.parameters import ParameterClient
from shoal_proto.incarnation import new_incarnation
from shoal_proto.v1.membership_pb2 import JobSpec, MemberInfo
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import ParameterSpec

SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=0.1)])
LARGE = {f"layer{i}.weight": (1000, 2500) for i in range(10)}
SMALL = {
    "conv1.weight": (16, 1, 3, 3),
    "conv1.bias": (16,),
    "conv2.weight": (32, 16, 3, 3),
    "conv2.bias": (32,),
    "head.weight": (10, 1568),
    "head.bias": (10,),
}
WARM_UP = 3
NUM_LARGE, NUM_SMALL = 20, 300


def push_times_s(
    cluster: LocalCluster, job: str, shapes: Mapping[str, tuple[int, ...]], num_pushes: int
) -> list[float]:
    """Seconds that each push with its answer took, for a member of its own job."""
    info = MemberInfo(host="localhost", address="127.0.0.1")
    spec = JobSpec(job=job, min_members=1, max_members=1, desired_members=1)
    membership = Membership(
        Member(
            coordinators=[cluster.coordinator],
            spec=spec,
            member_id="bench",
            incarnation=new_incarnation(),
            info=info,
        )
    )
    membership.attend()
    client = ParameterClient([cluster.coordinator], lambda: membership.token)
    try:
        client.place(
            [ParameterSpec(name=n, shape=shape, dtype="float32") for n, shape in shapes.items()]
        )
        values = {n: memoryview(bytearray(4 * prod(shape))) for n, shape in shapes.items()}
        gradients = {n: memoryview(bytearray(4 * prod(shape))) for n, shape in shapes.items()}
        client.create(SGD, values)
        client.pull(values)
        times_s = []
        for _ in range(WARM_UP + num_pushes):
            started_s = time.perf_counter()
            client.push(gradients, into=values)
            times_s.append(time.perf_counter() - started_s)
        return times_s[WARM_UP:]
    finally:
        client.close()
        membership.leave(completed=False, reason="measured")


def num_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(4 * prod(shape) for shape in shapes.values())


def main() -> None:
    rows = []
    for num_servers in (1, 2):
        suffix = "" if num_servers == 1 else f"_{num_servers}_servers"
        with tempfile.TemporaryDirectory() as directory:
            config = LocalClusterConfig(
                directory=Path(directory), num_parameter_servers=num_servers
            )
            with LocalCluster(config) as cluster:
                large_s = median(push_times_s(cluster, "large", LARGE, NUM_LARGE))
                small_s = median(push_times_s(cluster, "small", SMALL, NUM_SMALL))
        rows += [
            Row(
                metric=f"pull_push_100mb{suffix}",
                value=2 * num_bytes(LARGE) / large_s / 1e9,
                unit="GB/s",
                runs=NUM_LARGE,
            ),
            Row(
                metric=f"push_20k_parameters{suffix}",
                value=small_s * 1e3,
                unit="ms",
                runs=NUM_SMALL,
            ),
        ]
    publish("parameters", rows)


if __name__ == "__main__":
    main()
