"""Snapshots while members push, in bench/results/snapshots.json.

    make bench NAME=snapshots

Members push gradients of a model of 20 MB to two servers as fast as they can, and the servers apply
Adam: for a minute without snapshots, then for as long with a snapshot every ten seconds.

- `snapshot_push_p99_ratio`: 99th percentile of the time of a push, with snapshots over without.
- `snapshot_pause`: median time for which new pushes wait for a snapshot.
- `torn_steps`: pushes that are in some shards of a snapshot and not in others, over all snapshots
  and members.
"""

import multiprocessing
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median, quantiles

import grpc
from rows import Row, publish

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.membership.member import Member
from shoal_client.membership.member_session import MemberSession
from shoal_client.parameters.dense import ParameterClient
from shoal_proto.incarnation import new_incarnation
from shoal_proto.v1.membership_pb2 import JobSpec, MemberInfo
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import ParameterSpec
from shoal_proto.v1.snapshots_pb2 import SnapshotSummary, TakeSnapshotRequest
from shoal_proto.v1.snapshots_pb2_grpc import SnapshotsStub
from shoal_server.parameters.shard import image_file
from shoal_server.snapshots.library import SnapshotLibrary
from shoal_server.snapshots.storage import Storage

JOB = "snapped"
NUM_MEMBERS, NUM_SERVERS = 2, 2
NUM_LAYERS, LAYER_SIZE = 10, 500_000
ADAM = OptimizerSpec(
    kind="adam", groups=[HyperParameters(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8)]
)
SCHEMA = [
    ParameterSpec(name=f"layer{i}.weight", shape=[LAYER_SIZE], dtype="float32")
    for i in range(NUM_LAYERS)
]
WARM_UP_S, PHASE_S = 5.0, 60.0
EVERY_S = 10.0
TAKE_WITHIN_S = 120.0


def buffers() -> Mapping[str, memoryview]:
    return {spec.name: memoryview(bytearray(4 * LAYER_SIZE)) for spec in SCHEMA}


def push_for_ever(coordinator: str, name: str, stop: Event, results: Connection) -> None:
    """Push until `stop` is set. Then send the start of each push, by the clock that all processes
    share, and its duration, in seconds."""
    spec = JobSpec(job=JOB, min_members=1, max_members=NUM_MEMBERS, desired_members=NUM_MEMBERS)
    membership = MemberSession(
        Member(
            coordinators=[coordinator],
            spec=spec,
            member_id=name,
            incarnation=new_incarnation(),
            info=MemberInfo(host="localhost", address="127.0.0.1"),
        )
    )
    membership.join()
    client = ParameterClient([coordinator], lambda: membership.token)
    client.place(SCHEMA)
    values, gradients = buffers(), buffers()
    client.create(ADAM, values)
    client.pull(values)
    client.push(gradients, into=values)
    results.send("ready")
    took = []
    while not stop.is_set():
        began_s = time.monotonic()
        client.push(gradients, into=values)
        took.append((began_s, time.monotonic() - began_s))
    results.send(took)
    client.close()
    membership.leave(completed=False, reason="measured")


def snapshots_until(coordinator: str, url: str, end_s: float) -> list[SnapshotSummary]:
    taken = []
    with grpc.insecure_channel(coordinator) as channel:
        stub = SnapshotsStub(channel)
        while time.monotonic() < end_s:
            began_s = time.monotonic()
            request = TakeSnapshotRequest(job=JOB, url=url)
            taken.append(stub.Take(request, timeout=TAKE_WITHIN_S))
            threading.Event().wait(max(0.0, began_s + EVERY_S - time.monotonic()))
    return taken


def num_torn(directory: Path) -> int:
    """Count pushes that are in only some shards of a snapshot, over all snapshots."""
    library = SnapshotLibrary(Storage(str(directory)), JOB)
    torn = 0
    for manifest in library.list():
        newest: dict[str, set[int]] = {}
        for part in manifest.parts:
            image = image_file.from_bytes(
                library.read_part(part), sha256=part.sha256, file=part.file, shard_id=part.shard_id
            )
            for session in image.sessions:
                newest.setdefault(session.session, set()).add(max(session.sequences))
        torn += sum(max(seen) - min(seen) for seen in newest.values())
    return torn


def main() -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        url = Path(directory) / "snapshots"
        config = LocalClusterConfig(
            directory=Path(directory) / "cluster",
            num_parameter_servers=NUM_SERVERS,
            snapshot_roots=[str(url)],
        )
        stop = context.Event()
        pipes = [context.Pipe(duplex=False) for _ in range(NUM_MEMBERS)]
        with LocalCluster(config) as cluster:
            members = [
                context.Process(
                    target=push_for_ever, args=(cluster.coordinator, f"m{i}", stop, pipe[1])
                )
                for i, pipe in enumerate(pipes)
            ]
            for member in members:
                member.start()
            for receiving, _ in pipes:
                assert receiving.recv() == "ready"
            threading.Event().wait(WARM_UP_S)
            began_s = time.monotonic()
            threading.Event().wait(PHASE_S)
            middle_s = time.monotonic()
            taken = snapshots_until(cluster.coordinator, str(url), middle_s + PHASE_S)
            stop.set()
            took = [each for receiving, _ in pipes for each in receiving.recv()]
            for member in members:
                member.join()
        without = [t for at, t in took if began_s <= at < middle_s]
        during = [t for at, t in took if at >= middle_s]
        publish("snapshots", rows(without, during, taken, num_torn(url)))


def rows(
    without: list[float], during: list[float], taken: list[SnapshotSummary], torn: int
) -> list[Row]:
    p99_without, p99_during = quantiles(without, n=100)[98], quantiles(during, n=100)[98]
    pause_s = median(each.pause_s for each in taken)
    return [
        Row(
            metric="snapshot_push_p99_ratio",
            value=p99_during / p99_without,
            unit="ratio",
            runs=len(during),
        ),
        Row(
            metric="push_p99_without_snapshots",
            value=1e3 * p99_without,
            unit="ms",
            runs=len(without),
        ),
        Row(metric="snapshot_pause", value=1e3 * pause_s, unit="ms", runs=len(taken)),
        Row(metric="torn_steps", value=torn, unit="steps", runs=len(taken)),
    ]


if __name__ == "__main__":
    main()
