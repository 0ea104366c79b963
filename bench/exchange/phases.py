"""CPU time of a push by phase, measured with the clock of each thread.

CPU time of a process outside all phases goes to sockets, the event loop and gRPC's threads.
"""

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from shoal_client.bulk.sending import Sending
from shoal_client.parameters import calls
from shoal_client.parameters.job_shards import Receiver
from shoal_proto.bulk import FrameReader
from shoal_server.parameters.shard.chunk_assembler import ChunkAssembler
from shoal_server.parameters.shard.dense import DenseBody
from shoal_server.parameters.shard.versioned import VersionedShard

DIRECTORY_VARIABLE = "SHOAL_BENCH_PHASES"
"""Variable that names the folder to which a parameter server writes its phases when it ends."""
SITE = Path(__file__).parent / "served_phases"
"""Folder with the module `sitecustomize`, which Python imports when a cluster's process starts."""


class PhaseClock:
    """CPU seconds by phase. Time in an inner phase does not count for the outer one."""

    def __init__(self) -> None:
        self._spent_s: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._local = threading.local()

    def spent_s(self) -> dict[str, float]:
        with self._lock:
            return dict(self._spent_s)

    def time(self, owner: Any, name: str, phase: str) -> None:
        """Replace `owner.name` by a wrapper that counts its CPU time for a phase."""
        timed = getattr(owner, name)

        @wraps(timed)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            outer = getattr(self._local, "inner_s", 0.0)
            self._local.inner_s = 0.0
            began_s = time.thread_time()
            try:
                return timed(*args, **kwargs)
            finally:
                took_s = time.thread_time() - began_s
                with self._lock:
                    self._spent_s[phase] += took_s - self._local.inner_s
                self._local.inner_s = outer + took_s

        setattr(owner, name, wrapped)


def of_client() -> PhaseClock:
    """Measure the phases of a worker in this process."""
    clock = PhaseClock()
    clock.time(Sending, "_make_ready", "client encode")
    clock.time(calls, "_piece", "client encode")
    clock.time(Receiver, "take", "client decode")
    return clock


def of_server() -> PhaseClock:
    """Measure the phases of a parameter server in this process."""
    clock = PhaseClock()
    clock.time(FrameReader, "next", "server receive")
    clock.time(FrameReader, "space", "server receive")
    clock.time(ChunkAssembler, "take", "server check")
    clock.time(ChunkAssembler, "join", "server join")
    clock.time(VersionedShard, "push", "server apply")
    clock.time(DenseBody, "values", "server answer")
    return clock


def served_environment(directory: Path) -> Mapping[str, str]:
    """The environment of a cluster whose parameter servers measure their phases."""
    paths = [str(SITE), str(SITE.parents[1]), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        DIRECTORY_VARIABLE: str(directory),
    }


def write_at_exit(clock: PhaseClock, register: Callable[[Callable[[], None]], object]) -> None:
    """Call `register` with a function that writes this server's figures to the folder named in
    DIRECTORY_VARIABLE."""
    path = Path(os.environ[DIRECTORY_VARIABLE]) / f"{os.getpid()}.json"
    register(lambda: _write(path, clock.spent_s()))


def _write(path: Path, spent_s: Mapping[str, float]) -> None:
    path.write_text(json.dumps(spent_s))


def served(directory: Path) -> dict[str, float]:
    """CPU seconds by phase of all servers that have ended."""
    total: dict[str, float] = defaultdict(float)
    for path in directory.glob("*.json"):
        for phase, spent_s in json.loads(path.read_text()).items():
            total[phase] += spent_s
    return dict(total)
