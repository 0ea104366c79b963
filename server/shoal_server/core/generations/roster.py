"""Rosters: the members of a generation, with their ranks, states and common fields."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import NewType, Protocol

Generation = NewType("Generation", int)
Step = NewType("Step", int)

NO_GENERATION = Generation(0)


class StateAction(Enum):
    """Source of a member's training state."""

    INITIAL = "initial"
    KEEP = "keep"
    RECEIVE = "receive"
    CHECKPOINT = "checkpoint"
    """Restored from a checkpoint that all members see: no member holds the state."""


class Verdict(Enum):
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job's name, bounds and secret."""

    job: str
    min_members: int = 1
    max_members: int = 1024
    desired_members: int = 1
    last_call_s: float = 0.0
    """Wait for the desired members; 0: `Limits.last_call_s`."""
    secret_digest: str = field(default="", repr=False)
    """Empty: no secret."""

    def fits(self, other: "JobSpec") -> bool:
        """True if a member of the other spec may join while the job has members. `desired_members`
        may differ, as after scaling."""
        return replace(other, desired_members=self.desired_members) == self

    def problem(self) -> str:
        """Return the fault in the bounds; empty without one."""
        if self.min_members < 1:
            return f"min_members is {self.min_members}; expected at least 1"
        if self.min_members > self.max_members:
            return (
                f"min_members is {self.min_members} and max_members {self.max_members};"
                " expected min_members <= max_members"
            )
        if not self.min_members <= self.desired_members <= self.max_members:
            return (
                f"desired_members is {self.desired_members};"
                f" expected {self.min_members} to {self.max_members}"
            )
        if not self.last_call_s >= 0:
            return f"last_call_s is {self.last_call_s}; expected 0 or more seconds"
        return ""


@dataclass(frozen=True, kw_only=True)
class MemberInfo:
    host: str = ""
    pid: int = 0
    address: str = ""
    device: str = ""
    torch_version: str = ""
    shoal_version: str = ""
    num_devices: int = 0
    """Devices of the kind of `device`; 0: not stated."""
    probe_port: int = 0
    """Port to which peers connect to test that they reach the member; 0: none."""
    launch_digest: str = field(default="", repr=False)
    """Digest of the launcher's secret; empty: not stated."""


class DigestListing(Protocol):
    """Content behind a digest."""

    def lines(self) -> Sequence[str] | None:
        """Return the entries, each "name: value", in order; None if they cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Training that a member proposes. Members must have the same `fields`, and the same value of
    each optional field that they state."""

    fields: Mapping[str, str] = field(default_factory=dict)
    synchronous: bool = True
    step: Step = Step(0)
    has_state: bool = False
    stateless: bool = False
    """True if the script keeps its own state."""
    optional_fields: Mapping[str, str] = field(default_factory=dict)
    """Compared only among members that state them: a release may add some."""
    listings: Mapping[str, DigestListing] = field(default_factory=dict, repr=False)
    """Listings by field, to show the first entry that differs."""


@dataclass(frozen=True, kw_only=True)
class RosterEntry:
    member_id: str
    incarnation: str
    rank: int
    host: str = ""
    address: str = ""
    state: StateAction = StateAction.INITIAL
    step: Step = Step(0)
    probe_port: int = 0


@dataclass(frozen=True, kw_only=True)
class GenerationRoster:
    generation: Generation
    entries: tuple[RosterEntry, ...]
    """Ordered by rank."""
    source_member_id: str
    """Member that sends its state to the others."""
    step: Step
    """Step of the source; a planned generation starts later."""
    planned: bool
    """True if the generation follows a running one, which trains until a boundary."""
    synchronous: bool
    fields: Mapping[str, str]
    """Fields that all members proposed."""

    @property
    def member_ids(self) -> tuple[str, ...]:
        return tuple(entry.member_id for entry in self.entries)

    @cached_property
    def _incarnations(self) -> dict[str, str]:
        return {entry.member_id: entry.incarnation for entry in self.entries}

    @cached_property
    def ranks(self) -> Mapping[str, int]:
        """Rank by member id."""
        return {entry.member_id: entry.rank for entry in self.entries}

    @cached_property
    def from_checkpoint(self) -> bool:
        """True if the members can only start from a checkpoint."""
        return any(entry.state is StateAction.CHECKPOINT for entry in self.entries)

    def keeps(self, member_id: str) -> bool:
        """True if the member keeps its state."""
        return self.entries[self.ranks[member_id]].state is StateAction.KEEP

    def holds(self, member_id: str, incarnation: str) -> bool:
        return self._incarnations.get(member_id) == incarnation


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """A field in which members differ: its values, each with its members."""

    field: str
    values: tuple[tuple[str, tuple[str, ...]], ...]
    fix: str = ""
    """Advice, if any."""

    def __str__(self) -> str:
        held = " but ".join(f"{value!r} in {', '.join(who)}" for value, who in self.values)
        return f"{self.field}: {held}"


@dataclass(frozen=True, kw_only=True)
class GenerationRecord:
    """Outcome of an attempt to form a generation, the same for all its members."""

    job: str
    roster: GenerationRoster
    verdict: Verdict
    reason: str
    digest: str
    decided_s: float
    conflicts: tuple[Conflict, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """State of a member when a roster is drawn up."""

    member_id: str
    incarnation: str
    info: MemberInfo
    proposal: Proposal


def assign_ranks(member_ids: Sequence[str], previous: GenerationRoster | None) -> dict[str, int]:
    """Assign ranks 0 to n-1: members keep ranks below n, and others fill the gaps in order."""
    num_members = len(member_ids)
    before = {e.member_id: e.rank for e in previous.entries} if previous else {}
    ranks = {m: before[m] for m in member_ids if before.get(m, num_members) < num_members}
    holes = iter(sorted(set(range(num_members)) - set(ranks.values())))
    # Survivors come first, so that they keep low ranks.
    for m in sorted((m for m in member_ids if m not in ranks), key=lambda m: (m not in before, m)):
        ranks[m] = next(holes)
    return ranks


def choose_source(candidates: Sequence[Candidate], ranks: Mapping[str, int]) -> Candidate:
    """Choose the member whose state the others receive.

    Among members with trained state the highest step decides, then the lowest rank. Without trained
    state, the same rule chooses whose initial values count, unless the job has trained.
    """
    return min(
        candidates,
        key=lambda c: (not c.proposal.has_state, -c.proposal.step, ranks[c.member_id]),
    )


def build_roster(
    generation: Generation,
    candidates: Sequence[Candidate],
    *,
    previous: GenerationRoster | None,
    running: GenerationRoster | None,
    trained: bool = False,
) -> GenerationRoster:
    """Draw up the roster of a new generation, with ranks and state actions.

    `previous`: the roster whose ranks members keep; `running`: the roster that trains, for a
    planned change; `trained`: True if the job must not start from initial values. Members in
    `running` will stop at one common step, whose state newcomers receive.
    """
    ranks = assign_ranks([c.member_id for c in candidates], previous)
    trainers = [c for c in candidates if running and running.holds(c.member_id, c.incarnation)]
    source = choose_source(trainers or candidates, ranks)
    standing = {c.member_id for c in trainers or candidates if _stands_with(c, source, trainers)}
    entries = tuple(
        RosterEntry(
            member_id=c.member_id,
            incarnation=c.incarnation,
            rank=ranks[c.member_id],
            host=c.info.host,
            address=c.info.address,
            probe_port=c.info.probe_port,
            state=_state_action(source, stands=c.member_id in standing, trained=trained),
            step=c.proposal.step,
        )
        for c in sorted(candidates, key=lambda c: ranks[c.member_id])
    )
    return GenerationRoster(
        generation=generation,
        entries=entries,
        source_member_id=source.member_id,
        step=source.proposal.step,
        planned=running is not None,
        synchronous=source.proposal.synchronous,
        fields=dict(source.proposal.fields),
    )


def _stands_with(candidate: Candidate, source: Candidate, trainers: Sequence[Candidate]) -> bool:
    same_step = bool(trainers) or candidate.proposal.step == source.proposal.step
    return candidate.proposal.has_state and same_step


def _state_action(source: Candidate, *, stands: bool, trained: bool) -> StateAction:
    if not source.proposal.has_state:
        return StateAction.CHECKPOINT if trained else StateAction.INITIAL
    return StateAction.KEEP if stands else StateAction.RECEIVE
