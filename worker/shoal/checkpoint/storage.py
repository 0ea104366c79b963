"""Storage of checkpoints in a directory or a bucket: lists, creates and deletes checkpoints."""

from collections.abc import Mapping

import structlog

from shoal.checkpoint import bucket, directory
from shoal.checkpoint.bucket_paths import BucketPath, CheckpointPath
from shoal.checkpoint.drafts import Draft, LocalDraft
from shoal_proto.errors import InvalidSpec

log = structlog.get_logger(__name__)


def complete(place: CheckpointPath) -> Mapping[int, CheckpointPath]:
    """Return all complete checkpoints by step. Raises InvalidSpec if `place` cannot be listed."""
    if isinstance(place, BucketPath):
        return bucket.complete(place)
    return directory.complete(place)


def newest(place: CheckpointPath) -> CheckpointPath | None:
    """Return the complete checkpoint of the highest step, if there is one."""
    found = complete(place)
    return found[max(found)] if found else None


def path_of_step(place: CheckpointPath, step: int) -> CheckpointPath:
    """Return the path of the checkpoint after `step` committed steps; names sort as steps do."""
    return place / directory.name_of_step(step)


def draft_of(path: CheckpointPath) -> Draft:
    """Return a draft of the checkpoint at a path."""
    return bucket.BucketDraft(path) if isinstance(path, BucketPath) else LocalDraft(path)


def check(place: CheckpointPath) -> None:
    """Raise InvalidSpec for a bucket that cannot store checkpoints; called before one is due."""
    if isinstance(place, BucketPath):
        place.probe()


def refuse_later(place: CheckpointPath, step: int) -> None:
    """Raise InvalidSpec if there are checkpoints of later steps.

    A run that does not continue from the newest checkpoint would mix its own with another run's.
    """
    last = max(complete(place), default=step)
    if last > step:
        raise InvalidSpec(
            f"{place} has checkpoints of a run that was further than this one",
            seen=f"step {last}",
            expected=f"none after step {step}",
            fix="Continue from the newest one, or write to another directory.",
        )


def retire(place: CheckpointPath, step: int, keep: int) -> None:
    """Delete complete checkpoints of this step and earlier ones, except the newest `keep`.

    Checkpoints of later steps belong to another run, and are neither counted nor deleted.
    """
    found = complete(place)
    for old in sorted(own for own in found if own <= step)[:-keep]:
        path = found[old]
        log.debug("checkpoint_retired", path=str(path))
        if isinstance(path, BucketPath):
            bucket.discard(path)
        else:
            directory.discard(path)
