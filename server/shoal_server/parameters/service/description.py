"""A parameter server's description of itself: sizes, counters, versions of copies."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal_proto.errors import WrongEpoch
from shoal_proto.v1.parameters_pb2 import CopyState, DescribeReply, PushOutcome
from shoal_proto.v1.parameters_pb2 import ShardState as ShardFigures
from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import ShardAssignment
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica

MAX_JOBS = 1024


@dataclass(slots=True)
class PushOutcomeCounts:
    """Counts of one job's pushes to parameters, not to tables."""

    by_epoch: int = 0
    """Parts of pushes that were refused for a wrong epoch or primary."""
    partial: int = 0
    """Pushes of which only some parts were applied."""


class PushTally:
    """Counts by job, for at most MAX_JOBS jobs; beyond that, the oldest entry is dropped."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, PushOutcomeCounts] = OrderedDict()

    def count(self, job: str, outcomes: Iterable[PushOutcome]) -> None:
        """Count the outcomes of one push."""
        kinds = [each.error.kind if each.HasField("error") else "" for each in outcomes]
        if not any(kinds):
            return
        counts = self._jobs.setdefault(job, PushOutcomeCounts())
        counts.by_epoch += kinds.count(WrongEpoch.__name__)
        counts.partial += "" in kinds
        if len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)

    def fill(self, reply: DescribeReply, job: str) -> None:
        """Add the counts of one job, or of all jobs if `job` is empty."""
        for name, counts in self._jobs.items():
            if job in ("", name):
                reply.refused_by_epoch += counts.by_epoch
                reply.partial_pushes += counts.partial


def add_shard(
    reply: DescribeReply,
    replica: ShardReplica,
    assignment: ShardAssignment | None,
    versions: Mapping[Holder, int],
) -> None:
    """Add a shard to the reply. A backup adds only to the number of copies and the memory.
    `versions`: the newest version that each backup is known to have."""
    reply.memory_bytes += replica.state.memory_bytes
    if replica.role is not ReplicaRole.PRIMARY:
        reply.num_copies += 1
        return
    figures = replica.state.describe(replica.job)
    _add_copies(figures, replica, assignment, versions)
    reply.shards.append(figures)


def _add_copies(
    figures: ShardFigures,
    replica: ShardReplica,
    assignment: ShardAssignment | None,
    versions: Mapping[Holder, int],
) -> None:
    figures.epoch = replica.epoch
    figures.unreplicated_bytes = replica.unreplicated_bytes
    figures.pushed_bytes = replica.pushed_bytes
    for holder in assignment.holders[1:] if assignment is not None else ():
        figures.copies.append(
            CopyState(
                server_id=holder.server_id,
                version=min(versions.get(holder, 0), figures.version),
                joining=assignment is not None and holder == assignment.joining,
            )
        )
