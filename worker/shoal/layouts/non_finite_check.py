"""Whether the gradients of a step are finite: one answer, and the same on every rank."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.backends.abortable.waiter import finish
from shoal.layouts.gradients import gradient_not_finite, name_of_fault, sum_not_finite
from shoal_proto.errors import GenerationBroken

# What a rank says of its gradients that are not finite: they were given to it, or are its own.
GIVEN, OWN = 1.0, 2.0


class Verdict:
    """What each rank found in its gradients, told to all ranks by one small message a step.

    No earlier message can tell it: each goes along one dimension of the mesh only, and may itself
    make a sum that is not finite. The norm's message comes late enough and goes to all ranks, so a
    step that clips sends no other.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self.begin()

    def begin(self) -> None:
        """A new step: nothing is known."""
        self._own = ""
        self._found = ""
        self._words: Tensor | None = None

    def look(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Look at this rank's own gradients, before those of others come in."""
        self._own = name_of_fault(parameters)

    def words(self, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        """This rank's part of the message, to be summed up over all ranks: a number for each."""
        self._found = self._own or name_of_fault(parameters)
        words = torch.zeros(self._group.size(), device=self._device)
        if self._found:
            words[self._group.rank()] = OWN if self._own else GIVEN
        return words

    def hear(self, words: Tensor) -> None:
        """What all ranks said."""
        self._words = words

    def check(self, parameters: Mapping[str, nn.Parameter], step: int) -> None:
        """Raise on every rank unless the gradients of all ranks are finite. Collective, unless the
        ranks have been heard already; `step` are committed.

        NonFiniteGradient to the ranks whose own gradients are not, which leave with it, and
        GenerationBroken to all others; NonFiniteGradient to all where only a sum is not.
        """
        if self._words is None:
            words = self.words(parameters)
            if self._group.size() > 1:
                finish(dist.all_reduce(words, group=self._group, async_op=True), self._group)
            self.hear(words)
        assert self._words is not None
        said = self._words.tolist()
        if not any(said):
            return
        at_fault = [rank for rank, word in enumerate(said) if word == OWN]
        if not at_fault:
            raise sum_not_finite(self._found, step)
        if self._group.rank() in at_fault:
            raise gradient_not_finite(self._own, step)
        ranks = ", ".join(map(str, at_fault))
        raise GenerationBroken(
            f"the gradient of rank {ranks} is not finite at step {step}; it leaves"
        )


__all__ = ["Verdict"]
