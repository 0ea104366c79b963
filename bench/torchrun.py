"""Recovery of a torchrun job after a node is killed: time until the other node trains again.

    make bench NAME=torchrun           # 3 runs of each
    .venv/bin/python bench/torchrun.py 5

Two nodes of one worker each sum a number over Gloo in every step. Agent and worker of the second
node get SIGKILL; the figure is the time until the first node has completed a step alone, including
the start of its new worker. torchrun's own c10d backend and Shoal's take turns; c10d has the first
node as host, a last call of 1 s, and a new store for every restart, without which restarted workers
read stale addresses. A run that does not train again within two minutes is reported and left out.
"""

import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rows import Row, publish

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.local.process import ChildCommand, Process, Supervisor

DEFAULT_RUNS = 3
START_S = 120.0
RECOVERY_S = 120.0
STEPS_BEFORE = 20

SCRIPT = """
import json, os, sys, time
import torch
from torch import distributed as dist

dist.init_process_group("gloo")
with open(f"{sys.argv[1]}/steps-{os.getpid()}", "a", buffering=1) as steps:
    while True:
        ones = torch.ones(1)
        dist.all_reduce(ones)
        line = {"at_s": time.time(), "world": int(ones), "pid": os.getpid(), "agent": os.getppid()}
        print(json.dumps(line), file=steps)
        time.sleep(0.02)
"""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Rendezvous backend, by which a node finds the others."""

    name: str
    options: Callable[[int], Sequence[str]]
    """Returns the options of the node with this number."""
    environment: dict[str, str]


def measure(backend: Backend) -> float | None:
    """Return the seconds from the kill to the next step of the rest; None if there was none."""
    with tempfile.TemporaryDirectory() as name, running(backend, Path(name)) as nodes:
        directory = Path(name)

        def enough() -> bool:
            both = [step for step in steps_in(directory) if step["world"] == 2]
            return len(both) >= 2 * STEPS_BEFORE

        if not await_true(enough, START_S):
            raise SystemExit(f"{backend.name} did not start:\n{logs(directory)}")
        victim = nodes[1]
        workers = {s["pid"] for s in steps_in(directory) if s["agent"] == victim.pid}
        killed_s = time.time()
        victim.send_signal(signal.SIGKILL)
        kill_workers(workers)

        def alone() -> list[float]:
            return [step["at_s"] for step in steps_in(directory) if step["world"] == 1]

        if not await_true(lambda: bool(alone()), RECOVERY_S):
            print(f"{backend.name}: no step within {RECOVERY_S:g} s\n{logs(directory)[-2000:]}")
            return None
        return min(alone()) - killed_s


@contextmanager
def running(backend: Backend, directory: Path) -> Iterator[list[Process]]:
    """Run two nodes; kill all agents and workers at the end."""
    (directory / "train.py").write_text(SCRIPT)
    try:
        with Supervisor() as supervisor:
            yield [supervisor.spawn(node(backend, directory, number)) for number in range(2)]
    finally:
        # torchrun's workers lead sessions of their own: they outlive an agent that was killed.
        kill_workers({step["pid"] for step in steps_in(directory)})


def node(backend: Backend, directory: Path, number: int) -> ChildCommand:
    return ChildCommand(
        name=f"node-{number}",
        arguments=[
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--rdzv-id={directory.name}", "--nnodes=1:2", "--nproc-per-node=1"),
            *("--max-restarts=100", *backend.options(number)),
            *(str(directory / "train.py"), str(directory)),
        ],
        environment={**os.environ, "OMP_NUM_THREADS": "1", **backend.environment},
        log_path=directory / f"node-{number}.log",
    )


def kill_workers(pids: Iterable[int]) -> None:
    """SIGKILL each process that still runs the script: another process may have got its id."""
    for pid in pids:
        try:
            if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            continue


def steps_in(directory: Path) -> list[dict[str, Any]]:
    texts = [path.read_text() for path in directory.glob("steps-*")]
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def logs(directory: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(directory.glob("*.log")))


def await_true(holds: Callable[[], bool], within_s: float) -> bool:
    """Poll `holds`, which reads files of other processes; return False if the time is over."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def shoal_at(coordinator: str) -> Backend:
    options = ["--rdzv-backend=shoal", f"--rdzv-endpoint={coordinator}"]
    # Two nodes are the maximum: the rendezvous ends when both have joined, without a last call.
    return Backend(name="shoal", options=lambda number: options, environment={})


def c10d() -> Backend:
    port = free_port()

    def options(number: int) -> list[str]:
        host = "true" if number == 0 else "false"
        return [
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
            f"--rdzv-conf=last_call_timeout=1,is_host={host}",
        ]

    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return Backend(name="torchrun-c10d", options=options, environment=environment)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> None:
    num_runs = int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_RUNS
    own: list[float] = []
    peer: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        config = LocalClusterConfig(directory=Path(directory), num_parameter_servers=0)
        with LocalCluster(config) as cluster:
            for _ in range(num_runs):
                for backend, seen in ((shoal_at(cluster.coordinator), own), (c10d(), peer)):
                    seconds = measure(backend)
                    print(f"{backend.name}: {seconds}")
                    if seconds is not None:
                        seen.append(seconds)
    row = Row(
        metric="torchrun_node_loss_recovery",
        value=median(own),
        unit="s",
        runs=len(own),
        peer="torchrun-c10d",
        peer_value=median(peer) if peer else None,
    )
    publish("torchrun", [row])


if __name__ == "__main__":
    main()
