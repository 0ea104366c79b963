"""`shoal logs`: what a worker printed, on the host where its launcher keeps it."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shoal_client.commands.address import StatusAddress
from shoal_client.commands.status import StatusClient
from shoal_client.local.worker_logs import log_path, log_root, older
from shoal_proto.errors import InvalidSpec, ShoalError, UnknownMember
from shoal_proto.names import check_name

LOOK_EACH_S = 0.2


@dataclass(frozen=True, kw_only=True)
class LogsConfig:
    """Shows what a worker printed. The launcher keeps the newest 8 to 16 MiB of each worker's
    output on its own host, so run this command there."""

    member: str = field(kw_only=False)
    """Id of the member."""
    job: Annotated[str, Parameter(metavar="NAME")]
    """The member's job."""
    follow: Annotated[bool, Parameter(name=["-f", "--follow"], negative=())] = False
    """Keep showing new lines, until Ctrl-C."""
    number: Annotated[int, Parameter(name="-n", metavar="N")] = 100
    """Number of newest lines to show first."""
    directory: Annotated[
        Path | None, Parameter(name="--log-dir", metavar="DIRECTORY", env_var="SHOAL_LOG_DIR")
    ] = None
    """The launcher's --log-dir. By default the launcher's default."""
    address: Annotated[StatusAddress, Parameter(name="*")] = field(default_factory=StatusAddress)

    def __post_init__(self) -> None:
        check_name(self.member, "member")
        check_name(self.job, "job")
        if self.number < 0:
            raise InvalidSpec("bad -n", seen=str(self.number), expected="0 or more")


def logs(config: LogsConfig) -> int:
    """Print the lines. Raises UnknownMember where none are kept here."""
    path = log_path(config.directory or log_root(os.environ), config.job, config.member)
    if not path.exists():
        raise UnknownMember(
            f"nothing of member {config.member} of job {config.job} is kept on this host",
            seen=f"no file {path}",
            expected="the host of its launcher" + _where(config),
            fix="Run the command there.",
        )
    newest: deque[str] = deque(maxlen=config.number)
    for each in (older(path), path):
        if each.exists():
            newest.extend(each.read_text(errors="replace").splitlines())
    for line in newest:
        print(line)
    if config.follow:
        for text in _followed(path):
            print(text, end="", flush=True)
    return 0


def _where(config: LogsConfig) -> str:
    """Which that is, where the coordinator knows."""
    try:
        with StatusClient(config.address.urls()) as client:
            host = client.member(config.job, config.member)["member"]["process"]["host"]
    except ShoalError:
        return ""
    return f", which is {host}"


def _followed(path: Path, pause: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """What is appended from now on, also once the file has become the older one."""
    at, inode = path.stat().st_size, path.stat().st_ino
    while True:
        pause(LOOK_EACH_S)
        try:
            found = path.stat()
        except FileNotFoundError:
            continue  # it is about to be made anew
        if found.st_ino != inode:
            rest = older(path)
            if rest.exists() and rest.stat().st_ino == inode:
                yield _from(rest, at).decode(errors="replace")
            at, inode = 0, found.st_ino
        if found.st_size > at:
            data = _from(path, at)
            at += len(data)
            yield data.decode(errors="replace")


def _from(path: Path, at: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read()
