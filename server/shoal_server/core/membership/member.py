"""A member of a job, as the coordinator knows it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal_proto.short_lists import short_list
from shoal_server.core.generations.roster import (
    NO_GENERATION,
    Candidate,
    Generation,
    GenerationRoster,
    MemberInfo,
    Proposal,
)

MAX_NAMES = 10


@dataclass(kw_only=True)
class Drain:
    """An orderly leave."""

    since_s: float | None = None
    """None: not asked to leave."""
    reason: str = ""
    is_released: bool = False
    """True once the member is to leave at its next step boundary."""


@dataclass(kw_only=True)
class TrainerActivity:
    """State of a trainer, according to its heartbeats."""

    moved: int = 0
    """Counter that changes while the bring-up makes progress."""
    moved_s: float = float("-inf")
    """Last change of `moved`."""
    own_code_since_s: float | None = None
    """None: not in the script's own code, or unknown."""
    loads: bool = False
    """True if the script waits for a batch."""
    waits_for_others: bool = False
    """True if the trainer waits for other members."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    reason: str = "its own model: it has not proposed yet"
    since_s: float = 0.0
    is_standby: bool = False
    """True if the member was notified of its standby, and waits without a limit."""


@dataclass(kw_only=True)
class MemberState:
    member_id: str
    incarnation: str
    info: MemberInfo
    joined_s: float
    proposal: Proposal | None = None
    """Training that the member proposes, required for a roster."""
    settled: bool = True
    """True if the member can be in the next roster; False while it trains in a synchronous
    generation."""
    reported_broken: Generation = NO_GENERATION
    """Newest generation with a reported failure of a collective."""
    entered: Generation = NO_GENERATION
    """Newest generation that the member has entered."""
    disconnected_s: float | None = None
    """Time at which the stream broke, or a future time from a new leader; None while it is open."""
    halted_s: float | None = None
    """None: not halted."""
    drain: Drain = field(default_factory=Drain)
    failed_in: Generation = NO_GENERATION
    """Newest generation that this member could not bring up, even if newcomers were put off instead
    of this member."""
    trainer: TrainerActivity = field(default_factory=TrainerActivity)
    wait: Wait = field(default_factory=Wait)

    def set_wait(self, reason: str, now_s: float, *, is_standby: bool = False) -> None:
        """Set the reason to wait; a new reason restarts the time."""
        since_s = self.wait.since_s if reason == self.wait.reason else now_s
        self.wait = Wait(reason=reason, since_s=since_s, is_standby=is_standby)

    @property
    def waiting_for(self) -> str:
        return self.wait.reason

    @property
    def waiting_since_s(self) -> float:
        return self.wait.since_s

    @property
    def is_standby(self) -> bool:
        """True if the member is on standby, without a limit."""
        return self.wait.is_standby

    @property
    def holds_state(self) -> bool:
        return self.proposal is not None and self.proposal.has_state

    @property
    def keeps_job(self) -> bool:
        """True if the member's presence lets the job continue from its state."""
        if self.proposal is None or self.proposal.stateless:
            return False
        # Servers have the state of an asynchronous job: any former trainer keeps it.
        trained_alone = not self.proposal.synchronous and self.entered > NO_GENERATION
        return self.proposal.has_state or trained_alone

    @property
    def state_and_step(self) -> tuple[bool, int]:
        """Pair (holds state, step): the member with the largest pair has the newest state."""
        return self.holds_state, self.proposal.step if self.proposal is not None else 0

    def is_in(self, roster: GenerationRoster | None) -> bool:
        return roster is not None and roster.holds(self.member_id, self.incarnation)

    def as_candidate(self) -> Candidate:
        assert self.proposal is not None
        return Candidate(
            member_id=self.member_id,
            incarnation=self.incarnation,
            info=self.info,
            proposal=self.proposal,
        )


def names_of(members: Iterable[MemberState]) -> str:
    """List the first ten ids in order, and how many more; "nobody" for none."""
    return short_list(sorted(m.member_id for m in members), MAX_NAMES) or "nobody"
