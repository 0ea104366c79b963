"""One member of a job, as the coordinator knows it."""

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
    """Time of the request to leave; None without one."""
    reason: str = ""
    is_released: bool = False
    """True once the member was notified to leave at its next step boundary."""


@dataclass(kw_only=True)
class TrainerActivity:
    """State of a trainer, according to its heartbeats."""

    moved: int = 0
    """Counter that changes while the bring-up makes progress."""
    moved_s: float = float("-inf")
    """Time at which `moved` last changed."""
    own_code_since_s: float | None = None
    """Time since which the trainer has been in the script's own code; None if it is not there, or
    unknown."""
    loads: bool = False
    """True if the script's own code waits for a batch to be loaded."""
    waits_for_others: bool = False
    """True if the trainer waits for other members."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    reason: str = "its own model: it has not proposed yet"
    since_s: float = 0.0
    is_standby: bool = False
    """True if the member was notified of its standby: it waits without a limit of its own."""


@dataclass(kw_only=True)
class MemberState:
    member_id: str
    incarnation: str
    info: MemberInfo
    joined_s: float
    proposal: Proposal | None = None
    """Without a proposal, the member cannot be in a roster."""
    settled: bool = True
    """True if the member has stopped and can be in the next roster; False while it trains in a
    synchronous generation."""
    reported_broken: Generation = NO_GENERATION
    """Newest generation in which the member reported a failed collective."""
    entered: Generation = NO_GENERATION
    """Newest generation that the member is known to have entered."""
    disconnected_s: float | None = None
    """Time at which the member's stream broke; None while it is open. A new leader sets a time in
    the future, so that members can attend."""
    halted_s: float | None = None
    """Time at which a signal halted the process; None if it is not halted."""
    drain: Drain = field(default_factory=Drain)
    failed_in: Generation = NO_GENERATION
    """Newest generation with a failed bring-up on the member's side, blamed or not."""
    trainer: TrainerActivity = field(default_factory=TrainerActivity)
    wait: Wait = field(default_factory=Wait)

    def set_wait(self, reason: str, now_s: float, *, is_standby: bool = False) -> None:
        """Set what the member waits for; another reason restarts the time."""
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
        """True if the job can continue from its state because this member is present."""
        if self.proposal is None or self.proposal.stateless:
            return False
        # The state of an asynchronous job is on servers: any member that has trained keeps it.
        trained_alone = not self.proposal.synchronous and self.entered > NO_GENERATION
        return self.proposal.has_state or trained_alone

    @property
    def state_and_step(self) -> tuple[bool, int]:
        """Pair (holds state, step); members with the largest one hold the job's newest state."""
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
