"""One member of a job, as the coordinator knows it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal_server.core.generations.roster import (
    NO_GENERATION,
    Candidate,
    Generation,
    MemberInfo,
    Proposal,
    Roster,
)

MAX_NAMES = 10


@dataclass(kw_only=True)
class Drain:
    """Whether a member is to leave."""

    since_s: float | None = None
    """Since when; None: it is not."""
    reason: str = ""
    let_go: bool = False
    """Was told to leave at its next step boundary."""


@dataclass(kw_only=True)
class TrainerActivity:
    """What a member's heartbeats tell of its trainer."""

    moved: int = 0
    """Counts what its bring-up has brought about."""
    moved_s: float = float("-inf")
    """When that was last seen to change."""
    own_code_since_s: float | None = None
    """Since when it has been in the script's own code, as far as is known."""
    loads: bool = False
    """Whether it waits there for a batch to be loaded."""
    waits_for_others: bool = False
    """Whether it is known to wait for other members."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What a member waits for, and since when."""

    reason: str = "its own model: it has not proposed yet"
    since_s: float = 0.0
    stands_by: bool = False
    """It was told that no time limit of its own runs."""


@dataclass(kw_only=True)
class Member:
    member_id: str
    incarnation: str
    info: MemberInfo
    joined_s: float
    proposal: Proposal | None = None
    """What it would train; a member without one cannot be in a roster yet."""
    settled: bool = True
    """Stands still and can be part of the next roster. False while a synchronous one trains."""
    reported_broken: Generation = NO_GENERATION
    """The newest generation in which a collective failed under it."""
    entered: Generation = NO_GENERATION
    """The newest generation that it is known to have been in."""
    disconnected_s: float | None = None
    halted_s: float | None = None
    """Since when a signal has halted its process."""
    drain: Drain = field(default_factory=Drain)
    failed_in: Generation = NO_GENERATION
    """The newest generation that it could not bring up by its own failure."""
    trainer: TrainerActivity = field(default_factory=TrainerActivity)
    wait: Wait = field(default_factory=Wait)

    def waits(self, reason: str, now_s: float, *, stands_by: bool = False) -> None:
        """Note what the member waits for; the clock starts anew only when that changes."""
        since_s = self.wait.since_s if reason == self.wait.reason else now_s
        self.wait = Wait(reason=reason, since_s=since_s, stands_by=stands_by)

    @property
    def waiting_for(self) -> str:
        return self.wait.reason

    @property
    def waiting_since_s(self) -> float:
        return self.wait.since_s

    @property
    def stands_by(self) -> bool:
        """True if it was told that no time limit of its own runs while it waits."""
        return self.wait.stands_by

    @property
    def holds_state(self) -> bool:
        return self.proposal is not None and self.proposal.has_state

    @property
    def keeps_job(self) -> bool:
        """True if the job goes on from where it was because this member is there."""
        if self.proposal is None or self.proposal.stateless:
            return False
        # The state of an asynchronous job is on its servers: it goes on with any that has trained.
        trained_alone = not self.proposal.synchronous and self.entered > NO_GENERATION
        return self.proposal.has_state or trained_alone

    @property
    def stands_at(self) -> tuple[bool, int]:
        """Whether it holds state, and behind which step; the largest is the job's."""
        return self.holds_state, self.proposal.step if self.proposal is not None else 0

    def is_in(self, roster: Roster | None) -> bool:
        return roster is not None and roster.holds(self.member_id, self.incarnation)

    def as_candidate(self) -> Candidate:
        assert self.proposal is not None
        return Candidate(
            member_id=self.member_id,
            incarnation=self.incarnation,
            info=self.info,
            proposal=self.proposal,
        )


def names_of(members: Iterable[Member]) -> str:
    """In order, the first ten of them; "nobody" for none."""
    names = sorted(m.member_id for m in members)
    shown = ", ".join(names[:MAX_NAMES])
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return shown + more or "nobody"
