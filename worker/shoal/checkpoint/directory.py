"""Checkpoints in directories: complete or absent, as each is written first and then renamed.

    step-00000120                          a checkpoint
    .step-00000120.<token>.partial         being written or deleted, or a leftover of a writer that
                                           has died
    .step-00000120.<token>.replaced        a checkpoint while a new one of its step replaces it

A rename is atomic: while a checkpoint is replaced, a complete one always has the first or the third
name.
"""

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import structlog

from shoal_proto.errors import InvalidSpec

log = structlog.get_logger(__name__)

METADATA = ".metadata"
STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.(partial|replaced)")


_PASSING = {
    *(errno.EIO, errno.EREMOTEIO, errno.EBUSY, errno.EAGAIN, errno.EINTR, errno.ESTALE),
    *(errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED),
    *(errno.EPIPE, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
}


def may_pass(error: OSError) -> bool:
    """True if the same call may succeed later: the storage was away, slow or overloaded."""
    return isinstance(error, TimeoutError | ConnectionError) or error.errno in _PASSING


def name_of_step(step: int) -> str:
    """Return the name of a step's checkpoint; below step 10**8 names sort as steps do."""
    return f"step-{step:08d}"


def complete(directory: Path, *, skip_unreadable: bool = False) -> dict[int, Path]:
    """Return all complete checkpoints by step. Raises InvalidSpec if that fails, and OSError if it
    may succeed later; with `skip_unreadable`, a checkpoint that cannot be examined is left out,
    with a warning in the log."""
    checkpoints: dict[int, Path] = {}
    for name, kind, path in _temporary_directories(directory):
        matched = STEP.fullmatch(name)
        if matched and kind == "replaced":
            checkpoints[int(matched[1])] = path
    for path in _entries(directory):
        matched = STEP.fullmatch(path.name)
        try:
            if matched and _is_complete(path):
                checkpoints[int(matched[1])] = path
        except (InvalidSpec, OSError) as error:
            if not skip_unreadable:
                raise
            log.warning("checkpoint_not_examined", path=str(path), error=str(error))
    return checkpoints


def _is_complete(path: Path) -> bool:
    # Not is_file: on some errors it returns False, and a run would then use an older checkpoint.
    try:
        return stat.S_ISREG((path / METADATA).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if may_pass(error):
            raise
        raise InvalidSpec(
            f"the checkpoint {path} cannot be examined",
            seen=error.strerror or str(error),
            expected="a directory that this process can read",
            fix="Make it readable, or move it to another directory.",
        ) from error


def begin(path: Path) -> Path:
    """Create a directory for the future content of `path`. Raises InvalidSpec if `path` exists and
    is not a checkpoint, and OSError."""
    if path.exists() and not (path / METADATA).is_file():
        raise not_a_checkpoint(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _temporary_path(path, "partial")
    partial.mkdir()
    return partial


def not_a_checkpoint(path: object, seen: str = "") -> InvalidSpec:
    """Return the error for a path that a checkpoint must not replace."""
    return InvalidSpec(
        f"{path} exists already and is not a checkpoint",
        seen=seen,
        expected="a path that is free, or a checkpoint to replace",
        fix="Remove it, or write elsewhere.",
    )


def publish(partial: Path, path: Path) -> None:
    """Rename the complete `partial` to the checkpoint `path`, replacing an existing one.

    The caller must have synced the files. After an OSError `path` may hold the new checkpoint, or
    no checkpoint until `sweep` restores the replaced one.
    """
    synchronise(partial)
    replaced = _temporary_path(path, "replaced") if path.exists() else None
    if replaced:
        path.rename(replaced)
    partial.rename(path)
    # Durable before any rank is notified and the replaced checkpoint is deleted.
    synchronise(path.parent)
    if replaced:
        discard(replaced)


def discard(path: Path) -> None:
    """Delete a directory that may be a checkpoint; log a warning if that fails. It is renamed
    first, so that no reader sees half of it, and that no writer publishes it meanwhile."""
    matched = _TEMPORARY.fullmatch(path.name)
    partial = _temporary_path(path.with_name(matched[1]) if matched else path, "partial")
    try:
        path.rename(partial)
        shutil.rmtree(partial)
    except FileNotFoundError:
        log.debug("leftover_gone", path=str(path))
    except OSError as error:
        # The next `sweep` or `retire` tries again.
        log.warning("leftover_not_removed", path=str(path), error=str(error))


def sweep(path: Path, keep: Path) -> None:
    """Remove leftovers of dead writers of `path`, except `keep`.

    The caller must know that no other writer is alive. For the checkpoint of a step, removes
    leftovers of all steps. A replaced checkpoint without a successor is restored.
    """
    for name, kind, leftover in _temporary_directories(path.parent):
        ours = name == path.name or (STEP.fullmatch(name) and STEP.fullmatch(path.name))
        if not ours or leftover == keep:
            continue
        published = path.with_name(name)
        if kind == "replaced" and not published.exists():
            leftover.rename(published)
            continue
        log.info("leftover_removed", path=str(leftover))
        discard(leftover)


def synchronise(directory: Path) -> None:
    """Make the names in the directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary_path(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.{kind}")


def _temporary_directories(directory: Path) -> Iterator[tuple[str, str, Path]]:
    for path in _entries(directory):
        matched = _TEMPORARY.fullmatch(path.name)
        if matched:
            yield matched[1], matched[2], path


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        if may_pass(error):
            raise
        raise InvalidSpec(
            f"the directory {directory} for checkpoints cannot be listed",
            seen=error.strerror or str(error),
            expected="a directory, or a path at which one can be made",
        ) from error
