"""Check if the gradients of a step are finite: one answer, the same on every rank."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.backends.abortable.waiter import wait_abortable
from shoal.layouts.gradients import gradient_not_finite, name_of_fault, sum_not_finite
from shoal.model.losses import UnseenLosses
from shoal_proto.errors import GenerationBroken

# What a rank says of its gradients that are not finite: they were given to it, or are its own.
GIVEN, OWN = 1.0, 2.0
_LOSS = "the loss"


class NonFiniteCheck:
    """Findings of each rank in its gradients, sent to all ranks in one small message a step.

    No earlier message can tell it: each goes along one dimension of the mesh only, and may itself
    make a sum that is not finite. The norm's message comes late enough and goes to all ranks, so a
    step that clips sends no other.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self.losses = UnseenLosses()
        """Losses of this rank: one that is not finite counts as its own fault."""
        self.begin()

    def begin(self) -> None:
        """A new step: nothing is known."""
        self.losses.begin()
        self._own = ""
        self._found = ""
        self._flags: Tensor | None = None
        self._has_looked = False

    def look(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Look at this rank's own gradients, before those of others come in: all of the step."""
        self.check_after_pass(parameters)
        self._look_at_losses()
        self._has_looked = True

    def check_after_pass(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Look at what one pass of several has given, unless `look` has seen all of the step. Those
        of earlier passes, in which others have had a part, must not be among the gradients."""
        if not self._has_looked:
            self._own = self._own or name_of_fault(parameters)

    def _look_at_losses(self) -> None:
        # After the gradients, which have been waited for.
        self._own = self._own or ("" if self.losses.are_finite() else _LOSS)

    @property
    def is_own(self) -> bool:
        """True if this rank's own gradients were not finite."""
        return bool(self._own)

    def found(self, name: str) -> None:
        """Set the parameter whose gradients on this rank were not finite, or empty; in place of
        `look`, if the backward pass has looked."""
        self._own = name

    def flags(self, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        """Return this rank's message, to be summed over all ranks: a number for each."""
        self._found = self._own or name_of_fault(parameters)
        self._look_at_losses()
        self._found = self._found or self._own
        flags = torch.zeros(self._group.size(), device=self._device)
        if self._found:
            flags[self._group.rank()] = OWN if self._own else GIVEN
        return flags

    def set_flags(self, flags: Tensor) -> None:
        """Set the sum of all ranks' messages."""
        self._flags = flags

    def note_faults(self, are_own: Sequence[bool]) -> None:
        """Set the findings that ranks sent in another message, if only their own gradients can be
        at fault: see `Layout.faults_are_own`."""
        self._flags = torch.tensor([OWN if each else 0.0 for each in are_own])

    def check(self, parameters: Mapping[str, nn.Parameter], step: int) -> None:
        """Raise on every rank unless the gradients of all ranks are finite. Collective, unless the
        ranks have been heard already; `step` are committed.

        NonFiniteGradient to the ranks whose own gradients are not, which leave with it, and
        GenerationBroken to all others; NonFiniteGradient to all where only a sum is not.
        """
        if self._flags is None:
            flags = self.flags(parameters)
            if self._group.size() > 1:
                wait_abortable(
                    dist.all_reduce(flags, group=self._group, async_op=True), self._group
                )
            self.set_flags(flags)
        assert self._flags is not None
        by_rank = self._flags.tolist()
        if not any(by_rank):
            return
        at_fault = [rank for rank, flag in enumerate(by_rank) if flag == OWN]
        if not at_fault:
            raise sum_not_finite(self._found, step)
        if self._group.rank() in at_fault:
            self.losses.check(step)
            raise gradient_not_finite(self._own, step)
        ranks = ", ".join(map(str, at_fault))
        raise GenerationBroken(
            f"the gradient of rank {ranks} is not finite at step {step}; it leaves"
        )
