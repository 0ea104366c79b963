"""Where checkpoints lie, a directory or a bucket: which of them are complete, and new ones."""

from collections.abc import Mapping

import structlog

from shoal.checkpoint import bucket, directory
from shoal.checkpoint.bucket_paths import BucketPath, CheckpointPath
from shoal.checkpoint.drafts import Draft, LocalDraft
from shoal_proto.errors import InvalidSpec

log = structlog.get_logger(__name__)


def complete(place: CheckpointPath) -> Mapping[int, CheckpointPath]:
    """All complete checkpoints by step. Raises InvalidSpec if the place cannot be looked into."""
    if isinstance(place, BucketPath):
        return bucket.complete(place)
    return directory.complete(place)


def newest(place: CheckpointPath) -> CheckpointPath | None:
    """The complete checkpoint of the highest step, if there is one."""
    found = complete(place)
    return found[max(found)] if found else None


def path_of_step(place: CheckpointPath, step: int) -> CheckpointPath:
    """Path of the checkpoint after so many committed steps; names sort as steps do."""
    return place / directory.name_of_step(step)


def draft_of(path: CheckpointPath) -> Draft:
    """A draft of the checkpoint at a path."""
    return bucket.BucketDraft(path) if isinstance(path, BucketPath) else LocalDraft(path)


def check(place: CheckpointPath) -> None:
    """Raise InvalidSpec for a bucket in which no checkpoints can be kept, before any is due."""
    if isinstance(place, BucketPath):
        place.probe()


def refuse_later(place: CheckpointPath, step: int) -> None:
    """Raise InvalidSpec if there are checkpoints of later steps.

    A run that has not gone on from the newest one would be mixed up with the one that wrote it.
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
    """Delete complete checkpoints, so that of this step's and those before it `keep` stay.

    Those of later steps are of another run and are not counted.
    """
    found = complete(place)
    for old in sorted(own for own in found if own <= step)[:-keep]:
        path = found[old]
        log.debug("checkpoint_retired", path=str(path))
        if isinstance(path, BucketPath):
            bucket.discard(path)
        else:
            directory.discard(path)
