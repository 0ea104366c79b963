"""A training step that pushes to parameters and to tables."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class JointStep:
    """Given to a push of gradients and to one of rows, it makes the two one step: a snapshot of the
    job has both or neither. Each is to be made, or the next snapshot waits for it in vain."""

    sequence: int
    """Number of both pushes."""
    shard_ids: Sequence[int]
    """All shards of both, at any server."""
