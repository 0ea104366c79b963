"""Steps that some shards refused as too stale: what to push again, and when to give up."""

from collections.abc import Mapping
from typing import NoReturn

from shoal_proto.errors import StalePush

MAX_REDONE = 16
"""So often one step is taken anew on fresh values before its member gives up."""


class StepRefusals:
    """Those of the step under way."""

    def __init__(self) -> None:
        self.shards: frozenset[int] = frozenset()
        """Which refused it last; what the others have counts."""
        self.num_redone = 0

    @property
    def may_redo(self) -> bool:
        """Whether the step is to be taken once more."""
        return self.num_redone <= MAX_REDONE

    def refused(self, stale: Mapping[int, StalePush]) -> None:
        self.shards = frozenset(stale)
        self.num_redone += 1

    def over(self) -> None:
        """The step was taken."""
        self.shards, self.num_redone = frozenset(), 0

    def tell(self, step: int, refusal: StalePush) -> NoReturn:
        """Raise the refusal, or that there were too many."""
        if self.may_redo:
            raise refusal
        raise StalePush(
            f"step {step} was refused as too stale again and again",
            seen=f"{self.num_redone} times, at last with {refusal.seen}",
            expected=refusal.expected,
            fix="Raise reject_above, or let this member have smaller batches.",
        )
