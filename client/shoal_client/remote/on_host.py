"""The part of `shoal up --hosts` and `shoal down` on each host, started over ssh.

    python -m shoal_client.remote.on_host               # one order on stdin, one answer on stdout
    python -m shoal_client.remote.on_host serve PATH    # the parts of this host, until SIGTERM

An order is a line of JSON on stdin: it may contain private keys, which other users of the host
could read on a command line. `serve` outlives the connection. It holds a lock on the host's
directory, which shows that the parts run. systemd-tmpfiles does not clear a locked directory.
"""

import fcntl
import json
import os
import queue
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import FrameType

from shoal_client.host.stop_orders import next_of
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig, last_lines
from shoal_client.local.directory import keep_logs
from shoal_client.local.etcd import EtcdAddresses
from shoal_client.local.keeper import RestartPolicy
from shoal_client.remote.ssh import MARK, connection_addresses
from shoal_proto.errors import InvalidSpec, ShoalError, Unavailable

LOOK = "look"
START = "start"
STOP = "stop"
PLAN = "plan.json"
READY = "ready.json"
PID = "pid"
LOG = "host.log"
CERTIFICATES = "certs"
STOPPED_S = 20.0
KILLED_S = 10.0
LOOK_EVERY_S = 0.05


@dataclass(frozen=True, kw_only=True)
class HostPorts:
    """Ports of a host's parts; parameter servers take any free ones."""

    coordinator: int
    page: int
    etcd: int
    peer: int


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """Parts of one host of a control plane."""

    address: str
    """Address for the other hosts and for workers."""
    ports: Mapping[str, int]
    """`HostPorts`."""
    etcd: Sequence[str]
    """host:port for clients, this host's member first."""
    member: Mapping[str, object]
    """`EtcdAddresses` of this host's member."""
    num_parameter_servers: int
    first_parameter_server: int
    snapshot_roots: Sequence[str]
    prefix: str
    limits: Mapping[str, float]
    verbose: bool


@dataclass(frozen=True, kw_only=True)
class HostOrder:
    """Order to a host, and the directory of the host's files."""

    action: str
    """LOOK, START the parts of `plan`, or STOP them."""
    name: str
    """Name of the host, for its directory."""
    directory: str = ""
    """The same on every host; empty: the usual one."""
    base_port: int = 0
    """LOOK: first of the ports to use; 0: any free ones."""
    plan: Mapping[str, object] = field(default_factory=dict)
    """`HostPlan`. STOP: end the parts only if they are those of this plan; empty: in any case."""
    files: Mapping[str, str] = field(default_factory=dict)
    """START: the certificates' files, by path in their folder."""


@dataclass(frozen=True, kw_only=True)
class HostAnswer:
    """Answer of a host that has carried out an order."""

    version: str
    runs: bool
    """True if parts of a control plane ran before the order."""
    directory: str
    has_data: bool = False
    """True if the directory has data of a control plane, running or not."""
    address: str = ""
    """Address at which ssh has reached this host; empty without ssh."""
    client: str = ""
    """Address from which ssh has connected."""
    ports: Mapping[str, int] = field(default_factory=dict)
    """LOOK: `HostPorts` to use."""


def main(arguments: Sequence[str]) -> int:
    """Carry out the order on stdin; return 1, with the reason on stdout, if it fails."""
    if arguments[:1] == ["serve"]:
        return serve(Path(arguments[1]))
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
    order = HostOrder(**json.loads(sys.stdin.readline()))
    directory = host_directory(order)
    try:
        runs = directory.is_dir() and _is_locked(directory)
        has_data = (directory / PLAN).exists()
        ports = {}
        is_others = order.action == STOP and order.plan and _plan_in(directory) != order.plan
        if order.action == START:
            start(directory, order)
        elif is_others:
            runs = False
        elif order.action == STOP:
            stop(directory)
        elif not runs:
            ports = asdict(_ports(order.base_port))
    except (ShoalError, OSError) as error:
        print(error, flush=True)
        return 1
    client, address = connection_addresses()
    answer = HostAnswer(
        version=version("shoal"),
        runs=runs,
        directory=str(directory),
        has_data=has_data,
        address=address,
        client=client,
        ports=ports,
    )
    print(MARK + json.dumps(asdict(answer)), flush=True)
    return 0


def usual_directory() -> Path:
    """Return a directory on a disk, as etcd needs, that a reboot keeps."""
    return Path("/var/tmp") / f"shoal-hosts-{os.geteuid()}"


def host_directory(order: HostOrder) -> Path:
    """Return the directory of this host's parts: hosts that share a disk have different ones."""
    root = Path(order.directory) if order.directory else usual_directory()
    return root / "hosts" / order.name.rpartition("@")[2].replace(":", "_")


# --- orders ---


def start(directory: Path, order: HostOrder) -> None:
    """Start the parts; return once they serve. Raises InvalidSpec if parts run already, and
    Unavailable, with the end of a log, if they do not come up: then none is left."""
    for path in (*reversed(directory.parents[:2]), directory):
        _make_private(path)
    lock = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidSpec(
                "parts of a control plane run already",
                seen=str(directory),
                expected="none",
                fix="`shoal down` ends them.",
            ) from None
        _remove_all_in(directory)
        # The plan first: by it, STOP knows whose files these are.
        for name, text in {PLAN: json.dumps(order.plan), **order.files}.items():
            path = directory / CERTIFICATES / name if name in order.files else directory / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
        with (directory / LOG).open("ab") as log:
            serving = subprocess.Popen(
                # The child inherits the lock's descriptor, so the lock is held all the time.
                [sys.executable, "-P", "-m", __spec__.name, "serve", str(directory)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[lock],
                start_new_session=True,
                cwd="/",
            )
        (directory / PID).write_text(str(serving.pid))
    finally:
        os.close(lock)
    while not (directory / READY).exists():
        with suppress(subprocess.TimeoutExpired):
            code = serving.wait(LOOK_EVERY_S)
            reason = last_lines(directory / LOG)
            keep_logs(directory)
            raise Unavailable(
                "the parts of the host did not come up",
                seen=f"exit code {code}",
                fix=f"Logs are in {directory} on the host. The end of {LOG}:\n{reason}",
            )


def stop(directory: Path) -> None:
    """End the parts of the host, and remove their files but logs. Raises Unavailable if they do not
    end."""
    if not directory.is_dir():
        return
    for number, within_s in ((signal.SIGTERM, STOPPED_S), (signal.SIGKILL, KILLED_S)):
        if not _is_locked(directory):
            break
        with suppress(ProcessLookupError, FileNotFoundError, ValueError):
            os.kill(int((directory / PID).read_text()), number)
        end_s = time.monotonic() + within_s
        while _is_locked(directory) and time.monotonic() < end_s:
            # Nothing reports the end of a process that is not a child.
            time.sleep(LOOK_EVERY_S)
    else:
        if _is_locked(directory):
            raise Unavailable("the parts of the host do not end", seen=str(directory))
    keep_logs(directory)


def _plan_in(directory: Path) -> object:
    with suppress(FileNotFoundError, ValueError):
        return json.loads((directory / PLAN).read_text())
    return None


def _ports(base: int) -> HostPorts:
    with ExitStack() as stack:
        found = []
        for number in range(4):
            probe = stack.enter_context(socket.socket())
            if base:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", base + number if base else 0))
            except OSError as error:
                raise InvalidSpec(
                    "a port is taken",
                    seen=f"{base + number}: {error.strerror}",
                    expected=f"the ports {base} to {base + 3} free on every host",
                    fix="Give another --port, or leave it out.",
                ) from error
            found.append(probe.getsockname()[1])
    return HostPorts(coordinator=found[0], page=found[1], etcd=found[2], peer=found[3])


def _make_private(path: Path) -> None:
    """Raises InvalidSpec if others can write to the directory: they could replace its contents."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    mine = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode) or not mine:
        raise InvalidSpec(
            "other users can write to the control plane's directory",
            seen=f"{path} with mode {stat.S_IMODE(found.st_mode):o}",
            expected="a directory of this user, to which only this user writes",
            fix="Give another --dir.",
        )


def _is_locked(directory: Path) -> bool:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _remove_all_in(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


# --- the process that stays ---


def serve(directory: Path) -> int:
    """Run the parts of the plan until SIGTERM; return 1 if they do not stay up."""
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    plan = HostPlan(**json.loads((directory / PLAN).read_text()))
    try:
        with LocalCluster(_config(directory, plan), say=_say) as cluster:
            cluster.call_on_failure(ended.put)
            with tempfile.NamedTemporaryFile("w", dir=directory, delete=False) as file:
                json.dump([each.advertised for each in cluster.coordinators], file)
            Path(file.name).rename(directory / READY)
            _say(next_of(ended))
            return 1
    except ShoalError as error:
        _say(str(error))
        return 1


def _config(directory: Path, plan: HostPlan) -> LocalClusterConfig:
    ports = HostPorts(**plan.ports)
    host = f"[{plan.address}]" if ":" in plan.address else plan.address
    environment = {**os.environ, **({"SHOAL_LOG_LEVEL": "DEBUG"} if plan.verbose else {})}
    return LocalClusterConfig(
        directory=directory,
        num_parameter_servers=plan.num_parameter_servers,
        first_parameter_server=plan.first_parameter_server,
        etcd=",".join(plan.etcd),
        etcd_member=EtcdAddresses(**plan.member),  # type: ignore[arg-type]
        prefix=plan.prefix,
        listen=f"{host}:{ports.coordinator}",
        http=f"{host}:{ports.page}",
        advertise=plan.address,
        snapshot_roots=plan.snapshot_roots,
        environment=environment,
        certificates=directory / CERTIFICATES,
        limits=plan.limits,
        restart=RestartPolicy(),
    )


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
