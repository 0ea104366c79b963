"""Requests to the sample ledger, and its answers."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LedgerRange:
    """Positions [start, stop) in the permutation of one epoch."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    member_id: str
    incarnation: str
    sequence: int
    """Rises with each request; an equal number is a retry."""
    completed: Sequence[LedgerRange] = ()
    held: Sequence[LedgerRange] = ()
    """Ranges that the member still holds, begun or not. Ranges that no field of this request names
    are freed, and count as returned."""
    num_samples: int = 0
    """Samples wanted; 0: report only. The range may be shorter."""
    reserve: int = 0
    """Samples that the member wants to hold, to train on while no coordinator answers. 0: one range
    at a time."""
    step_samples: int = 1
    """Samples of one step. The share of a member with a reserve is a multiple of this. A leased
    range may still end within a step."""
    given_back: Sequence[LedgerRange] = ()
    """Held ranges that the member never began. They are freed, and do not count as returned."""
    completed_before: Sequence[LedgerRange] = ()
    """Completed ranges that were reported before, perhaps to a ledger that was lost. Those already
    completed are ignored."""
    begun: int = 0
    """Begun samples, among those held or reported as completed here. Used only with a reserve."""
    begins_per_s: int = 0
    """Most samples that the member begins in a second."""


@dataclass(frozen=True, kw_only=True)
class SampleAnswer:
    """Answer to a request. An answer without the wanted range, and not `exhausted`, means that
    nothing can be leased now."""

    range: LedgerRange | None
    exhausted: bool
    reserve_max: int = 0
    """Samples that the member may hold, so that others get a share. 0: any number."""
    not_held: Sequence[LedgerRange] = ()
    """Claimed ranges that the member does not hold, and must not begin."""
    is_news: bool = True
    """True if ranges or counts of the ledger changed, or the incarnation is new."""


@dataclass(frozen=True, kw_only=True)
class EpochCounts:
    """Counts of samples in one epoch of the data. `returned` counts a sample each time that its
    lease is returned."""

    epoch: int
    completed: int
    in_flight: int
    returned: int


@dataclass(frozen=True, kw_only=True)
class LedgerCounts:
    """Counts of samples over all epochs, and for each of the newest ones."""

    dataset_size: int
    num_epochs: int
    completed: int
    in_flight: int
    returned: int
    ignored: int
    """Samples reported as completed by members that did not hold them."""
    exhausted: bool
    epochs: tuple[EpochCounts, ...]

    @property
    def repeated_max(self) -> int:
        """Upper bound on the samples trained on twice. A lost member may have trained on what it
        held, and a member that reports samples it did not hold trained on them."""
        return self.returned + self.ignored


class StaleRequest(Exception):
    """Raised for a request older than the member's latest one; nothing was changed."""

    def __init__(self, sequence: int, newest: int) -> None:
        super().__init__(f"request {sequence} arrived after request {newest}")
        self.sequence = sequence
        self.newest = newest


class TooManyRanges(Exception):
    """Raised if a member holds too many separate ranges to get another; nothing was changed."""
