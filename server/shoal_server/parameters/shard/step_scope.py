"""What a shard keeps of the step that a push was part of.

A shard may be all that is left of a step's beginnings, when it was moved or has outlived a server:
by what it keeps, a cut knows for which other shards it has to wait.
"""

from collections.abc import Collection
from dataclasses import dataclass

from shoal_proto.errors import MalformedMessage
from shoal_proto.v1.replication_pb2 import StepScope
from shoal_server.core.shards.steps import Shards, StepId, from_bits, to_bits

TABLES = "tables:"
"""Before the session of a step of rows alone: these are counted apart."""
MAX_SHARD_IDS = 1 << 17
"""More than the tables and parameters of a job can have. Bounds what a shard keeps of one push."""


@dataclass(frozen=True, slots=True)
class Scope:
    """All shards that a step touches."""

    shard_bits: bytes
    of_tables: bool
    """Whether the step has its number from the count of its member's table pushes."""

    @classmethod
    def of(cls, shard_ids: Collection[int], *, of_tables: bool = False) -> "Scope | None":
        """None for no ids, which stand for every dense shard.

        Raises MalformedMessage for an id that no job has.
        """
        if not shard_ids:
            return None
        if max(shard_ids) >= MAX_SHARD_IDS:
            raise MalformedMessage(
                "a push names a shard that there cannot be",
                seen=f"shard {max(shard_ids)}",
                expected=f"ids below {MAX_SHARD_IDS}",
                fix="Name the shards as the job's shard map does.",
            )
        return cls(to_bits(shard_ids), of_tables)

    @classmethod
    def from_message(cls, message: StepScope) -> "Scope | None":
        """What `to_message` was given."""
        return cls(message.shard_bits, message.of_tables) if message.shard_bits else None

    @property
    def shards(self) -> Shards:
        return from_bits(self.shard_bits)

    def step(self, session: str, sequence: int) -> StepId:
        """The step of a push by that session."""
        return StepId(TABLES + session if self.of_tables else session, sequence)


def to_message(scope: Scope | None) -> StepScope | None:
    if scope is None:
        return None
    return StepScope(shard_bits=scope.shard_bits, of_tables=scope.of_tables)
