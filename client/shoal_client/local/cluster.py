"""A whole cluster on this machine.

The cluster does not survive its `with` block, or a crash of this process. With `restart`, a part
that ends is started again. A parameter server starts without shards: backups have taken them over.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

from shoal_client.local.access import CERTIFICATES, LocalAccess, LocalTls
from shoal_client.local.directory import keep_logs_at_end
from shoal_client.local.etcd import (
    ETCD,
    EtcdAddresses,
    EtcdMember,
    RunningEtcd,
    plan_member,
    start_etcd,
    start_members,
)
from shoal_client.local.keeper import Keeper, NotStarted, RestartPolicy
from shoal_client.local.options import DEFAULT_NUM_SERVERS
from shoal_client.local.process import ChildCommand, Process, Supervisor, stop_all
from shoal_client.local.start_time import ADVICE, StartTime, cpu_s
from shoal_proto.errors import InvalidSpec, Unavailable

LOG_TAIL_LINES = 20
COORDINATOR = "coordinator"
ANY_PORT = "127.0.0.1:0"


@dataclass(frozen=True, kw_only=True)
class LocalClusterConfig:
    """Settings of a cluster on this machine."""

    directory: Path
    """Directory for logs, etcd's data, certificates, snapshots and ready files; made if missing."""
    num_parameter_servers: int = DEFAULT_NUM_SERVERS
    first_parameter_server: int = 0
    """Number of the first server's id; machines of one cluster have different ones."""
    parameters: bool = True
    """False: coordinators serve no jobs that use parameter servers."""
    num_coordinators: int = 1
    etcd: str = ""
    """host:port,... of an existing etcd; empty: one is started."""
    etcd_member: EtcdAddresses | None = None
    """Member of the etcd at `etcd` to start on this machine, with the data of its last start. The
    other members are on other machines."""
    prefix: str = ""
    """Clusters that share an etcd have different prefixes of keys."""
    listen: str = "127.0.0.1:0"
    """host:port of the first coordinator; port 0: a free port. The others take free ports."""
    http: str = "127.0.0.1:0"
    """host:port of the first coordinator's page."""
    advertise: str = ""
    """Address by which other machines reach the cluster: its parts listen on all interfaces, with
    TLS. Empty: only this machine reaches it."""
    snapshot_roots: Sequence[str] = ()
    """URLs at and below which snapshots may be written. Snapshots without a URL go to `snapshots`
    in the directory; with `etcd_member` they are refused."""
    start_timeout_s: float = 60.0
    """Time for a part to come up without progress; with progress, ten minutes."""
    grace_s: float = 5.0
    """Time for the parts to end before they are killed."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Environment of coordinators and servers. Its variables for TLS are left out."""
    tls: LocalTls | None = None
    """None: plain text on loopback, unless `certificates` is set."""
    certificates: Path | None = None
    """Folder of `shoal certs init`, instead of `tls`, also for the page. etcd uses no TLS, except
    with `etcd_member`: then it uses the certificates in `etcd` in the folder."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Time limits of the coordinator, by option: {"--join-s": 600.0}."""
    restart: RestartPolicy | None = None
    """None: a part that ended is not started again."""

    def __post_init__(self) -> None:
        if self.num_parameter_servers < 0:
            raise InvalidSpec(
                "bad number of parameter servers",
                seen=str(self.num_parameter_servers),
                expected="0 or more",
            )
        if self.num_coordinators < 1:
            raise InvalidSpec(
                "bad number of coordinators",
                seen=str(self.num_coordinators),
                expected="1 or more",
            )
        if self.advertise and self.tls is None and self.certificates is None:
            raise InvalidSpec(
                "other machines would reach the cluster without TLS",
                seen=f"advertise={self.advertise!r} without certificates",
                expected="tls or certificates",
            )


@dataclass(frozen=True, kw_only=True)
class CoordinatorAddress:
    """Addresses of a coordinator of the cluster."""

    grpc: str
    """host:port on this machine."""
    advertised: str
    """host:port for other machines; the same without `advertise`."""
    http: str


class LocalCluster:
    """A local cluster, up inside its `with` block. `say` is called with lines for the user, on
    threads of the cluster.
    """

    etcd: str
    """host:port,... of etcd."""

    def __init__(
        self,
        config: LocalClusterConfig,
        *,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._config = config
        self._access = LocalAccess(
            config.environment,
            given=config.certificates,
            has_etcd=config.etcd_member is not None,
            made=config.directory / CERTIFICATES if config.tls is not None else None,
            http_tokens=config.tls.http_tokens if config.tls is not None else None,
            say=say,
        )
        self._supervisor = Supervisor(on_exit=self._exited, grace_s=config.grace_s)
        self._say = say
        self._interface = _interface(config.advertise)
        self._given_up = ""
        self._on_given_up: Callable[[str], None] = lambda reason: None
        self._coordinators: dict[str, CoordinatorAddress] = {}
        self._servers: dict[str, str] = {}
        self._keepers: dict[str, Keeper] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._etcd_serves = threading.Event()

    def __enter__(self) -> "LocalCluster":
        try:
            self._config.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidSpec(
                "the cluster's directory cannot be made",
                seen=f"{self._config.directory}: {error.strerror}",
                expected="a directory that this user may make, or one that exists",
            ) from error
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

    @property
    def failure_reason(self) -> str:
        """Reason why the cluster was given up, with the end of a log; empty while it is up."""
        return self._given_up

    def call_on_failure(self, call: Callable[[str], None]) -> None:
        """Call `call` with `failure_reason` once the cluster is given up: at once if it was, else
        on a thread of the cluster.
        """
        with self._lock:
            self._on_given_up, reason = call, self._given_up
        if reason:
            call(reason)

    def close(self) -> None:
        """Stop every part; etcd last, so that the others can release their leases."""
        with self._lock:
            self._closing = True
        for keeper in self._keepers.values():
            keeper.release()
        try:
            others = [each for each in self._supervisor.running if each.name != ETCD]
            stop_all(others, self._config.grace_s)
        finally:
            self._supervisor.close()
            self._etcd_serves.set()
            for keeper in self._keepers.values():
                keeper.join()
            self._access.close()

    @property
    def processes(self) -> Mapping[str, Process]:
        """The parts that run, by name: etcd, coordinator, ps-0, ps-1, ..."""
        return {process.name: process for process in self._supervisor.running}

    @property
    def certificates(self) -> Path | None:
        """The folder with a certificate for each role; None: the parts speak plain text."""
        return self._access.certificates

    @property
    def snapshots(self) -> Path:
        """Default folder of snapshots."""
        return (self._config.directory / "snapshots").resolve()

    @property
    def coordinator(self) -> str:
        """host:port of the first coordinator's gRPC service."""
        return self.coordinators[0].grpc

    @property
    def http_url(self) -> str:
        """Base URL of the first coordinator's HTTP service."""
        return self.coordinators[0].http

    @property
    def coordinators(self) -> Sequence[CoordinatorAddress]:
        """Addresses of each coordinator."""
        return list(self._coordinators.values())

    @property
    def parameter_servers(self) -> Sequence[str]:
        """host:port of each parameter server."""
        return list(self._servers.values())

    def _log_path(self, name: str) -> Path:
        directory = self._config.directory
        return (directory / ETCD if name == ETCD else directory) / f"{name}.log"

    def _start(self) -> None:
        self._access.make()
        own_etcd = self._start_etcd()
        self.etcd = self._config.etcd or (own_etcd.endpoint if own_etcd is not None else "")
        self._etcd_serves.set()
        # Start all at once: none of them needs another to come up.
        coordinators = self._spawn_coordinators()
        first = self._config.first_parameter_server
        numbers = range(first, first + self._config.num_parameter_servers)
        servers = {f"ps-{n}": self._start_server(f"ps-{n}", ANY_PORT) for n in numbers}
        for name, process in coordinators.items():
            ready = self._await_ready(process)
            self._coordinators[name] = CoordinatorAddress(
                grpc=_with_port(ANY_PORT, ready["grpc"])
                if self._config.advertise
                else ready["grpc"],
                advertised=ready["grpc"],
                http=ready["http"],
            )
        self._servers = {
            name: self._await_ready(server)["grpc"] for name, server in servers.items()
        }
        self._announce(() if own_etcd is None else (own_etcd.endpoint,))
        if own_etcd is not None:
            member = own_etcd.member
            self._keep(own_etcd.process, lambda failures: self._restart_etcd(member))
        for name, process in coordinators.items():
            self._keep(process, partial(self._restart_coordinator, name))
        for name, server in servers.items():
            self._keep(server, partial(self._restart_server, name))

    def _start_etcd(self) -> RunningEtcd | None:
        directory, options = self._config.directory / ETCD, self._access.etcd_options
        if self._config.etcd_member is not None:
            directory.mkdir(mode=0o700, exist_ok=True)
            member = plan_member(directory, ETCD, options, self._config.etcd_member)
            (etcd,) = start_members(self._spawn_command, [member])
        elif not self._config.etcd:
            (etcd,) = start_etcd(self._spawn_command, directory, options)
        else:
            return None
        return etcd

    def _announce(self, etcd: Sequence[str]) -> None:
        addresses = [each.grpc for each in self.coordinators]
        self._access.announce(addresses, [each.http for each in self.coordinators], etcd)

    def _spawn_coordinators(self) -> dict[str, Process]:
        names = [COORDINATOR]
        names += [f"{COORDINATOR}-{number}" for number in range(1, self._config.num_coordinators)]
        listen, http = self._config.listen, self._config.http
        first, *others = names
        return {
            first: self._spawn_coordinator(first, listen, http),
            **{name: self._spawn_coordinator(name, ANY_PORT, ANY_PORT) for name in others},
        }

    # --- restarts ---

    def _exited(self, process: Process) -> None:
        with self._lock:
            if process.name == ETCD and not self._closing:
                self._etcd_serves.clear()

    def _keep(self, process: Process, start: Callable[[int], Process]) -> None:
        if self._config.restart is not None:
            self._keepers[process.name] = Keeper(
                process, start, self._config.restart, say=self._say, give_up=self._give_up
            )

    def _give_up(self, name: str, reason: str) -> None:
        path = self._log_path(name)
        keep_logs_at_end(self._config.directory)
        message = f"{reason}. The end of its log, {path}:\n{last_lines(path)}"
        with self._lock:
            first, self._given_up = not self._given_up, self._given_up or message
            call = self._on_given_up
        if first:
            call(message)

    def _restart_etcd(self, member: EtcdMember) -> Process:
        (etcd,) = start_members(self._spawn_command, [member])
        self._etcd_serves.set()
        return etcd.process

    def _restart_coordinator(self, name: str, failures: int) -> Process:
        found, first = self._coordinators[name], name == COORDINATOR
        process = self._spawn_coordinator(
            name,
            _with_port(self._config.listen if first else ANY_PORT, found.grpc),
            _with_port(self._config.http if first else ANY_PORT, found.http),
        )
        self._await_restarted(process)
        return process

    def _restart_server(self, name: str, failures: int) -> Process:
        # From the second restart on use any port: another program may have taken this one.
        address = _with_port(ANY_PORT, self._servers[name]) if failures == 1 else ANY_PORT
        process = self._start_server(name, address)
        self._servers[name] = self._await_restarted(process)["grpc"]
        return process

    def _await_restarted(self, process: Process) -> Mapping[str, str]:
        try:
            return self._await_ready(process)
        except Unavailable:
            process.kill()
            process.wait()
            raise

    # --- starting ---

    def _spawn_coordinator(self, name: str, listen: str, http: str) -> Process:
        limits = (f"{option}={seconds:g}" for option, seconds in self._config.limits.items())
        return self._spawn(
            name,
            *("--listen", self._listen_address(listen), "--http", http),
            *(() if self._config.etcd_member else ("--snapshot-url", str(self.snapshots))),
            *(f"--snapshot-root={url}" for url in self._config.snapshot_roots),
            # The cluster ends as a whole: a coordinator need not wait for members that drain.
            "--drain-s=0",
            *self._advertise_arguments,
            *(() if self._config.parameters else ("--no-parameters",)),
            *self._access.coordinator_arguments,
            *limits,
        )

    def _start_server(self, name: str, listen: str) -> Process:
        arguments = ("--listen", self._listen_address(listen), "--id", name)
        return self._spawn(name, *arguments, *self._advertise_arguments)

    def _listen_address(self, listen: str) -> str:
        return _with_port(f"{self._interface}:0", listen) if self._interface else listen

    @property
    def _advertise_arguments(self) -> Sequence[str]:
        return ("--advertise", self._config.advertise) if self._config.advertise else ()

    def _spawn_command(self, command: ChildCommand) -> Process:
        with self._lock:
            if self._closing:
                raise Unavailable(f"{command.name} is not started", seen="a cluster that ends")
            return self._supervisor.spawn(command)

    def _spawn(self, name: str, *arguments: str) -> Process:
        # Some parts would exit at once without etcd.
        self._etcd_serves.wait()
        ready_path = self._ready_path(name)
        ready_path.unlink(missing_ok=True)
        program = "ps" if name.startswith("ps-") else COORDINATOR
        command = (
            # -P: the working directory may have modules with names of Python's own.
            *(sys.executable, "-P", "-m", "shoal_client", program),
            *("--etcd", self.etcd, "--ready-file", str(ready_path), *arguments),
            *self._access.etcd_arguments("" if self._config.etcd_member else self._config.etcd),
            *(("--prefix", self._config.prefix) if self._config.prefix else ()),
        )
        return self._spawn_command(
            ChildCommand(
                name=name,
                arguments=command,
                environment=self._access.environment,
                log_path=self._log_path(name),
            )
        )

    def _ready_path(self, name: str) -> Path:
        return self._config.directory / f"{name}.ready.json"

    def _await_ready(self, process: Process) -> Mapping[str, str]:
        path = self._ready_path(process.name)
        start = StartTime(self._config.start_timeout_s, process.started_s)
        while not path.exists():
            # The file sends no event.
            if process.wait(0.02) is not None:
                code = process.exit_code
                raise self._failure(process.name, f"exited with code {code}", exit_code=code)
            if why := start.why_over(time.monotonic(), cpu_s(process.pid)):
                raise self._failure(process.name, why, advice=f"{ADVICE} ")
        content: Mapping[str, str] = json.loads(path.read_text())
        return content

    def _failure(
        self, name: str, seen: str, *, exit_code: int | None = None, advice: str = ""
    ) -> Unavailable:
        path = self._log_path(name)
        return NotStarted(
            f"{name} of the local cluster did not come up",
            seen=seen,
            fix=f"{advice}The end of its log, {path}:\n{last_lines(path)}",
            exit_code=exit_code,
        )


def _interface(advertise: str) -> str:
    if not advertise:
        return ""
    return "[::]" if ":" in advertise else "0.0.0.0"


def _with_port(wanted: str, found: str) -> str:
    return f"{wanted.rpartition(':')[0]}:{found.rpartition(':')[2]}"


def last_lines(path: Path) -> str:
    """The last lines of a text file; empty if there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 200 * LOG_TAIL_LINES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:])
