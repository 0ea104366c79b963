"""A training step that pushes to parameters and to tables."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class JointStep:
    """Makes a push of gradients and a push of rows one step: a snapshot of the job has both or
    neither. Both must be made, or the next snapshot waits in vain for the missing push."""

    sequence: int
    """Number of both pushes."""
    shard_ids: Sequence[int]
    """Ids of all shards of both pushes, on all servers."""
