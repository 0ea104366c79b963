"""Check if the gradients of a step are finite, with one answer for all ranks."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.backends.abortable.waiter import all_reduce
from shoal.layouts.gradients import name_of_fault
from shoal.model.losses import PendingLosses
from shoal.model.not_finite import gradient_not_finite, others_not_finite, sum_not_finite

# OWN: a rank's gradients were not finite before they were reduced; GIVEN: only reduced ones.
GIVEN, OWN = 1.0, 2.0
_LOSS = "the loss"


class NonFiniteCheck:
    """Exchange of one flag for each rank, in one small message a step over all ranks. Messages that
    reduce gradients cannot carry the flags: they go along one dimension of the mesh only."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        own_fault: Callable[[], str] = lambda: "",
    ) -> None:
        """`own_fault`: for layouts that do not call `scan`. Returns the name of a parameter with
        own gradients that were not finite; empty if there is none."""
        self._group, self._device, self._own_fault = group, device, own_fault
        self.losses = PendingLosses()
        """Losses of this rank. A loss that is not finite counts as the rank's own fault."""
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.losses.begin()
        self._own = ""
        self._found = ""
        self._flags: Tensor | None = None
        self._has_looked = False

    def scan(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Examine this rank's own gradients of the whole step, before they are reduced."""
        self.check_after_pass(parameters)
        self._look_at_losses()
        self._has_looked = True

    def check_after_pass(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Examine the gradients of one pass, without earlier reduced gradients, unless `scan` has
        been called in this step."""
        if not self._has_looked:
            self._own = self._own or name_of_fault(parameters)

    def _look_at_losses(self) -> None:
        # Losses are read after the gradients: by then the device has computed both.
        self._own = self._own or ("" if self.losses.are_finite() else _LOSS)

    @property
    def is_own(self) -> bool:
        """True if this rank's own gradients or losses were not finite."""
        return bool(self._own)

    def flags(self, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        """Return a flag for each rank, to be summed over all ranks."""
        self._own = self._own or self._own_fault()
        self._found = self._own or name_of_fault(parameters)
        self._look_at_losses()
        self._found = self._found or self._own
        flags = torch.zeros(self._group.size(), device=self._device)
        if self._found:
            flags[self._group.rank()] = OWN if self._own else GIVEN
        return flags

    def set_flags(self, flags: Tensor) -> None:
        """Set the sum of all ranks' flags."""
        self._flags = flags

    def note_faults(self, are_own: Sequence[bool]) -> None:
        """Set the flags from another message, for layouts with `Layout.faults_are_own`. `are_own`:
        by rank, True if its own gradients were not finite."""
        self._flags = torch.tensor([OWN if each else 0.0 for each in are_own])

    def check(self, parameters: Mapping[str, nn.Parameter], step: int) -> None:
        """Raise on every rank unless all gradients are finite: NonFiniteGradient on ranks at fault,
        GenerationBroken on the others; NonFiniteGradient on all, if only a sum is not finite.
        `step`: number of committed steps. Collective, unless all ranks' flags are known."""
        if self._flags is None:
            flags = self.flags(parameters)
            if self._group.size() > 1:
                all_reduce(flags, self._group)
            self.set_flags(flags)
        assert self._flags is not None
        by_rank = self._flags.tolist()
        if not any(by_rank):
            return
        at_fault = [flag == OWN for flag in by_rank]
        if not any(at_fault):
            raise sum_not_finite(self._found, step)
        if at_fault[self._group.rank()]:
            self.losses.check(step)
            raise gradient_not_finite(self._own, step)
        raise others_not_finite(at_fault, step)
