"""A frozen shard: a cut that waits to be written to a snapshot."""

from dataclasses import dataclass

from shoal_server.parameters.cuts.shard_cut import ShardCut
from shoal_server.parameters.shard.replica import ShardReplica


@dataclass(frozen=True, order=True)
class Stamp:
    """Identifies the content of a shard."""

    shard_id: int
    epoch: int
    version: int


@dataclass(frozen=True)
class FrozenShard:
    """A cut with its stamp. Used from any thread; close the cut after use."""

    stamp: Stamp
    cut: ShardCut

    @classmethod
    def of(cls, replica: ShardReplica) -> "FrozenShard":
        """Cut a shard as of now. Waits for a push in progress."""
        cut = replica.state.cut()
        return cls(Stamp(replica.shard_id, replica.epoch, cut.version), cut)
