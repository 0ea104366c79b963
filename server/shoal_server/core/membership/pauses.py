"""Pauses: a member runs its script's own code, and the others wait for it.

Meanwhile the limits on joining, agreeing, bring-up, stopping and draining do not run.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from shoal_server.core.membership.events import MemberPaused
from shoal_server.core.membership.member import MemberState

MAX_NAMES = 3
ANNOUNCED_FACTOR = 4
"""Factor by which the number of paused members must change before all members are notified again,
if too many are paused to be named. In an evaluation, each of thousands of members pauses and
resumes once."""


@dataclass(frozen=True, kw_only=True)
class PausedMembers:
    """Number of paused members that others wait for, and up to MAX_NAMES of them."""

    num_members: int = 0
    member_ids: tuple[str, ...] = ()

    def is_worth_a_notice(self, announced: "PausedMembers") -> bool:
        """True if the members should be notified again after a notice about `announced`. If all
        paused members can be named, any difference counts; else the number must have changed by
        ANNOUNCED_FACTOR or more."""
        if self.num_members <= MAX_NAMES:
            return self != announced
        fewer, more = sorted((self.num_members, announced.num_members))
        return more >= ANNOUNCED_FACTOR * fewer


@dataclass(frozen=True, kw_only=True)
class Pause:
    """A member's pause, as announced."""

    reason: str
    since_s: float
    limit_s: float
    number: int = 0

    @property
    def ends_s(self) -> float:
        """Time from which the member counts as hung."""
        return self.since_s + self.limit_s


@dataclass(kw_only=True)
class Pauses:
    """Pauses of one job's members."""

    _paused: dict[str, tuple[MemberState, Pause]] = field(default_factory=dict)
    _over: dict[str, tuple[MemberState, int]] = field(default_factory=dict)
    """Number of each member's newest ended pause."""
    _held_since_s: float | None = None
    released_s: float = float("-inf")
    """Time until which pauses last stopped the limits."""

    def begin(self, member: MemberState, event: MemberPaused, now_s: float) -> Pause | None:
        """Begin or update the member's pause. Returns None for a late message."""
        over, known = self._over.get(member.member_id), self.of(member)
        newest = known.number if known is not None else 0
        if over is not None and over[0] is member:
            newest = max(newest, over[1] + 1)
        if 0 < event.number < newest:
            return None
        pause = Pause(
            reason=event.reason,
            since_s=now_s - event.elapsed_s,
            limit_s=event.limit_s,
            number=event.number,
        )
        self._paused[member.member_id] = (member, pause)
        return pause

    def end(self, member: MemberState, number: int = 0) -> Pause | None:
        """End the member's pause, if numbered at most `number` (0: any), and return it."""
        known = self.of(member)
        if number and known is not None and number < known.number:
            return None
        if number:
            self._over[member.member_id] = (member, number)
        if known is not None:
            del self._paused[member.member_id]
        return known

    def forget_process(self, member: MemberState) -> None:
        """Forget a process that is no longer a member."""
        self.end(member)
        if (over := self._over.get(member.member_id)) is not None and over[0] is member:
            del self._over[member.member_id]

    def of(self, member: MemberState) -> Pause | None:
        known = self._paused.get(member.member_id)
        return known[1] if known is not None and known[0] is member else None

    def __iter__(self) -> Iterator[tuple[MemberState, Pause]]:
        return iter(list(self._paused.values()))

    def hold(self, now_s: float, *, held: bool) -> float:
        """Stop the limits if `held`, else let them run. Returns the seconds by which to extend the
        limits: the time since the last call if they were stopped until now, else 0."""
        since_s, self._held_since_s = self._held_since_s, now_s if held else None
        if since_s is None:
            return 0.0
        self.released_s = now_s
        return now_s - since_s


def pause_in_words(
    member: MemberState, rank: int | None, pause: Pause, now_s: float | None = None
) -> str:
    """Describe a pause: "rank 0 (vm-0) is paused: validation, for 54 s of 1800 s"."""
    name = member.member_id if rank is None else f"rank {rank} ({member.member_id})"
    text = f"{name} is paused: {pause.reason}"
    if now_s is None:
        return text
    return f"{text}, for {max(now_s - pause.since_s, 0.0):.0f} s of {pause.limit_s:g} s"
