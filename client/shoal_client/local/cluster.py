"""A whole cluster on this machine: etcd, one coordinator, parameter servers, as processes.

    with LocalCluster(LocalClusterConfig(directory=Path("run"))) as cluster:
        ...  # cluster.coordinator is host:port

Everything is stopped at the end of the block, and nothing survives a crash of the process that
holds it. Each part takes free ports; its log, and etcd's data, lie in the directory.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from shoal_client.local.etcd import start_etcd
from shoal_client.local.process import Command, Process, Supervisor, stop_all
from shoal_proto.errors import InvalidSpec, Unavailable

LOG_TAIL_LINES = 20


@dataclass(frozen=True, kw_only=True)
class LocalClusterConfig:
    """What to start and where."""

    directory: Path
    """The run's own directory: logs, etcd's data, ready files. It is made if it is not there."""
    num_parameter_servers: int = 2
    listen: str = "127.0.0.1:0"
    """host:port of the coordinator's gRPC service; port 0 takes a free one."""
    http: str = "127.0.0.1:0"
    """host:port of its HTTP service."""
    start_timeout_s: float = 60.0
    """Time for each part to come up."""
    grace_s: float = 5.0
    """Time for the parts to end by themselves, before they are killed."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """The environment of every part."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """The coordinator's time limits that are not its defaults, by option: {"--join-s": 600.0}. It
    refuses those that do not go together, and then the cluster does not come up."""

    def __post_init__(self) -> None:
        if self.num_parameter_servers < 0:
            raise InvalidSpec(
                "bad number of parameter servers",
                seen=str(self.num_parameter_servers),
                expected="0 or more",
            )


class LocalCluster:
    """Starts at `with`, and is up inside the block; `on_exit` tells of a part that ends early."""

    etcd: str
    """host:port of etcd."""
    coordinator: str
    """host:port of the coordinator's gRPC service."""
    http_url: str
    """Base URL of the coordinator's HTTP service."""

    def __init__(
        self,
        config: LocalClusterConfig,
        *,
        on_exit: Callable[[Process], None] = lambda process: None,
    ) -> None:
        self._config = config
        self._supervisor = Supervisor(on_exit=on_exit, grace_s=config.grace_s)
        self._etcd: Process | None = None
        self._servers: dict[str, str] = {}
        self._num_servers = 0

    def __enter__(self) -> "LocalCluster":
        self._config.directory.mkdir(parents=True, exist_ok=True)
        self._supervisor.__enter__()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop every part; etcd last, so that the others can still give up what they hold."""
        try:
            others = [each for each in self._supervisor.running if each is not self._etcd]
            stop_all(others, self._config.grace_s)
        finally:
            self._supervisor.close()

    @property
    def processes(self) -> Mapping[str, Process]:
        """The parts that run, by name: etcd, coordinator, ps-0, ps-1, ..."""
        return {process.name: process for process in self._supervisor.running}

    @property
    def parameter_servers(self) -> Sequence[str]:
        """host:port of each parameter server."""
        return list(self._servers.values())

    def start_parameter_server(self) -> str:
        """Start one more; its name, once it serves. Shards come to it from the others by and by."""
        name, process = self._spawn_server()
        deadline_s = time.monotonic() + self._config.start_timeout_s
        self._servers[name] = self._await_ready(process, deadline_s)["grpc"]
        return name

    def end_parameter_server(self, name: str, timeout_s: float = 60.0) -> None:
        """Let a server hand its shards over to the others and end, and wait for that.

        Raises Unavailable if it takes longer; the server is then still at it.
        """
        process = self.processes.get(name)
        if process is not None:
            process.send_signal(signal.SIGTERM)
            if process.wait(timeout_s) is None:
                raise self._failure(name, f"still there after {timeout_s:g} s", "end")
        self._servers.pop(name, None)

    def log_tail(self, name: str) -> str:
        """The end of a part's log."""
        return tail(self._log_path(name))

    def _log_path(self, name: str) -> Path:
        directory = self._config.directory
        return (directory / "etcd" if name == "etcd" else directory) / f"{name}.log"

    def _start(self) -> None:
        (etcd,) = start_etcd(self._supervisor.spawn, self._config.directory / "etcd")
        self._etcd, self.etcd = etcd.process, etcd.endpoint
        # All at once: none of them needs another to come up.
        serving = ("--listen", self._config.listen, "--http", self._config.http)
        limits = (f"{option}={seconds:g}" for option, seconds in self._config.limits.items())
        coordinator = self._spawn("coordinator", *serving, *limits)
        servers = dict(self._spawn_server() for _ in range(self._config.num_parameter_servers))
        deadline_s = time.monotonic() + self._config.start_timeout_s
        ready = self._await_ready(coordinator, deadline_s)
        self.coordinator, self.http_url = ready["grpc"], ready["http"]
        self._servers = {
            name: self._await_ready(server, deadline_s)["grpc"] for name, server in servers.items()
        }

    def _spawn_server(self) -> tuple[str, Process]:
        name = f"ps-{self._num_servers}"
        self._num_servers += 1
        return name, self._spawn(name, "--listen", "127.0.0.1:0", "--id", name)

    def _spawn(self, name: str, *arguments: str) -> Process:
        ready_path = self._ready_path(name)
        ready_path.unlink(missing_ok=True)
        program = "ps" if name.startswith("ps-") else name
        command = (
            *(sys.executable, "-m", "shoal_client", program),
            *("--etcd", self.etcd, "--ready-file", str(ready_path), *arguments),
        )
        return self._supervisor.spawn(
            Command(
                name=name,
                arguments=command,
                environment=self._config.environment,
                log_path=self._log_path(name),
            )
        )

    def _ready_path(self, name: str) -> Path:
        return self._config.directory / f"{name}.ready.json"

    def _await_ready(self, process: Process, deadline_s: float) -> Mapping[str, str]:
        path = self._ready_path(process.name)
        while not path.exists():
            # Wakes at once when the process exits; the file itself sends no event.
            if process.wait(0.02) is not None:
                raise self._failure(process.name, f"exited with code {process.exit_code}")
            if time.monotonic() > deadline_s:
                raise self._failure(process.name, f"not up in {self._config.start_timeout_s} s")
        content: Mapping[str, str] = json.loads(path.read_text())
        return content

    def _failure(self, name: str, seen: str, what: str = "come up") -> Unavailable:
        path = self._log_path(name)
        return Unavailable(
            f"{name} of the local cluster did not {what}",
            seen=seen,
            fix=f"The end of its log, {path}:\n{tail(path)}",
        )


def tail(path: Path, num_lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a text file; empty if there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 200 * num_lines))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-num_lines:])


__all__ = ["LocalCluster", "LocalClusterConfig", "tail"]
