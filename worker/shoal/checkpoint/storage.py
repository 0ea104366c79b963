"""Storage of checkpoints in a directory or a bucket."""

from collections.abc import Mapping

import structlog

from shoal.checkpoint import bucket, directory
from shoal.checkpoint.bucket_paths import BucketPath, CheckpointPath
from shoal.checkpoint.drafts import Draft, LocalDraft
from shoal_proto.errors import InvalidSpec

log = structlog.get_logger(__name__)


def complete(
    location: CheckpointPath, *, skip_unreadable: bool = False
) -> Mapping[int, CheckpointPath]:
    """Return complete checkpoints by step. Raises InvalidSpec if that fails, and OSError if it may
    succeed later. `skip_unreadable`, only for a directory: leave out checkpoints that cannot be
    examined."""
    if isinstance(location, BucketPath):
        return bucket.complete(location)
    return directory.complete(location, skip_unreadable=skip_unreadable)


def newest(location: CheckpointPath) -> CheckpointPath | None:
    """Return the complete checkpoint of the highest step, if there is any. Raises what `complete`
    raises."""
    checkpoints = complete(location)
    return checkpoints[max(checkpoints)] if checkpoints else None


def path_of_step(location: CheckpointPath, step: int) -> CheckpointPath:
    """Return the path of a step's checkpoint."""
    return location / directory.name_of_step(step)


def draft_of(path: CheckpointPath) -> Draft:
    """Return a draft of the checkpoint at a path."""
    return bucket.BucketDraft(path) if isinstance(path, BucketPath) else LocalDraft(path)


def check(location: CheckpointPath) -> None:
    """Raise InvalidSpec for a bucket that cannot store checkpoints, and OSError if a later check
    may succeed."""
    if isinstance(location, BucketPath):
        location.probe()


def refuse_later(location: CheckpointPath, step: int) -> None:
    """Raise InvalidSpec if there are checkpoints of later steps, which belong to another run."""
    last = max(complete(location), default=step)
    if last > step:
        raise InvalidSpec(
            f"{location} has checkpoints of a run that had taken more steps than this one",
            seen=f"step {last}",
            expected=f"none after step {step}",
            fix="Continue from the newest one, or write to another directory.",
        )


def retire(location: CheckpointPath, step: int, keep: int) -> None:
    """Delete complete checkpoints of this step and earlier ones, except the newest `keep`, and log
    a warning for each that cannot be examined or deleted. Raises InvalidSpec or OSError if they
    cannot be listed."""
    checkpoints = complete(location, skip_unreadable=True)
    for old in sorted(each for each in checkpoints if each <= step)[:-keep]:
        path = checkpoints[old]
        log.debug("checkpoint_retired", path=str(path))
        if isinstance(path, BucketPath):
            bucket.discard(path)
        else:
            directory.discard(path)
