"""What is said to and by the sample ledger."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SampleRange:
    """Positions [start, stop) of one epoch's permutation."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Request:
    """One member's report of what it did, and its wish for more."""

    member_id: str
    incarnation: str
    sequence: int
    """Rises from request to request; the same again is a retry."""
    completed: Sequence[SampleRange] = ()
    held: Sequence[SampleRange] = ()
    """What it still works at. Whatever else it holds in the books goes back."""
    num_samples: int = 0
    """0: report only. The range it gets may be shorter, never longer."""
    reserve: int = 0
    """How many samples it would hold in all, to go on with while nobody answers."""
    step_samples: int = 1
    """Of one step: it is leased multiples of so many, unless an epoch ends."""
    given_back: Sequence[SampleRange] = ()
    """What it held and never began."""
    completed_before: Sequence[SampleRange] = ()
    """Reported once, maybe to books that did not last. What is booked already is not counted."""
    begun: int = 0
    """Of a member with a reserve: so many of the samples that it holds are begun ..."""
    begins_per_s: int = 0
    """... and at most so many more in a second."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """With neither a range nor `exhausted`, there is nothing now: others are still at work."""

    range: SampleRange | None
    exhausted: bool
    reserve_max: int = 0
    """How many samples it may hold in all, so that the others have their share. 0: any number."""
    not_held: Sequence[SampleRange] = ()
    """What it claimed and does not hold: it is not to begin it."""
    is_news: bool = True
    """Whether anything was booked."""


@dataclass(frozen=True, kw_only=True)
class EpochCounts:
    """Samples of one epoch. `returned` counts a sample each time that it came back."""

    epoch: int
    completed: int
    in_flight: int
    returned: int


@dataclass(frozen=True, kw_only=True)
class LedgerCounts:
    """Samples over all epochs, and per epoch for the newest ones that have begun."""

    dataset_size: int
    num_epochs: int
    completed: int
    in_flight: int
    returned: int
    ignored: int
    """Reported as completed by who did not hold them: fenced, or known to other books."""
    exhausted: bool
    epochs: tuple[EpochCounts, ...]

    @property
    def repeated_max(self) -> int:
        """No more samples than this were trained on a second time."""
        return self.returned + self.ignored


class StaleRequest(Exception):
    """A request that was overtaken by a later one of the same member; nothing was changed."""

    def __init__(self, sequence: int, newest: int) -> None:
        super().__init__(f"request {sequence} came after request {newest}")
        self.sequence = sequence
        self.newest = newest


class TooManyRanges(Exception):
    """The member holds so many separate ranges that it gets no other; nothing was changed."""
