"""Requests to the sample ledger, and its answers."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LedgerRange:
    """Positions [start, stop) in the permutation of one epoch of the data."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """A member's report of completed samples, and its request for more."""

    member_id: str
    incarnation: str
    sequence: int
    """Rises with each request; the same number again is a retry."""
    completed: Sequence[LedgerRange] = ()
    held: Sequence[LedgerRange] = ()
    """Ranges that the member still holds, begun or not. All other ranges that the ledger has for
    the member, and that this request does not report, are freed and count as returned."""
    num_samples: int = 0
    """Number of samples wanted; 0: report only. The leased range may be shorter, never longer."""
    reserve: int = 0
    """Number of samples that the member wants to hold, to train on while no coordinator answers. 0:
    the member leases one range at a time."""
    step_samples: int = 1
    """Number of samples of one step. If the member has a reserve, its share is a multiple of this
    number. A leased range may still end within a step, if the free positions end there."""
    given_back: Sequence[LedgerRange] = ()
    """Ranges that the member held and never began. They are freed, and do not count as returned."""
    completed_before: Sequence[LedgerRange] = ()
    """Completed ranges that were reported before, perhaps to a ledger that was lost. Those that the
    ledger has as completed are ignored."""
    begun: int = 0
    """Number of samples that the member has begun, among those that it holds or reports as
    completed in this request. Used only if the member has a reserve."""
    begins_per_s: int = 0
    """Maximum number of samples that the member begins in a second."""


@dataclass(frozen=True, kw_only=True)
class SampleAnswer:
    """Answer to a request. If samples were wanted, and the answer has no range and is not
    `exhausted`, nothing can be leased now: this member holds its share, or no position of an epoch
    that may be open is free."""

    range: LedgerRange | None
    exhausted: bool
    reserve_max: int = 0
    """Number of samples that the member may hold, so that others have a share. 0: any number."""
    not_held: Sequence[LedgerRange] = ()
    """Ranges that the member claimed and does not hold, and so must not begin."""
    is_news: bool = True
    """True if the request changed ranges or counts of the ledger, or was the first of its
    incarnation. False if it changed only notes about the member, such as its reserve and pace."""


@dataclass(frozen=True, kw_only=True)
class EpochCounts:
    """Counts of samples in one epoch of the data. A sample counts in `returned` each time that its
    lease is returned."""

    epoch: int
    completed: int
    in_flight: int
    returned: int


@dataclass(frozen=True, kw_only=True)
class LedgerCounts:
    """Counts of samples: over all epochs, and for each of the newest epochs that have begun."""

    dataset_size: int
    num_epochs: int
    completed: int
    in_flight: int
    returned: int
    ignored: int
    """Samples reported as completed by a member that did not hold them, such as a fenced one."""
    exhausted: bool
    epochs: tuple[EpochCounts, ...]

    @property
    def repeated_max(self) -> int:
        """Upper bound on the samples that were trained on a second time."""
        return self.returned + self.ignored


class StaleRequest(Exception):
    """Raised for a request with a lower sequence number than the member's latest request; nothing
    was changed."""

    def __init__(self, sequence: int, newest: int) -> None:
        super().__init__(f"request {sequence} arrived after request {newest}")
        self.sequence = sequence
        self.newest = newest


class TooManyRanges(Exception):
    """Raised for a member that holds too many separate ranges to get another; nothing was
    changed."""
