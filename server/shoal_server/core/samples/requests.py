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


@dataclass(frozen=True, kw_only=True)
class Answer:
    """With neither a range nor `exhausted`, there is nothing now: others are still at work."""

    range: SampleRange | None
    exhausted: bool


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
