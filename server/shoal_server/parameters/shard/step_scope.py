"""The scope of a step: the shards that the step touches, remembered with each push.

Perhaps only one shard remembers that a step has begun: the scope then tells a cut for which shards
to wait.
"""

from collections.abc import Collection
from dataclasses import dataclass

from shoal_proto.errors import MalformedMessage
from shoal_proto.v1.replication_pb2 import StepScope
from shoal_server.core.shards.steps import Shards, StepId, from_bits, to_bits

TABLES = "tables:"
"""Prefix of the session of a step that pushes only to tables."""
MAX_SHARD_IDS = 1 << 17
"""Bound on shard ids, and so on a scope's memory."""


@dataclass(frozen=True, slots=True)
class Scope:
    """All shards that a step touches."""

    shard_bits: bytes
    of_tables: bool
    """True if the step's number counts only pushes to tables."""

    @classmethod
    def of(cls, shard_ids: Collection[int], *, of_tables: bool = False) -> "Scope | None":
        """Return the scope of these shards; None, which means every dense shard, without ids.
        Raises MalformedMessage for an id of MAX_SHARD_IDS or more."""
        if not shard_ids:
            return None
        if max(shard_ids) >= MAX_SHARD_IDS:
            raise MalformedMessage(
                "a push names a shard that cannot exist",
                seen=f"shard {max(shard_ids)}",
                expected=f"ids below {MAX_SHARD_IDS}",
                fix="Name the shards as the job's shard map does.",
            )
        return cls(to_bits(shard_ids), of_tables)

    @classmethod
    def from_message(cls, message: StepScope) -> "Scope | None":
        """Decode a scope; None if the message names no shards."""
        return cls(message.shard_bits, message.of_tables) if message.shard_bits else None

    @property
    def shards(self) -> Shards:
        return from_bits(self.shard_bits)

    def step(self, session: str, sequence: int) -> StepId:
        """Return the step of a push of that session."""
        return StepId(TABLES + session if self.of_tables else session, sequence)


def to_message(scope: Scope | None) -> StepScope | None:
    """Encode a scope; None stays None."""
    if scope is None:
        return None
    return StepScope(shard_bits=scope.shard_bits, of_tables=scope.of_tables)
