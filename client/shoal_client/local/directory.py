"""The temporary directory of a local cluster, a launcher or a demo. The next command removes what a
killed one left. After a failed start, logs are kept for a day.
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

PREFIXES = ("shoal-up-", "shoal-run-", "shoal-host-", "shoal-demo-")
"""Prefixes of the directories that are locked here, and removed if they are left over."""
KEPT_LOGS = "only-logs-are-kept"
"""An empty file of this name marks the directory of a failed start."""
SETTLED_S = 60.0
"""Age below which a directory may be new and not locked yet by its command."""
KEPT_S = 86400.0


@contextmanager
def temporary_directory(prefix: str) -> Iterator[Path]:
    """Make a directory, locked during the block and removed at its end. Logs are kept after
    Unavailable or a RefusedError, and after a call of `keep_logs`."""
    remove_left_over(Path(tempfile.gettempdir()), time.time())
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    lock = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield directory
    except (Unavailable, RefusedError):
        keep_logs(directory)
        raise
    finally:
        if not (directory / KEPT_LOGS).exists():
            shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def remove_left_over(parent: Path, now_s: float) -> None:
    """Remove this user's directories whose commands have ended; kept logs after KEPT_S."""
    for directory in (found for prefix in PREFIXES for found in parent.glob(f"{prefix}*")):
        with suppress(OSError):
            status = directory.lstat()
            keep_s = KEPT_S if (directory / KEPT_LOGS).exists() else SETTLED_S
            if status.st_uid == os.geteuid() and now_s - status.st_mtime > keep_s:
                _remove_unlocked(directory)


def _remove_unlocked(directory: Path) -> None:
    lock = os.open(directory, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)


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
