"""Steps that some shards refused as too stale: what to push again, and when to give up."""

from collections.abc import Mapping
from typing import NoReturn

from torch import Tensor, nn

from shoal.strategies.synchronous.step_passes import StepPasses
from shoal_proto.errors import StalePush

MAX_REDONE = 16
"""So often one step is taken anew on fresh values before its member gives up."""


class StepRefusals:
    """Those of the step under way."""

    def __init__(self) -> None:
        self.shards: frozenset[int] = frozenset()
        """Which refused it last; what the others have counts."""
        self.num_redone = 0
        self._passes = StepPasses()

    def begin(self, model: nn.Module, untrained: Mapping[str, Tensor]) -> None:
        """A step begins that may be refused. What it changes of the model's buffers, and of these
        parameters, is undone then; those that are trained are the servers'."""
        self._passes.begin(model, untrained)

    @property
    def may_redo(self) -> bool:
        """Whether the step is to be taken once more."""
        return self.num_redone <= MAX_REDONE

    def refused(self, stale: Mapping[int, StalePush], step: int) -> None:
        """So many steps were taken before this one. Raises StateLost as `check_whole`."""
        self.shards = frozenset(stale)
        self.num_redone += 1
        self._passes.undo()
        self._passes.check_whole(step)

    def over(self) -> None:
        """The step was taken."""
        self.shards, self.num_redone = frozenset(), 0
        if self._passes.in_step:
            self._passes.settle()
            self._passes.commit()

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
