"""`shoal logs`: shows workers' output, from their launchers or from files on this host."""

import os
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shoal_client.commands.address import StatusAddress
from shoal_client.commands.status import Json, StatusClient, duration, job_of_member
from shoal_client.local.worker_logs import log_path, log_root, older
from shoal_proto.errors import (
    AccessDenied,
    InvalidSpec,
    RetryError,
    ShoalError,
    Unavailable,
    UnknownJob,
    UnknownMember,
)
from shoal_proto.names import check_name
from shoal_proto.terminal import plain_lines

LOOK_EACH_S = 0.2
JOINED_EACH_S = 10.0
ASK_EACH_S = 0.5
NUM_LINES, NUM_LINES_EACH = 100, 10
ELSEWHERE = (AccessDenied, RetryError, UnknownJob, UnknownMember)
"""Errors after which this host's files may still have the output."""


@dataclass(frozen=True, kw_only=True)
class LogsConfig:
    """Shows the output of a job's workers, or of one worker, on whichever host they run. The
    workers' launchers provide the newest 1 MiB of each worker's output. The newest 8 to 16 MiB are
    in files on the worker's host; if the coordinator has no output, the files of this host are
    shown."""

    name: str = field(kw_only=False)
    """Name of the job, or id of a member."""
    member: str = field(default="", kw_only=False)
    """Show only the output of this member."""
    of_job: Annotated[str, Parameter(name="--job", metavar="NAME")] = ""
    """The member's job: `shoal logs MEMBER --job NAME` is `shoal logs NAME MEMBER`. Needed only if
    several jobs have a member of this name, or the member has left."""
    follow: Annotated[bool, Parameter(name=["-f", "--follow"], negative=())] = False
    """Keep showing new lines, until Ctrl-C or the end of the launchers."""
    number: Annotated[int | None, Parameter(name="-n", metavar="N")] = None
    """Number of newest lines to show first. By default 100 for one member, or 10 for each of
    several."""
    directory: Annotated[Path | None, Parameter(name="--log-dir", metavar="DIRECTORY")] = None
    """Read the files of a launcher's --log-dir on this host, and ask no coordinator."""
    address: Annotated[StatusAddress, Parameter(name="*")] = field(default_factory=StatusAddress)

    def __post_init__(self) -> None:
        if self.of_job and self.member:
            raise InvalidSpec(
                "two jobs are named",
                seen=f"{self.name} {self.member} --job {self.of_job}",
                expected="JOB MEMBER, or MEMBER --job NAME",
            )
        check_name(self.job, "job")
        if self.member_id:
            check_name(self.member_id, "member")
        if self.number is not None and self.number < 0:
            raise InvalidSpec("bad -n", seen=str(self.number), expected="0 or more")

    @property
    def needs_cluster(self) -> bool:
        """False if the command succeeds without the address of a cluster."""
        return self.directory is None

    @property
    def job(self) -> str:
        return self.of_job or self.name

    @property
    def member_id(self) -> str:
        """Id of the member; empty: all members."""
        return self.name if self.of_job else self.member


def logs(config: LogsConfig) -> int:
    """Print the lines. Raises UnknownMember without output, and InvalidSpec if `follow` is given
    for several files."""
    if config.directory is not None:
        return _from_files(config, config.directory)
    try:
        with StatusClient(config.address.urls()) as client:
            config = _with_job(client, config)
            return _from_coordinator(client, config)
    except ELSEWHERE as error:
        try:
            root = log_root(os.environ)
        except FileNotFoundError:  # a container without a writable folder, so without files
            raise error from None
        found = _files(config, root)
        if not found:
            raise
        _say(f"{error.what}; these are files of this host, perhaps of an earlier run:")
        for path in found:
            age = duration(time.time() - path.stat().st_mtime)
            _say(f"{path}, written {age} ago")
        return _from_files(config, root)


def _with_job(client: StatusClient, config: LogsConfig) -> LogsConfig:
    if config.of_job or config.member:
        return config
    try:
        client.job(config.name)
    except UnknownJob as error:
        return replace(config, of_job=job_of_member(client, config.name, error))
    return config


# --- output from launchers ---


def _from_coordinator(client: StatusClient, config: LogsConfig) -> int:
    members = [config.member_id] if config.member_id else _members(client, config.job)
    number = _number(config, members)
    positions: dict[str, str | None] = {}
    failure: ShoalError | None = None
    for member in members:
        try:
            lines, positions[member] = _newest(client, config.job, member, number)
        except (RetryError, UnknownMember) as error:
            if config.member_id:
                raise
            _say(error.what)
            failure = error
            if isinstance(error, RetryError):
                positions[member] = None  # its launcher may answer later
        else:
            _show(lines, member if len(members) > 1 else "")
    if failure is not None and not any(positions.values()):
        raise failure
    if config.follow:
        _follow(client, config, positions, prefixed=len(members) > 1)
    return 0


def _members(client: StatusClient, job: str) -> list[str]:
    detail = client.job(job)
    found = [str(each["member"]["member_id"]) for each in detail["members"]]
    if not found and detail["generations"]:
        found = [str(each["member_id"]) for each in detail["generations"][0]["members"]]
        _say(f"job {job} has no members now; these were the last: {', '.join(found)}")
    if not found:
        raise UnknownMember(
            f"job {job} has no members now, and none of its former members is known",
            expected="the id of a former member",
            fix=f"Name it: `shoal logs {job} MEMBER`, on the host where it ran.",
        )
    return found


def _newest(client: StatusClient, job: str, member: str, number: int) -> tuple[list[str], str]:
    page = client.output(job, member)
    if not page["is_live"]:
        _say(f"the launcher of {member} on {page['host']} has ended; it left these lines")
    lines, after = list(page["lines"]), str(page["after"])
    while len(lines) < number and page["before"] is not None:
        page = client.output(job, member, before=page["before"])
        lines = [*page["lines"], *lines]
    return lines[len(lines) - min(number, len(lines)) :], after


def _follow(
    client: StatusClient,
    config: LogsConfig,
    positions: dict[str, str | None],
    *,
    prefixed: bool,
) -> None:
    """Print new lines until all launchers have ended; without a member in `config`, also those of
    members that join later."""
    known: set[tuple[str, str]] = set()
    with suppress(RetryError, UnknownJob):
        # A member that is not followed yet joined meanwhile, or its launcher was not connected.
        known = {each for each in _processes(client, config.job) if each[0] in positions}
    ask_s = time.monotonic() + JOINED_EACH_S
    while True:
        time.sleep(ASK_EACH_S)
        for member, after in list(positions.items()):
            try:
                page = _output(client, config.job, member, after, known)
            except RetryError:
                continue  # a coordinator will lead again, or the launcher will answer
            if not page["is_live"] and not page["lines"]:
                _say(f"the launcher of {member} has ended")
                del positions[member]
                continue
            if page["has_gap"]:
                _say(f"lines of {member} are missing: it printed too fast, or its launcher is new")
            _show(page["lines"], member if prefixed else "")
            positions[member] = page["after"]
        if not config.member_id and (not positions or time.monotonic() >= ask_s):
            ask_s = time.monotonic() + JOINED_EACH_S
            try:
                present = _processes(client, config.job)
            except (RetryError, UnknownJob) as error:
                if not positions:
                    _say(f"all launchers have ended: {error}")
                    return
                continue
            for member, _ in sorted(present - known):
                if member not in positions:
                    _say(f"{member} has joined")
                    positions[member], prefixed = None, True
            known = present
        if not positions:
            return


def _output(
    client: StatusClient,
    job: str,
    member: str,
    after: str | None,
    known: Collection[tuple[str, str]],
) -> Json:
    """Return new output of a followed member; empty and not live once neither its launcher nor its
    process is there. Raises RetryError."""
    try:
        return client.output(job, member, after=after)
    except UnknownMember as error:
        try:
            is_member = any(each[0] == member for each in _processes(client, job) & set(known))
        except UnknownJob:
            is_member = False
        if is_member:
            raise Unavailable(f"{error.what} to the coordinator that leads now") from error
        return {"is_live": False, "lines": []}


def _processes(client: StatusClient, job: str) -> set[tuple[str, str]]:
    """Id and public id of each member: a member that is started again may keep its id."""
    members = [each["member"] for each in client.job(job)["members"]]
    return {(str(each["member_id"]), str(each["public_id"])) for each in members}


# --- in files of this host ---


def _from_files(config: LogsConfig, root: Path) -> int:
    found = _files(config, root)
    if not found:
        raise UnknownMember(
            f"no output of {_subject(config)} is kept on this host",
            seen=f"no file {log_path(root, config.job, config.member_id or '*')}",
            expected="the host of its launcher" + _where(config),
            fix="Run the command there, or without --log-dir.",
        )
    number = _number(config, found)
    if config.follow and len(found) > 1:
        raise InvalidSpec("files of several members cannot be followed", expected="one MEMBER")
    for path in found:
        newest: deque[str] = deque(maxlen=number)
        with path.open("rb") as file:
            inode, shown = os.fstat(file.fileno()).st_ino, file.read()
        before = older(path)
        # Read after the newer file: meanwhile the launcher may have renamed that one to `before`.
        if before.exists() and before.stat().st_ino != inode:
            newest.extend(plain_lines(before.read_bytes()))
        newest.extend(plain_lines(shown))
        _show(newest, path.stem if len(found) > 1 else "")
    if config.follow:
        for data in _followed(found[0], inode, len(shown)):
            _show(plain_lines(data), "")
    return 0


def _files(config: LogsConfig, root: Path) -> list[Path]:
    directory = log_path(root, config.job, "any").parent
    if config.member_id:
        names = [config.member_id]
    else:  # `glob` would take a folder that cannot be read for an empty one
        found = directory.iterdir() if directory.exists() else iter(())
        names = sorted(path.stem for path in found if path.suffix == ".log")
    return [path for name in names if (path := log_path(root, config.job, name)).exists()]


def _subject(config: LogsConfig) -> str:
    return (
        f"member {config.member_id} of job {config.job}"
        if config.member_id
        else f"job {config.job}"
    )


def _where(config: LogsConfig) -> str:
    try:
        with StatusClient(config.address.urls()) as client:
            host = client.member(config.job, config.member_id)["member"]["process"]["host"]
    except ShoalError:
        return ""
    return f", which is {host}"


def _followed(path: Path, inode: int, at: int) -> Iterator[bytes]:
    """Yield data appended to the file `inode` after its first `at` bytes, and to later files of the
    launcher."""
    while True:
        time.sleep(LOOK_EACH_S)
        try:
            found = path.stat()
        except FileNotFoundError:
            continue  # the launcher is about to create it again
        if found.st_ino != inode:
            rest = older(path)
            if rest.exists() and rest.stat().st_ino == inode and (left := _from(rest, at)):
                yield left
            at, inode = 0, found.st_ino
        if found.st_size > at:
            data = _from(path, at)
            at += len(data)
            yield data


def _from(path: Path, at: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read()


# --- both ---


def _number(config: LogsConfig, shown: Sequence[object]) -> int:
    if config.number is not None:
        return config.number
    return NUM_LINES if len(shown) == 1 else NUM_LINES_EACH


def _show(lines: Sequence[str], member: str) -> None:
    prefix = f"[{member}] " if member else ""
    for line in lines:
        print(f"{prefix}{line}")
    sys.stdout.flush()


def _say(text: str) -> None:
    print(f"shoal logs: {text}", file=sys.stderr, flush=True)
