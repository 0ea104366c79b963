"""Pushing gradients and taking the new values back, in bench/results/parameters.json.

    make bench NAME=parameters
    .venv/bin/python bench/parameters.py torch-rpc raw-socket    # these peers only

`pull_push_100mb` (GB/s, over all workers) counts the bytes of both directions: 100 MB of gradients
go there, SGD is applied, 100 MB of values come back. With one worker and with two, each a process;
the peers do the same in the same run, one after the other. The peer `ray-actor` is measured where
`ray` is installed. Shoal's worker shares memory with the server, as workers on one machine do;
`pull_push_100mb_tcp` and `pull_push_100mb_grpc` are the same by a socket and by gRPC.

`push_20k_parameters` is what a step of a small model spends on its parameters, with one server and
with two. `replication_cost_ratio` is the time of a push of 100 MB to two servers that keep a copy
of each other's shards, over that to one server without; and `push_cpu_*` says what all processes of
either spend on a push, where it goes, in CPU time.
"""

import importlib
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median

from exchange.model import NUM_BYTES, SHAPES, Peer
from exchange.parameter_client import Trainer
from rows import Row, publish

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.parameters.calls import TRANSPORT_VARIABLE

OWN = "parameter_client"
PEERS = {
    "torch-rpc": "torch_rpc",
    "ray-actor": "ray_actor",
    "grpc-protobuf": "grpc_protobuf",
    "grpc-bytes": "grpc_bytes",
    "raw-socket": "raw_socket",
}
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
MAX_LARGE_S = 20.0
"""A slow peer makes fewer exchanges."""
START_S, END_S = 120.0, 30.0

_processes = multiprocessing.get_context("spawn")


class PeerFailed(Exception):
    """A peer did not come up, or one of its workers ended early."""


def find(module: str) -> Peer:
    """The peer's module."""
    peer: Peer = importlib.import_module(f"exchange.{module}")  # type: ignore[assignment]
    return peer


def _serve(module: str, owner: Connection, num_workers: int) -> None:
    find(module).serve(owner, num_workers)
    # What a peer's own threads still do is of no interest.
    os._exit(0)


def _work(module: str, address: str, number: int, start: Barrier, results: Connection) -> None:
    """One worker: (exchanges, first began, last ended) goes into `results`."""
    exchange = find(module).connect(address, number, start.parties)
    began_s = time.perf_counter()
    for _ in range(WARM_UP):
        exchange()
    usual_s = (time.perf_counter() - began_s) / WARM_UP
    count = max(2, min(NUM_LARGE, int(MAX_LARGE_S / usual_s)))
    start.wait(START_S)
    began_s = time.perf_counter()
    for _ in range(count):
        exchange()
    results.send((count, began_s, time.perf_counter()))
    # Whoever is slower is measured with all the others still there.
    start.wait(START_S)
    os._exit(0)


def throughput_gb_s(module: str, num_workers: int) -> float:
    """GB a second in both directions together, over all workers."""
    owner, other_end = _processes.Pipe()
    server = _processes.Process(target=_serve, args=(module, other_end, num_workers))
    server.start()
    other_end.close()
    workers = []
    try:
        if not owner.poll(START_S):
            raise PeerFailed(f"{module} did not come up within {START_S:g} s")
        address, start = owner.recv(), _processes.Barrier(num_workers)
        ends = []
        for number in range(num_workers):
            end, sender = _processes.Pipe(duplex=False)
            workers.append(
                _processes.Process(target=_work, args=(module, address, number, start, sender))
            )
            workers[-1].start()
            sender.close()
            ends.append(end)
        counts, begins_s, ends_s = zip(*(end.recv() for end in ends), strict=True)
        for worker in workers:
            worker.join(END_S)
        return 2 * NUM_BYTES * sum(counts) / (max(ends_s) - min(begins_s)) / 1e9
    except EOFError as error:
        raise PeerFailed(f"{module} ended before it was measured") from error
    finally:
        owner.close()
        for process in (*workers, server):
            process.join(END_S)
            process.kill()


def exchange_rows(peers: Sequence[str]) -> list[Row]:
    rows = []
    for num_workers in (1, 2):
        metric = f"pull_push_100mb_{num_workers}_workers" if num_workers > 1 else "pull_push_100mb"
        own = throughput_gb_s(OWN, num_workers)
        print(f"{metric}: {own:.2f} GB/s", flush=True)
        row = {"metric": metric, "value": own, "unit": "GB/s", "runs": NUM_LARGE}
        if not peers:
            rows.append(Row(**row))
        for peer in peers:
            theirs = throughput_gb_s(PEERS[peer], num_workers)
            print(f"  {peer}: {theirs:.2f} GB/s, {own / theirs:.2f} times that", flush=True)
            rows.append(Row(**row, peer=peer, peer_value=theirs))
            rows.append(
                Row(metric=f"{metric}_over_{peer}", value=own / theirs, unit="", runs=NUM_LARGE)
            )
    return rows


def transport_rows() -> list[Row]:
    """The ways that workers on other machines take, here over the loopback."""
    rows = []
    for transport in ("tcp", "grpc"):
        before = os.environ.get(TRANSPORT_VARIABLE)
        os.environ[TRANSPORT_VARIABLE] = transport
        try:
            value = throughput_gb_s(OWN, 1)
        finally:
            del os.environ[TRANSPORT_VARIABLE]
            if before is not None:
                os.environ[TRANSPORT_VARIABLE] = before
        print(f"pull_push_100mb_{transport}: {value:.2f} GB/s", flush=True)
        rows.append(
            Row(metric=f"pull_push_100mb_{transport}", value=value, unit="GB/s", runs=NUM_LARGE)
        )
    return rows


def timed_s(push: Callable[[], None], num_pushes: int) -> list[float]:
    """Seconds that each push with its answer took."""
    times_s = []
    for _ in range(WARM_UP + num_pushes):
        started_s = time.perf_counter()
        push()
        times_s.append(time.perf_counter() - started_s)
    return times_s[WARM_UP:]


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used so far, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    # utime and stime: the fields 14 and 15 of proc(5), the third of which comes first here.
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _all_cpu_s(cluster: LocalCluster) -> dict[str, float]:
    """By part: the worker (this process), all servers together, etcd and the coordinator."""
    used = {"worker": cpu_s(os.getpid()), "servers": 0.0, "others": 0.0}
    for name, process in cluster.processes.items():
        used["servers" if name.startswith("ps-") else "others"] += cpu_s(process.pid)
    return used


def of_cluster(num_servers: int) -> tuple[float, Mapping[str, float], float]:
    """Of a cluster with so many servers: seconds for a push of 100 MB, CPU seconds for it by part,
    and seconds for a push of 20 k parameters."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = LocalClusterConfig(directory=directory, num_parameter_servers=num_servers)
        cluster = stack.enter_context(LocalCluster(config))
        with Trainer(cluster.coordinator, job="large", shapes=SHAPES) as trainer:
            timed_s(trainer.push, 0)
            before = _all_cpu_s(cluster)
            large_s = [_timed(trainer.push) for _ in range(NUM_LARGE)]
            used = {
                part: (after - before[part]) / NUM_LARGE
                for part, after in _all_cpu_s(cluster).items()
            }
        with Trainer(cluster.coordinator, job="small", shapes=SMALL) as trainer:
            small_s = median(timed_s(trainer.push, NUM_SMALL))
        return median(large_s), used, small_s


def _timed(push: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    push()
    return time.perf_counter() - started_s


def cluster_rows() -> list[Row]:
    plain_s, plain_cpu_s, plain_small_s = of_cluster(1)
    copied_s, copied_cpu_s, copied_small_s = of_cluster(2)
    rows = [
        Row(
            metric="replication_cost_ratio",
            value=copied_s / plain_s,
            unit="",
            runs=NUM_LARGE,
        ),
        Row(
            metric="pull_push_100mb_2_servers",
            value=2 * NUM_BYTES / copied_s / 1e9,
            unit="GB/s",
            runs=NUM_LARGE,
        ),
    ]
    for name, used_s in (("plain", plain_cpu_s), ("replicated", copied_cpu_s)):
        rows += [
            Row(metric=f"push_cpu_{name}_{part}", value=s * 1e3, unit="ms", runs=NUM_LARGE)
            for part, s in used_s.items()
        ]
    small = {"unit": "ms", "runs": NUM_SMALL}
    return [
        *rows,
        Row(metric="push_20k_parameters", value=plain_small_s * 1e3, **small),
        Row(metric="push_20k_parameters_2_servers", value=copied_small_s * 1e3, **small),
    ]


def main() -> None:
    asked = sys.argv[1:] or list(PEERS)
    peers = [peer for peer in asked if peer != "ray-actor" or importlib.util.find_spec("ray")]
    if "ray-actor" in asked and "ray-actor" not in peers:
        print("ray is not installed: its actor is left out (pip install ray)", flush=True)
    publish("parameters", [*exchange_rows(peers), *transport_rows(), *cluster_rows()])


if __name__ == "__main__":
    main()
