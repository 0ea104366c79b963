"""Files with the newest output of workers, kept by their launcher: at most two for each worker."""

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

MAX_BYTES = 8 << 20
"""Size at which a file becomes the older of the two."""
KEPT_S = 7 * 86400.0
"""Time after the last line for which a file is kept."""


def log_root(environment: Mapping[str, str]) -> Path:
    """SHOAL_LOG_DIR, or a directory of this user in the system's directory for temporary files."""
    if given := environment.get("SHOAL_LOG_DIR"):
        return Path(given)
    return Path(tempfile.gettempdir()) / f"shoal-logs-{os.getuid()}"


def log_path(root: Path, job: str, member_id: str) -> Path:
    """The newer file of a member. Names have no slashes."""
    return root / job / f"{member_id}.log"


def older(path: Path) -> Path:
    """The older file that belongs to a newer one."""
    return path.with_suffix(".log.1")


def remove_old(root: Path, now_s: float) -> None:
    """Remove files to which no launcher has written for KEPT_S. Call it only for the directory that
    `log_root` chooses: another one is the user's. A file that a launcher has open stays."""
    with suppress(OSError):
        status = root.lstat()
        # Another user must not be able to put links to this user's files here.
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700:
            for path in [*root.glob("*/*.log")]:
                with suppress(OSError):
                    _remove_if_old(path, now_s)


def _remove_if_old(path: Path, now_s: float) -> None:
    # NFS locks only files that are open for writing.
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if now_s - os.fstat(file).st_mtime > KEPT_S:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            older(path).unlink(missing_ok=True)
            path.unlink()
            path.parent.rmdir()  # if it is empty
    finally:
        os.close(file)


class WorkerLog:
    """Appends lines of one worker, across its restarts. After an error of the disk (`problem`;
    empty: none) later lines are lost."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        self._file: int | None = None
        self._num_bytes = 0

    def write(self, line: str) -> None:
        """Append a line."""
        if self.problem:
            return
        data = f"{line}\n".encode(errors="replace")
        try:
            if self._file is None or self._num_bytes + len(data) > MAX_BYTES:
                self._open()
            assert self._file is not None
            self._num_bytes += os.write(self._file, data)
        except OSError as error:
            self.problem = f"{self.path}: {error.strerror or error}"

    def _open(self) -> None:
        self.close()
        for directory in (self.path.parent.parent, self.path.parent):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size + 1024 > MAX_BYTES:
            self.path.replace(older(self.path))
        # Never write through another user's link.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self.path, flags, 0o600)
        found = os.fstat(self._file)
        # Another user may have made the file, in order to read it.
        if found.st_uid != os.geteuid() or found.st_nlink != 1:
            self.close()
            raise PermissionError(errno.EPERM, "it belongs to another user, or has a second link")
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.fchmod(self._file, 0o600)
        self._num_bytes = found.st_size

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
