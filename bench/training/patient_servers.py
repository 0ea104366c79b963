"""A coordinator and parameter servers with time limits for a crowded machine.

Eight workers and two servers share two cores: under the default limits a worker is sometimes
declared lost only because it is slow. Longer limits do not change the result: bench/accuracy.py
measures a model's quality, not time.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal_client.local.etcd import start_etcd
from shoal_client.local.process import ChildCommand, Process, Supervisor

HEARTBEAT_S, JOIN_S = 10.0, 1800.0
NUM_SERVERS = 2


@contextmanager
def patient_servers(directory: Path) -> Iterator[str]:
    """Yield the coordinator's host:port; logs and etcd's data are in the directory."""
    with Supervisor(grace_s=5.0) as supervisor:
        (etcd,) = start_etcd(supervisor.spawn, directory / "etcd")

        def start(name: str, *arguments: str) -> tuple[Process, Path, Path]:
            ready, log = directory / f"{name}.ready", directory / f"{name}.log"
            command = (
                *(sys.executable, "-m", "shoal_client", *arguments),
                *("--etcd", etcd.endpoint, "--listen", "127.0.0.1:0", "--ready-file", str(ready)),
            )
            spawned = supervisor.spawn(ChildCommand(name=name, arguments=command, log_path=log))
            return spawned, ready, log

        limits = ("--heartbeat-s", str(HEARTBEAT_S), "--join-s", str(JOIN_S))
        parts = [start("coordinator", "coordinator", "--http", "127.0.0.1:0", *limits)]
        parts += [
            start(f"ps-{number}", "ps", "--id", f"ps-{number}") for number in range(NUM_SERVERS)
        ]
        for process, ready, log in parts:
            while not ready.exists():
                if process.wait(0.05) is not None:
                    raise SystemExit(f"{process.name} did not start:\n{log.read_text()}")
        yield str(json.loads((directory / "coordinator.ready").read_text())["grpc"])


__all__ = ["patient_servers"]
