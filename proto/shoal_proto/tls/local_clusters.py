"""Records of the clusters that this user runs on this machine, by which they and their certificates
are found.

Each cluster has a file in a private folder, locked while the cluster is up. The folder is below
/tmp if possible: job schedulers and test runners set TMPDIR anew for every process.
"""

import fcntl
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from shoal_proto.errors import InvalidSpec

log = structlog.get_logger(__name__)

PARENT = Path("/tmp")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class LocalClusterRecord:
    addresses: Sequence[str]
    """host:port of its coordinators and of their pages."""
    pages: Sequence[str] = ()
    """host:port of the pages only."""
    etcd: Sequence[str] = ()
    certificates: Path | None
    """Folder with a certificate for each role; None: the cluster does not use TLS."""


class Announcement:
    """Announces a cluster to this user's other processes, until `close` or the end of this
    process."""

    def __init__(self, record: LocalClusterRecord) -> None:
        """Raises InvalidSpec if there is no private folder, OSError if the file cannot be
        written."""
        directory = _made_folder()
        _remove_left_over(directory)
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.path = directory / f"{name}.json"
        part = directory / f"{name}.part"
        self._file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # Locked before it has its name, so that other processes never find it unlocked.
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.write(self._file, json.dumps(_as_json(record)).encode())
        part.rename(self.path)

    def touch(self) -> None:
        """Keep programs that clear old temporary files from deleting the file."""
        os.utime(self._file)

    def close(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)


def find(addresses: Iterable[str]) -> LocalClusterRecord | None:
    """Return the user's cluster at one of these addresses, each HOST:PORT or a URL; None if there
    is none. Only loopback addresses can match."""
    wanted = {found for each in addresses if (found := _local(each))}
    if not wanted:
        return None
    return next((each for each in _running() if wanted & {*each.addresses, *each.etcd}), None)


def running() -> Sequence[LocalClusterRecord]:
    """Return this user's clusters that are up in this process's network namespace."""
    return tuple(_running())


def _running() -> Iterator[LocalClusterRecord]:
    private = [directory for directory in _folders() if _is_private(directory)]
    for path in [path for directory in private for path in sorted(directory.glob("*.json"))]:
        try:
            with path.open("rb") as file:
                if not _is_locked(file.fileno()):
                    continue
                content = json.loads(file.read(MAX_BYTES))
            found = LocalClusterRecord(
                addresses=content["addresses"],
                pages=content.get("pages", ()),
                etcd=content["etcd"],
                certificates=Path(folder) if (folder := content["certificates"]) else None,
            )
            network = content["network"]
        except FileNotFoundError:
            continue  # it has ended
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("local_cluster_not_read", path=str(path), reason=repr(error))
            continue
        # In another network namespace, the same loopback address is another cluster's.
        if network == _network():
            yield found


def _as_json(record: LocalClusterRecord) -> Mapping[str, object]:
    return {
        "addresses": [_local(each) or each for each in record.addresses],
        "pages": [_local(each) or each for each in record.pages],
        "etcd": [_local(each) or each for each in record.etcd],
        "certificates": str(record.certificates.resolve()) if record.certificates else None,
        "network": _network(),
    }


def _remove_left_over(directory: Path) -> None:
    for path in directory.glob("*.json"):
        with suppress(FileNotFoundError), path.open("rb") as file:
            if not _is_locked(file.fileno()):
                path.unlink()


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _folders() -> Sequence[Path]:
    parents = {PARENT: None}
    with suppress(FileNotFoundError):  # a container with a read-only root has no such directory
        parents[Path(tempfile.gettempdir())] = None
    return [parent / f"shoal-clusters-{os.geteuid()}" for parent in parents]


def _made_folder() -> Path:
    seen = []
    for directory in _folders():
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            seen.append(str(error))
            continue
        if _is_private(directory):
            return directory
        seen.append(f"{directory} is not private")
    raise InvalidSpec(
        "this user has no folder for its local clusters",
        seen="; ".join(seen),
        expected="a folder of this user, with mode 700",
        fix="Remove that path, or set TMPDIR to a directory of your own, also for the commands that"
        " use the cluster.",
    )


def _is_private(directory: Path) -> bool:
    try:
        found = directory.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.geteuid()
        and not stat.S_IMODE(found.st_mode) & 0o077
    )


def _network() -> int:
    try:
        return os.stat("/proc/self/ns/net").st_ino  # noqa: PTH116 - what a link of /proc leads to
    except OSError:
        return 0


def _local(address: str) -> str:
    """Bring a loopback address into one form; empty for other addresses."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return ""
    if host not in _LOOPBACK or port is None:
        return ""
    return f"127.0.0.1:{port}" if host != "::1" else f"[::1]:{port}"
