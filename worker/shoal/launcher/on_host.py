"""The part of `shoal run --hosts` on each host: an ordinary `shoal run`, started over ssh.

    python -m shoal.launcher.on_host DIRECTORY WORKERS [SCRIPT]

The process prints a `HostGreeting`, or ends with a reason. Then it reads the `LaunchOrder`, a line
with keys and environment, from stdin: on a command line, other users of the host would see them.
During the run the keys are in a folder that only the user can read. Each further line acts as a
Ctrl-C, and the end of the connection as a SIGTERM.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from io import FileIO
from pathlib import Path
from types import FrameType

from shoal.launcher.hosts import num_workers_of
from shoal.launcher.output import discard
from shoal_client.cli import main as run_command
from shoal_client.local.access import CERTIFICATES
from shoal_client.local.directory import temporary_directory
from shoal_client.remote.ssh import MARK, connection_addresses
from shoal_proto.tls.identity import FOLDER_VARIABLE

MAX_ORDER_BYTES = 1 << 24
BAD_ARGUMENTS = 2


@dataclass(frozen=True, kw_only=True)
class HostGreeting:
    """First line of a host that can be used."""

    version: str
    num_workers: int
    seen_address: str
    """The ssh client's address; empty without ssh."""


@dataclass(frozen=True, kw_only=True)
class LaunchOrder:
    """Order to a host to run workers."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    files: Mapping[str, str]
    """Contents of certificate files by name; empty: no TLS."""


@dataclass(frozen=True, kw_only=True)
class HostEnding:
    """Last line of a host whose run has ended."""

    exit_code: int


def main(arguments: Sequence[str]) -> int:
    """Run the host's workers as ordered on stdin.

    Returns the exit code of `shoal run`, 2 if the host cannot be used, or 0 if no order arrives.
    """
    # Use one stream, so that lines stay in order.
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
    directory, workers, *script = arguments
    if problem := _problem(directory, script):
        print(problem, flush=True)
        return BAD_ARGUMENTS
    os.chdir(directory)
    count = int(num_workers_of(workers))
    if count < 1:
        print(f"no workers; saw {workers}: {count}; expected at least 1", flush=True)
        return BAD_ARGUMENTS
    _send(
        HostGreeting(
            version=version("shoal"),
            num_workers=count,
            seen_address=connection_addresses()[0],
        )
    )
    # With sys.stdin, Python cannot end while a thread reads.
    orders = FileIO(sys.stdin.fileno(), closefd=False)
    line = orders.readline(MAX_ORDER_BYTES)
    if not line.endswith(b"\n"):
        return 0  # this host is left out, or the other end has ended
    order = LaunchOrder(**json.loads(line))
    os.environ.update(order.environment)
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_relay, args=(orders,), name="shoal-orders", daemon=True).start()
    with temporary_directory("shoal-run-") as temporary:
        if order.files:
            folder = temporary / CERTIFICATES
            _write(folder, order.files)
            os.environ[FOLDER_VARIABLE] = str(folder)
        code = run_command(order.arguments)
    _send(HostEnding(exit_code=code))
    return code


def _problem(directory: str, script: Sequence[str]) -> str:
    if not Path(directory).is_dir():
        return f"no such directory: {directory}"
    missing = [each for each in script if not Path(directory, each).is_file()]
    return f"no such script: {missing[0]} in {directory}" if missing else ""


def _write(folder: Path, files: Mapping[str, str]) -> None:
    folder.mkdir(mode=0o700)
    for name, text in files.items():
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _relay(orders: FileIO) -> None:
    """Turn each line into a SIGINT, and the connection's end into a SIGTERM."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    while orders.readline(MAX_ORDER_BYTES):
        signal.pthread_kill(main_thread, signal.SIGINT)
    # Without a reader, workers must still be able to print.
    for stream in (sys.stdout, sys.stderr):
        discard(stream)
    signal.pthread_kill(main_thread, signal.SIGTERM)


def _send(message: HostGreeting | HostEnding) -> None:
    print(MARK + json.dumps(asdict(message)), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
