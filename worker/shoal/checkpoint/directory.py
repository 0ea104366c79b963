"""Directories that are complete checkpoints, or not there: made aside, then renamed.

    step-00000120                          a checkpoint
    .step-00000120.<token>.partial         being written, or left behind by a writer that died,
                                           or being deleted
    .step-00000120.<token>.replaced        a checkpoint that another of the same step replaces

A rename is atomic, so at each instant a checkpoint is whole under the first or the third name.
"""

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import structlog

from shoal_proto.errors import InvalidSpec

log = structlog.get_logger(__name__)

METADATA = ".metadata"
_STEP = re.compile(r"step-(\d{8,})")
_ASIDE = re.compile(r"\.(.+)\.[0-9a-f]{16}\.(partial|replaced)")


def path_of_step(directory: Path, step: int) -> Path:
    """Where the checkpoint after so many committed steps is; names sort as steps do."""
    return directory / f"step-{step:08d}"


def newest(directory: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint of the highest step; None if there is none, or no directory."""
    found = complete(Path(directory))
    return found[max(found)] if found else None


def complete(directory: Path) -> dict[int, Path]:
    """All complete checkpoints by step."""
    found: dict[int, Path] = {}
    for name, kind, path in _aside(directory):
        matched = _STEP.fullmatch(name)
        if matched and kind == "replaced":
            found[int(matched[1])] = path
    for path in _entries(directory):
        matched = _STEP.fullmatch(path.name)
        if matched and (path / METADATA).is_file():
            found[int(matched[1])] = path
    return found


def refuse_later(directory: Path, step: int) -> None:
    """Raise InvalidSpec if the directory has checkpoints of later steps.

    A run that has not gone on from the newest one would be mixed up with the one that wrote it.
    """
    last = max(complete(directory), default=step)
    if last > step:
        raise InvalidSpec(
            f"{directory} has checkpoints of a run that was further than this one",
            seen=f"step {last}",
            expected=f"none after step {step}",
            fix="Go on from the newest one, or write into another directory.",
        )


def begin(path: Path) -> Path:
    """A new directory in which to write what `path` will be.

    Raises InvalidSpec if something else than a checkpoint is at `path`, OSError as the system does.
    """
    if path.exists() and not (path / METADATA).is_file():
        raise InvalidSpec(
            f"{path} is there already and is no checkpoint",
            expected="a path that is free, or a checkpoint to replace",
            fix="Remove it, or write elsewhere.",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _name_aside(path, "partial")
    partial.mkdir()
    return partial


def publish(partial: Path, path: Path) -> None:
    """Let what was written become the checkpoint at `path`, in the place of one that is there."""
    synchronise(partial)
    replaced = _name_aside(path, "replaced") if path.exists() else None
    if replaced:
        path.rename(replaced)
    partial.rename(path)
    # Durable before anybody is told, and before what it replaces goes.
    synchronise(path.parent)
    if replaced:
        discard(replaced)


def discard(path: Path) -> None:
    """Delete a directory that may be a checkpoint: first it stops being one, as a whole."""
    matched = _ASIDE.fullmatch(path.name)
    partial = path
    if not matched or matched[2] != "partial":
        partial = _name_aside(path.with_name(matched[1]) if matched else path, "partial")
        path.rename(partial)
    try:
        shutil.rmtree(partial)
    except OSError as error:
        # It is no checkpoint any more, and the next `sweep` tries again.
        log.warning("leftover_stays", path=str(partial), error=str(error))


def sweep(path: Path, keep: Path) -> None:
    """Remove what dead writers of `path`, or of any step in its directory, left; all but `keep`.

    Only for who knows that no other writer is alive there.
    """
    for name, kind, leftover in _aside(path.parent):
        ours = name == path.name or (_STEP.fullmatch(name) and _STEP.fullmatch(path.name))
        if not ours or leftover == keep:
            continue
        published = path.with_name(name)
        if kind == "replaced" and not published.exists():
            leftover.rename(published)
            continue
        log.info("leftover_removed", path=str(leftover))
        discard(leftover)


def retire(directory: Path, step: int, keep: int) -> None:
    """Delete complete checkpoints, so that of this step's and those before it `keep` stay.

    Those of later steps are of another run and are not counted.
    """
    found = complete(directory)
    for old in sorted(own for own in found if own <= step)[:-keep]:
        log.info("checkpoint_retired", path=str(found[old]))
        discard(found[old])


def synchronise(directory: Path) -> None:
    """Return once the names in the directory would survive a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name_aside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.{kind}")


def _aside(directory: Path) -> Iterator[tuple[str, str, Path]]:
    """(name of the checkpoint, kind, path) of what is not published in the directory."""
    for path in _entries(directory):
        matched = _ASIDE.fullmatch(path.name)
        if matched:
            yield matched[1], matched[2], path


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InvalidSpec(
            f"the directory {directory} for checkpoints cannot be looked into",
            seen=error.strerror or str(error),
            expected="a directory, or a path at which one can be made",
        ) from error
