"""The error that durable pushes get if the journal's disk fails."""

import errno
from pathlib import Path

from shoal_proto.errors import DiskFull, ShoalError, Unavailable

_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def disk_failure(directory: Path, error: Exception, *, fix: str = "") -> ShoalError:
    """Return DiskFull if the disk is full, else Unavailable. `fix`: the error's advice. The default
    advice says that durable pushes go on by themselves once the disk works again."""
    if _errno(error) in _DISK_FULL_ERRNOS:
        return DiskFull(
            "the disk of the journal is full",
            seen=str(error),
            expected=f"free space at {directory}",
            fix=fix
            or "Free space there: pushes are acknowledged as durable again within seconds, "
            "and nothing has to be restarted. Other pushes go on meanwhile.",
        )
    return Unavailable(
        "the journal cannot be written",
        seen=str(error),
        expected=f"a disk at {directory} that works",
        fix=fix
        or "Writing is tried again twice a second. Push with another level than durable meanwhile.",
    )


def _errno(error: BaseException | None) -> int | None:
    """Return the errno of this error, or of the OSError that caused it."""
    while error is not None:
        if isinstance(error, OSError):
            return error.errno
        error = error.__cause__
    return None
