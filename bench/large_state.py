"""A member joins a job of 2 GB of state over links of 200 Mb/s; no live member may be expelled.

    make bench NAME=large_state
    sudo .venv/bin/python bench/large_state.py 500    # megabytes of state

Two hosts (network namespaces joined by links of 200 Mb/s in both directions), the coordinator on
the first. A member there trains alone. A member on the other host joins, is killed once both train,
and is replaced by a new one. Each new member gets the whole state over the link, which its
heartbeats share; 2 GB take 80 s at the link's rate, more than any limit of a member's silence.
"ddp" at default settings. Needs root, `ip` and `tc`.

- `large_state_recovery`: seconds from the replacement's start to the first step of both; the peer
  is the time of the bytes alone at the link's rate. Importing torch and making the model are
  included.
- `large_state_expelled`: members that the coordinator declared lost, besides the killed one.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic

import httpx
from recovery import Stuck
from rows import Row, publish
from training.jobs import logs_in
from training.shaped_links import ShapedLinks
from training.steps import Steps

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

MEGABYTES, MEGABITS = 2000.0, 200
JOB = "large-state"
START_S, TRANSFER_S = 120.0, 300.0
STEPS_BETWEEN = 20
HERE = Path(__file__)
SCRIPT = HERE.parent / "training" / "on_large_state.py"


def forward(listener: socket.socket, target: tuple[str, int]) -> None:
    """Forward each connection to an address that only this host can reach; runs for ever."""

    def copy(source: socket.socket, sink: socket.socket) -> None:
        # If one end is closed, the other one is closed next.
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            end.close()

    while True:
        near, _ = listener.accept()
        far = socket.create_connection(target)
        for ends in ((near, far), (far, near)):
            threading.Thread(target=copy, args=ends, daemon=True).start()


class Member:
    """A worker on its own host."""

    def __init__(self, place: Path, name: str, host: int, namespace: str, megabytes: float) -> None:
        address = ShapedLinks.address(host)
        surroundings = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SHOAL_COORDINATOR": f"{ShapedLinks.address(0)}:{port_of(place)}",
            "SHOAL_JOB": JOB,
            "SHOAL_ADDRESS": address,
        }
        command = [sys.executable, str(SCRIPT), str(place), str(megabytes)]
        log = (place / f"{name}.log").open("wb")
        self.started_s = monotonic()
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *command],
            env=surroundings,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def port_of(place: Path) -> int:
    return int((place / "port").read_text())


def on_first_host(place: Path, other_namespace: str, own_namespace: str, megabytes: float) -> None:
    """Run the measurement, in the first host's namespace."""
    config = LocalClusterConfig(directory=place / "cluster", num_parameter_servers=0)
    with LocalCluster(config) as cluster, ExitStack() as stack:
        listener = socket.create_server((ShapedLinks.address(0), 0))
        (place / "port").write_text(str(listener.getsockname()[1]))
        host, _, port = cluster.coordinator.rpartition(":")
        threading.Thread(target=forward, args=(listener, (host, int(port))), daemon=True).start()
        steps = Steps(place)

        def member(name: str, number: int) -> Member:
            namespace = (own_namespace, other_namespace)[number]
            started = Member(place, name, number, namespace, megabytes)
            stack.callback(started.process.kill)
            return started

        def await_training(count: int, within_s: float) -> None:
            ready = steps.await_true(lambda: bool(steps.training(count, STEPS_BETWEEN)), within_s)
            if not ready:
                raise Stuck(f"no {count} members train:\n{logs_in(place)}")

        first = member("first", 0)
        await_training(1, START_S)
        second = member("second", 1)
        await_training(2, TRANSFER_S)
        os.kill(second.process.pid, signal.SIGKILL)
        second.process.wait()
        await_training(1, START_S)
        third = member("third", 1)
        await_training(2, TRANSFER_S)
        took = []
        for joined in (second, third):
            own = steps.by_pid[joined.process.pid]
            took.append(own[0].at_s - joined.started_s)
            print(f"a step of both after {took[-1]:.1f} s", flush=True)
        expelled = lost_members(cluster) - 1
        (place / "stop").touch()
        for each in (first, third):
            if each.process.wait(START_S):
                raise Stuck(f"a member ended with {each.process.returncode}:\n{logs_in(place)}")
    rows = [
        Row(
            metric="large_state_recovery",
            value=took[-1],
            unit="s",
            runs=1,
            peer="the link alone",
            peer_value=megabytes * 8 / MEGABITS,
        ),
        Row(metric="large_state_expelled", value=expelled, unit="members", runs=2),
    ]
    publish("large_state", rows)


def lost_members(cluster: LocalCluster) -> float:
    """Return the job's lost members, as the coordinator counts them."""
    text = httpx.get(f"{cluster.http_url}/metrics", trust_env=False).raise_for_status().text
    counted = [
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("shoal_job_lost_members_total{") and JOB in line
    ]
    if len(counted) != 1:
        raise Stuck(f"no count of lost members in {cluster.http_url}/metrics")
    return counted[0]


def main() -> None:
    if sys.argv[1:2] == ["inside"]:
        place, own, other, megabytes = sys.argv[2:]
        on_first_host(Path(place), other, own, float(megabytes))
        return
    megabytes = sys.argv[1] if len(sys.argv) > 1 else str(MEGABYTES)
    # On SIGTERM, leave the `with` block, which removes the namespaces.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with ShapedLinks(2, megabits=MEGABITS) as links, tempfile.TemporaryDirectory() as directory:
        arguments = ["inside", directory, links.hosts[0], links.hosts[1], megabytes]
        inside = ["ip", "netns", "exec", links.hosts[0], sys.executable, str(HERE), *arguments]
        sys.exit(subprocess.run(inside, check=False).returncode)


if __name__ == "__main__":
    main()
