"""Context of a strategy: its job, and the generation that the member has entered."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shoal.membership.stores import GenerationStores, LoneStores
from shoal_client.liveness.trainer_status import TrainerStatus
from shoal_proto.errors import InternalError, ShoalError
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.membership_pb2 import STATE_ACTION_KEEP, GenerationRecord, Limits, RosterEntry


@dataclass(frozen=True, kw_only=True)
class Context:
    """Context of a strategy: job, coordinators, and the state of the membership."""

    job: str
    coordinators: Sequence[str]
    token: Callable[[], Token]
    """Returns the member's token, with the generation that it has entered. Cheap and
    thread-safe."""
    limits: Limits
    held_until_s: Callable[[], float] = lambda: -math.inf
    """Returns the time, by `time.monotonic`, until which waits for other members had no limit: a
    member paused, or no coordinator was reached. Thread-safe."""
    is_away: Callable[[], bool] = lambda: False
    """Returns True while no coordinator can be reached. Thread-safe."""
    no_generation_follows: Callable[[], bool] = lambda: False
    """Returns True if this member is to leave and no further generation follows. Thread-safe."""
    ended: Callable[[], ShoalError | None] = lambda: None
    """Returns the error that ended the membership; None: the membership goes on. Cheap and
    thread-safe."""
    stores: GenerationStores = field(default_factory=LoneStores)
    """Key-value stores through which a generation's members connect. The strategy closes them."""
    report_status: Callable[[TrainerStatus], None] = lambda status: None
    """Takes the trainer's status, which heartbeats carry. Thread-safe."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Generation, with the token of one of its members."""

    record: GenerationRecord
    token: Token

    @cached_property
    def number(self) -> int:
        return self.record.roster.generation

    @cached_property
    def world_size(self) -> int:
        return len(self.record.roster.entries)

    @property
    def entries(self) -> list[RosterEntry]:
        """Entries of the roster, by rank."""
        return sorted(self.record.roster.entries, key=lambda entry: entry.rank)

    @cached_property
    def me(self) -> RosterEntry:
        """Entry of this member."""
        for entry in self.record.roster.entries:
            if entry.member_id == self.token.member_id:
                return entry
        raise InternalError(
            f"generation {self.number} does not include this member",
            seen=", ".join(entry.member_id for entry in self.record.roster.entries),
            expected=self.token.member_id,
        )

    @cached_property
    def rank(self) -> int:
        return self.me.rank


def receivers_of(generation: Generation) -> tuple[int, Sequence[int]]:
    """Return the rank of the member from whose state the generation starts, and the receivers'
    ranks."""
    entries = generation.entries
    source_id = generation.record.roster.source_member_id or entries[0].member_id
    source = next(entry.rank for entry in entries if entry.member_id == source_id)
    receivers = [e.rank for e in entries if e.rank != source and e.state != STATE_ACTION_KEEP]
    return source, receivers
