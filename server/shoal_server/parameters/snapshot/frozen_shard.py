"""A shard as of one moment, until it is written to a snapshot."""

from dataclasses import dataclass

from shoal_server.parameters.cuts.shard_cut import ShardCut
from shoal_server.parameters.shard.replica import ShardReplica


@dataclass(frozen=True, order=True)
class Stamp:
    """A state of a shard."""

    shard_id: int
    epoch: int
    version: int


@dataclass(frozen=True)
class FrozenShard:
    """Any thread; to be closed."""

    stamp: Stamp
    cut: ShardCut

    @classmethod
    def of(cls, replica: ShardReplica) -> "FrozenShard":
        """The shard as it is now. Waits for a push that is being applied."""
        cut = replica.state.cut()
        return cls(Stamp(replica.shard_id, replica.epoch, cut.version), cut)
