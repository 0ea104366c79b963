"""Pushes of gradients with the new values in return, in bench/results/parameters.json.

    make bench NAME=parameters
    .venv/bin/python bench/parameters.py torch-rpc raw-socket    # these peers only

`pull_push_100mb` (GB/s, over all workers) counts the bytes of both directions: 100 MB of gradients
are sent, SGD is applied, 100 MB of values are returned. One worker process takes part, then two.
Shoal and its peers take turns of about a second, so that other work on the machine affects all
alike; `..._over_PEER` is the median of the rounds' ratios. The peer `ray-actor` is measured
if `ray` is installed. Shoal's worker shares memory with the server, like workers on one machine;
`pull_push_100mb_tcp` and `pull_push_100mb_grpc` are the same over a socket and over gRPC.

`push_20k_parameters`: time of a push of a small model, with one server and with two.
`replication_cost_ratio`: time of a push of 100 MB to two servers that keep a copy of each other's
shards, over the time of a push to one server without copies, in turns. `push_cpu_*`: CPU time of
such a push, by part of the cluster. `phase_WAY_*`: CPU time of a push of 100 MB to one server, by
phase; `wire` is the time in no other phase: sockets, event loop and gRPC.
"""

import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from exchange import phases
from exchange.by_turns import by_turns, ratio
from exchange.model import NUM_BYTES, SHAPES
from exchange.parameter_client import Trainer
from rows import Row, publish

from shoal_client.connection.transport import TRANSPORT_VARIABLE
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.local.start_time import cpu_s

OWN = "parameter_client"
PEERS = {
    "torch-rpc": "torch_rpc",
    "ray-actor": "ray_actor",
    "grpc-protobuf": "grpc_protobuf",
    "grpc-bytes": "grpc_bytes",
    "grpc-stream": "grpc_stream",
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
NUM_TURNS = 9
NUM_LARGE, NUM_SMALL = 20, 300
SMALL_TURN = 20
"""Pushes of the small model in a turn."""
WAYS = {"shared_memory": "auto", "tcp": "tcp", "grpc": "grpc"}


def exchange_rows(peers: Sequence[str]) -> list[Row]:
    """Rows of Shoal by its fastest transport, beside its peers. With one worker, Shoal is measured
    by its other transports too."""
    rows = []
    for num_workers in (1, 2):
        name = "pull_push_100mb"
        ways = {name: "auto"}
        if num_workers == 1:
            ways |= {f"{name}_tcp": "tcp", f"{name}_grpc": "grpc"}
        entrants = {way: (OWN, {TRANSPORT_VARIABLE: value}) for way, value in ways.items()}
        entrants |= {peer: (PEERS[peer], {}) for peer in peers}
        turns = by_turns(entrants, num_workers, NUM_TURNS)
        suffix = f"_{num_workers}_workers" if num_workers > 1 else ""
        for way in ways:
            rows += _beside(f"{way}{suffix}", turns[way], {peer: turns[peer] for peer in peers})
    return rows


def _beside(metric: str, own: Sequence[float], others: Mapping[str, Sequence[float]]) -> list[Row]:
    """Return the rows of a comparison in turns: one row per peer, and the ratio to it."""
    print(f"{metric}: {median(own):.2f} GB/s", flush=True)
    row = {"metric": metric, "value": median(own), "unit": "GB/s", "runs": len(own)}
    rows = [] if others else [Row(**row)]
    for peer, theirs in others.items():
        over = ratio(own, theirs)
        print(f"  {peer}: {median(theirs):.2f} GB/s, {over:.2f} times that", flush=True)
        rows.append(Row(**row, peer=peer, peer_value=median(theirs)))
        rows.append(Row(metric=f"{metric}_over_{peer}", value=over, unit="", runs=len(own)))
    return rows


def _all_cpu_s(cluster: LocalCluster) -> dict[str, float]:
    """Return CPU seconds by part: the worker (this process), all servers together, all other
    processes."""
    used = {"worker": cpu_s(os.getpid()), "servers": 0.0, "others": 0.0}
    for name, process in cluster.processes.items():
        used["servers" if name.startswith("ps-") else "others"] += cpu_s(process.pid)
    return used


@contextmanager
def _running(
    num_servers: int, environment: Mapping[str, str] | None = None
) -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory() as directory:
        config = LocalClusterConfig(
            directory=Path(directory),
            num_parameter_servers=num_servers,
            environment=dict(os.environ) if environment is None else environment,
        )
        with LocalCluster(config) as cluster:
            yield cluster


class MeasuredCluster:
    """A cluster with a large and a small model, which takes turns with another cluster."""

    def __init__(self, cluster: LocalCluster, stack: ExitStack) -> None:
        self._cluster = cluster
        self._large = stack.enter_context(Trainer(cluster.coordinator, job="large", shapes=SHAPES))
        self._small = stack.enter_context(Trainer(cluster.coordinator, job="small", shapes=SMALL))
        self.large_s: list[float] = []
        self.small_s: list[float] = []
        self.cpu_s: dict[str, float] = {}
        for _ in range(WARM_UP):
            self._large.push()
            self._small.push()

    def push_large(self) -> None:
        before = _all_cpu_s(self._cluster)
        self.large_s.append(_timed(self._large))
        for part, after_s in _all_cpu_s(self._cluster).items():
            used_s = (after_s - before[part]) / NUM_LARGE
            self.cpu_s[part] = self.cpu_s.get(part, 0.0) + used_s

    def push_small(self) -> None:
        self.small_s.append(median(_timed(self._small) for _ in range(SMALL_TURN)))


def _timed(trainer: Trainer) -> float:
    """Push, and return the seconds until the values arrived."""
    started_s = time.perf_counter()
    trainer.push()
    return time.perf_counter() - started_s


def cluster_rows() -> list[Row]:
    with ExitStack() as stack:
        plain, copied = (
            MeasuredCluster(stack.enter_context(_running(num_servers)), stack)
            for num_servers in (1, 2)
        )
        for _ in range(NUM_LARGE):
            plain.push_large()
            copied.push_large()
        for _ in range(NUM_SMALL // SMALL_TURN):
            plain.push_small()
            copied.push_small()
    large, small = {"unit": "", "runs": NUM_LARGE}, {"unit": "ms", "runs": NUM_SMALL}
    rows = [
        Row(metric="replication_cost_ratio", value=ratio(copied.large_s, plain.large_s), **large),
        Row(
            metric="pull_push_100mb_2_servers",
            value=2 * NUM_BYTES / median(copied.large_s) / 1e9,
            unit="GB/s",
            runs=NUM_LARGE,
        ),
    ]
    for name, cluster in (("plain", plain), ("replicated", copied)):
        rows += [
            Row(metric=f"push_cpu_{name}_{part}", value=s * 1e3, unit="ms", runs=NUM_LARGE)
            for part, s in cluster.cpu_s.items()
        ]
    return [
        *rows,
        Row(metric="push_20k_parameters", value=median(plain.small_s) * 1e3, **small),
        Row(metric="push_20k_parameters_2_servers", value=median(copied.small_s) * 1e3, **small),
        Row(
            metric="push_20k_parameters_2_servers_over_1",
            value=ratio(copied.small_s, plain.small_s),
            unit="",
            runs=NUM_SMALL,
        ),
    ]


def phase_rows() -> list[Row]:
    """CPU milliseconds of a push by phase, for each transport."""
    client = phases.of_client()
    return [row for way, transport in WAYS.items() for row in _phases_of(way, transport, client)]


def _phases_of(way: str, transport: str, client: phases.PhaseClock) -> list[Row]:
    with tempfile.TemporaryDirectory() as directory:
        with (
            _running(1, phases.served_environment(Path(directory))) as cluster,
            Trainer(cluster.coordinator, job="phases", transport=transport) as trainer,
        ):
            for _ in range(WARM_UP):
                trainer.push()
            before, used_s = client.spent_s(), _all_cpu_s(cluster)
            for _ in range(NUM_LARGE):
                trainer.push()
            used_s = {part: s - used_s[part] for part, s in _all_cpu_s(cluster).items()}
        per_push_s = {
            phase: (spent_s - before.get(phase, 0.0)) / NUM_LARGE
            for phase, spent_s in client.spent_s().items()
        }
        per_push_s["client wire"] = used_s["worker"] / NUM_LARGE - sum(per_push_s.values())
        # A server counts its phases from its start: there were no other pushes.
        served = phases.served(Path(directory))
        served_s = {phase: s / (WARM_UP + NUM_LARGE) for phase, s in served.items()}
        served_s["server wire"] = used_s["servers"] / NUM_LARGE - sum(served_s.values())
    rows = [
        Row(
            metric=f"phase_{way}_{phase.replace(' ', '_')}",
            value=spent_s * 1e3,
            unit="ms",
            runs=NUM_LARGE,
        )
        for phase, spent_s in {**per_push_s, **served_s}.items()
    ]
    print(f"{way}: " + ", ".join(f"{row.metric} {row.value:.1f} ms" for row in rows), flush=True)
    return rows


def main() -> None:
    asked = sys.argv[1:] or list(PEERS)
    peers = [peer for peer in asked if peer != "ray-actor" or importlib.util.find_spec("ray")]
    if "ray-actor" in asked and "ray-actor" not in peers:
        print("ray is not installed: its actor is left out (pip install ray)", flush=True)
    publish("parameters", [*exchange_rows(peers), *cluster_rows(), *phase_rows()])


if __name__ == "__main__":
    main()
