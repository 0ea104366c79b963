"""Gradients averaged over the members, and who is at fault when the average is not a number."""

import threading
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from shoal_proto.errors import GenerationBroken, NonFiniteGradient


class GradientExchange:
    """Averages the gradients of one generation; `average` is its hook in DDP.

    What DDP waits for is a gate of our own behind Gloo's work: a write to a connection that was
    just reset can leave Gloo waiting for as long as a collective may take, with nothing left to
    shut down. `give_up` opens the gate, and the trainer goes on without that thread.
    """

    def __init__(self, group: dist.ProcessGroup, name_of: Callable[[Tensor], str]) -> None:
        self._group = group
        self._name_of = name_of
        self._averaged: list[Tensor] = []
        self._fault = ""
        self._complete = False
        self._lock = threading.Lock()
        self._gates: list[torch.futures.Future[Tensor | str]] = []

    def average(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        if not self._fault and not is_finite(gradients):
            pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
            self._fault = next(self._name_of(p) for p, g in pairs if not is_finite(g))
        gradients.div_(self._group.size())
        self._averaged.append(gradients)
        # DDP sends its buckets in order, the last one only behind all others.
        self._complete = self._complete or bucket.is_last()
        work = dist.all_reduce(gradients, group=self._group, async_op=True)
        assert work is not None
        gate: torch.futures.Future[Tensor | str] = torch.futures.Future()
        self._gates.append(gate)
        work.get_future().add_done_callback(partial(self._finished, gate))
        return gate.then(_average)

    def _finished(
        self,
        gate: torch.futures.Future[Tensor | str],
        future: torch.futures.Future[list[Tensor]],
    ) -> None:
        """Gloo's thread is done with a bucket, well or not."""
        try:
            result: Tensor | str = future.value()[0]
        except RuntimeError as error:
            result = str(error)
        with self._lock:
            if not gate.done():
                gate.set_result(result)

    @property
    def waits(self) -> bool:
        """Whether a bucket is still on its way. Any thread."""
        return any(not gate.done() for gate in list(self._gates))

    def give_up(self, reason: str) -> None:
        """Let nobody wait for Gloo any longer. Any thread."""
        with self._lock:
            for gate in self._gates:
                if not gate.done():
                    gate.set_result(f"gloo did not end what it did before the cut: {reason}")

    @property
    def complete(self) -> bool:
        """Whether all gradients were averaged since `begin`."""
        return self._complete

    def begin(self) -> None:
        """Forget the last step."""
        self._averaged.clear()
        self._gates.clear()
        self._fault = ""
        self._complete = False

    def check(self, step: int) -> None:
        """Raise unless the averages are finite; the same members raise the same on all ranks.

        NonFiniteGradient where the local gradient was at fault, or on all ranks if only the sum
        was; GenerationBroken where another's was: it is about to leave.
        """
        if all(map(is_finite, self._averaged)):
            return
        # The averages are the same everywhere, so every rank comes here or none does.
        faults = torch.zeros(self._group.size(), dtype=torch.int64)
        faults[self._group.rank()] = int(bool(self._fault))
        dist.all_reduce(faults, group=self._group)
        if self._fault:
            raise NonFiniteGradient(
                f"the gradient of {self._fault} is not finite at step {step}",
                seen="NaN or Inf in this member's own gradient",
                expected="finite numbers",
                fix="Lower the learning rate, clip gradients, or look at the batch's samples.",
                details={"parameter": self._fault, "step": str(step)},
            )
        if not int(faults.sum()):
            raise NonFiniteGradient(
                f"the sum of all members' gradients is not finite at step {step}",
                seen="an overflow; each member's own gradient was finite",
                expected="finite numbers",
                fix="Scale the loss down or use a wider dtype.",
                details={"parameter": "", "step": str(step)},
            )
        ranks = [str(rank) for rank, fault in enumerate(faults.tolist()) if fault]
        raise GenerationBroken(
            f"the gradient of rank {', '.join(ranks)} is not finite at step {step}; it leaves"
        )


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are finite."""
    # A NaN or Inf anywhere makes the sum one, so the usual case is a single pass; the sum of
    # finite numbers can overflow, so only the exact test condemns.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def _average(gate: torch.futures.Future[Tensor | str]) -> Tensor:
    result = gate.value()
    if isinstance(result, str):
        raise RuntimeError(result)
    return result


__all__ = ["GradientExchange", "is_finite"]
