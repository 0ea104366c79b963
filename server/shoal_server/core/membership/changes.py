"""Reasons for a new generation, as one line such as "lost vm-2 (SIGKILL); 3 go on"."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal_proto.short_lists import short_list
from shoal_server.core.generations.roster import NO_GENERATION, Generation, GenerationRoster, Step

MAX_NAMES = 10
MAX_CAUSE = 160
MAX_LINE = 600
UNSEEN = "gone while no coordinator led"


@dataclass(frozen=True, kw_only=True)
class Departure:
    member_id: str
    cause: str
    """Cause of a loss, such as SIGKILL or connection lost; or the reason for leaving."""
    lost: bool
    """True if the member did not leave in order."""


@dataclass(frozen=True, kw_only=True)
class ChangeSummary:
    """Changes between a generation and the one before."""

    generation: Generation
    cause: str
    """Reason in the generation's record."""
    lost: tuple[Departure, ...]
    left: tuple[Departure, ...]
    joined: tuple[str, ...]
    stayed: tuple[str, ...]
    synchronous: bool
    start: Step
    steps_lost: int
    """Committed steps that are taken again."""
    down_s: float
    """Time from a break until this generation ran; 0 without a break."""


@dataclass(kw_only=True)
class PendingChanges:
    """Changes since a generation last began to run."""

    before: GenerationRoster | None = None
    """Newest roster that ran; under a new leader, the newest committed one."""
    departures: dict[str, Departure] = field(default_factory=dict)
    trouble: str = ""
    """Cause of the break; empty if a lost member explains it."""
    broke_s: float | None = None
    """Time since which no synchronous generation runs; None if one runs, or before the first."""

    def record_departure(self, member_id: str, cause: str, *, lost: bool) -> None:
        """Note that a member is gone. Kept only for members of `before`, with the first cause."""
        departure = Departure(member_id=member_id, cause=shortened(cause), lost=lost)
        if self.before is not None and member_id in self.before.ranks:
            self.departures.setdefault(member_id, departure)

    def record_break(self, trouble: str, now_s: float) -> None:
        """Note that the running generation is over."""
        if self.broke_s is None:
            self.broke_s = now_s
        self.trouble = self.trouble or trouble

    def cause(self, roster: GenerationRoster) -> str:
        """Reason for this roster, as a line of text."""
        lost, left, joined, _ = self._sorted(roster)
        parts = [f"lost {text}" for text in _grouped(lost)]
        parts += [f"{text} left" for text in _grouped(left)]
        if not lost and self.trouble:
            parts.append(shortened(self.trouble))
        if self.before is not None and joined:
            parts.append(f"{short_list(joined, MAX_NAMES)} joined")
        num = len(roster.entries)
        begin = " begin from a checkpoint" if roster.from_checkpoint else " begin"
        how = begin if self.before is None else " train" if joined else " go on"
        if num == 1:
            how = how.replace(" begin", " begins").replace(" train", " trains")
            how = how.replace(" go on", " goes on")
        return "; ".join([*([", ".join(parts)] if parts else []), f"{num}{how}"])[:MAX_LINE]

    def summarize(
        self, roster: GenerationRoster, cause: str, *, start: Step, reached: Step, now_s: float
    ) -> ChangeSummary:
        """Sum up the changes once the roster runs. `cause`: its record's reason."""
        lost, left, joined, stayed = self._sorted(roster)
        return ChangeSummary(
            generation=roster.generation,
            cause=cause,
            lost=lost,
            left=left,
            joined=joined,
            stayed=stayed,
            synchronous=roster.synchronous,
            start=start,
            steps_lost=max(0, reached - start) if roster.synchronous else 0,
            down_s=0.0 if self.broke_s is None else max(0.0, now_s - self.broke_s),
        )

    def clear_for(self, roster: GenerationRoster) -> None:
        """Begin anew from this roster, which runs: the changes up to it were reported."""
        self.before, self.departures = roster, {}
        self.trouble, self.broke_s = "", None

    @property
    def newest_ran(self) -> Generation:
        return NO_GENERATION if self.before is None else self.before.generation

    def _sorted(
        self, roster: GenerationRoster
    ) -> tuple[tuple[Departure, ...], tuple[Departure, ...], tuple[str, ...], tuple[str, ...]]:
        """Return members that were lost, left, joined and stayed. A member whose process was
        replaced is both gone (lost or left) and joined."""
        before = self.before.member_ids if self.before is not None else ()
        old = set(before)
        again = {name for name in roster.member_ids if name in self.departures}
        gone = [name for name in before if name in again or name not in roster.ranks]
        unseen = {name: Departure(member_id=name, cause=UNSEEN, lost=True) for name in gone}
        departures = [self.departures.get(name, unseen[name]) for name in gone]
        return (
            tuple(each for each in departures if each.lost),
            tuple(each for each in departures if not each.lost),
            tuple(name for name in roster.member_ids if name not in old or name in again),
            tuple(name for name in roster.member_ids if name in old and name not in again),
        )


def shortened(text: str, length: int = MAX_CAUSE) -> str:
    """Return the first line, cut to `length` characters."""
    line = text.strip().partition("\n")[0].strip()
    return line if len(line) <= length else f"{line[: length - 1]}…"


def _grouped(departures: Iterable[Departure]) -> list[str]:
    by_cause: dict[str, list[str]] = {}
    for each in departures:
        by_cause.setdefault(each.cause, []).append(each.member_id)
    return [f"{short_list(names, MAX_NAMES)} ({cause})" for cause, names in by_cause.items()]
