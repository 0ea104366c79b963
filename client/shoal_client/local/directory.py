"""The temporary directory of a local cluster, a launcher or a demo. If a command is killed, the
next command removes its directory. After a failure, logs are kept for a day.
"""

import fcntl
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shoal_proto.errors import InvalidSpec, RefusedError, Unavailable

TEMPORARY = "removed-once-unlocked"
"""An empty file of this name, followed by the id of the machine's boot, marks a temporary directory
of this machine: on a shared file system, other machines do not see its lock."""
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
    # Mark it once it is locked: a marked directory without a lock is removed by other commands.
    _mark(directory).touch(0o600)
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


@contextmanager
def given_directory(directory: Path) -> Iterator[Path]:
    """A directory that the user has named, locked during the block. If it was a killed command's
    temporary directory, it is not removed any more. Raises InvalidSpec if it is in use."""
    with ExitStack() as stack:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The user may name it by a symbolic link.
            stack.enter_context(locked(directory.resolve()))
        except BlockingIOError as error:
            raise InvalidSpec(
                "another `shoal up` uses the directory",
                seen=str(directory),
                expected="a directory for each cluster",
            ) from error
        except OSError:
            pass  # the cluster refuses the directory
        with suppress(OSError):
            for mark in (*directory.glob(f"{TEMPORARY}-*"), directory / KEPT_LOGS):
                mark.unlink(missing_ok=True)
        yield directory


def remove_left_over(parent: Path, now_s: float) -> None:
    """Remove this user's temporary directories whose commands have ended on this machine since its
    boot; kept logs after KEPT_S."""
    # Found by their marks: a directory that the user has named may have such a name, too.
    for mark in parent.glob(f"shoal-*/{_mark(parent).name}"):
        with suppress(OSError), locked(mark.parent) as directory:
            if (directory / KEPT_LOGS).exists():
                keep_logs(directory)
            else:
                _remove(directory)
    for mark in parent.glob(f"shoal-*/{KEPT_LOGS}"):
        with suppress(OSError), locked(mark.parent) as directory:
            is_old = now_s - directory.stat().st_mtime > KEPT_S
            if is_old and not any(directory.glob(f"{TEMPORARY}-*")):
                _remove(directory)


@contextmanager
def locked(directory: Path) -> Iterator[Path]:
    """Lock a directory of this user's. Raises OSError if it is another user's, or locked."""
    lock = os.open(directory, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(lock).st_uid != os.geteuid():
            raise PermissionError(f"{directory} is another user's")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield directory
    finally:
        os.close(lock)


def _mark(directory: Path) -> Path:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # a sandbox without it
        boot = platform.node()
    return directory / f"{TEMPORARY}-{boot}"


def _remove(directory: Path) -> None:
    # Folders first: while there is a mark, the next command completes a removal that was killed.
    for folder in directory.glob("*"):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


def keep_logs_at_end(directory: Path) -> None:
    """Have `temporary_directory` keep logs at its end; nothing changes in another directory."""
    with suppress(OSError):  # the disk may be full
        if _mark(directory).exists():
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
