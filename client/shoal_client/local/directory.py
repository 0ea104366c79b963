"""The temporary directory of a local cluster, a launcher or a demo. The next command removes what a
killed one left. After a failure, logs are kept for a day.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal_proto.errors import RefusedError, Unavailable

TEMPORARY = "removed-once-unlocked"
"""An empty file of this name marks a directory that was made here."""
KEPT_LOGS = "only-logs-are-kept"
"""An empty file of this name marks the directory of a command that has failed."""
KEPT_S = 86400.0


@contextmanager
def temporary_directory(prefix: str) -> Iterator[Path]:
    """Make a directory, locked during the block and removed at its end. Logs are kept after
    Unavailable or a RefusedError, and after a call of `keep_logs_at_end` or `keep_logs`."""
    remove_left_over(Path(tempfile.gettempdir()), time.time())
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    lock = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (directory / TEMPORARY).touch(0o600)  # once locked: without a lock, its command has ended
    try:
        yield directory
    except (Unavailable, RefusedError):
        keep_logs_at_end(directory)
        raise
    finally:
        if (directory / KEPT_LOGS).exists():
            keep_logs(directory)
        else:
            _remove(directory)
        os.close(lock)


def given_directory(directory: Path) -> Path:
    """Return a directory that the user has named. One that a killed command left is not temporary
    any more."""
    for mark in (TEMPORARY, KEPT_LOGS):
        with suppress(OSError):  # there is no mark, or the cluster refuses the directory
            (directory / mark).unlink()
    return directory


def remove_left_over(parent: Path, now_s: float) -> None:
    """Remove this user's temporary directories whose commands have ended; kept logs after
    KEPT_S."""
    # By their marks: a directory that the user has named may have a name like theirs.
    for mark, keep_s in ((TEMPORARY, 0.0), (KEPT_LOGS, KEPT_S)):
        for directory in (found.parent for found in parent.glob(f"shoal-*/{mark}")):
            with suppress(OSError):
                status = directory.lstat()
                if status.st_uid == os.geteuid() and now_s - status.st_mtime > keep_s:
                    _remove_unlocked(directory)


def _remove_unlocked(directory: Path) -> None:
    lock = os.open(directory, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(directory)
    finally:
        os.close(lock)


def _remove(directory: Path) -> None:
    # Folders first: while there is a mark, the next command completes a removal that was killed.
    for folder in directory.glob("*"):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


def keep_logs_at_end(directory: Path) -> None:
    """Have `temporary_directory` keep logs at its end; nothing changes in another directory."""
    with suppress(OSError):  # the disk may be full
        if (directory / TEMPORARY).exists():
            (directory / KEPT_LOGS).touch()


def keep_logs(directory: Path) -> None:
    """Remove all but logs."""
    logs = [path for path in directory.rglob("*.log") if path.is_file()]
    if not logs:
        shutil.rmtree(directory, ignore_errors=True)
        return
    (directory / KEPT_LOGS).touch()
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            path = Path(folder) / name
            if path.suffix != ".log" and path.name != KEPT_LOGS:
                path.unlink(missing_ok=True)
        with suppress(OSError):
            Path(folder).rmdir()  # only if nothing is left in it
