"""Gradients averaged over the members, and who is at fault when the average is not a number."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from shoal.compression.wire import Traffic
from shoal_proto.errors import GenerationBroken, NonFiniteGradient

Gate = torch.futures.Future[str]
"""What a waiting thread is let through: the reason if what it waited for has failed, or ""."""


class GradientExchange:
    """Averages the gradients of one generation; `average` is its hook in DDP.

    What DDP waits for is a gate of our own behind Gloo's work: a write to a connection that was
    just reset can leave Gloo waiting for as long as a collective may take, with nothing left to
    shut down. `give_up` opens the gate, and the trainer goes on without that thread.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name_of: Callable[[Tensor], str],
        traffic: Traffic | None = None,
    ) -> None:
        self._group = group
        self._name_of = name_of
        self._traffic = traffic or Traffic()
        self._averaged: list[Tensor] = []
        self._fault = ""
        self._complete = False
        self._lock = threading.Lock()
        self._gates: list[Gate] = []

    def average(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        if not self._fault and not is_finite(gradients):
            pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
            self._fault = next(self._name_of(p) for p, g in pairs if not is_finite(g))
        self._averaged.append(gradients)
        # DDP sends its buckets in order, the last one only behind all others.
        self._complete = self._complete or bucket.is_last()
        return self._begin_average(bucket).then(partial(_averaged, gradients))

    def _begin_average(self, bucket: GradBucket) -> Gate:
        """Average the bucket in place; the gate opens when that is done or has failed."""
        gradients = bucket.buffer()
        world_size = self._group.size()
        self._traffic.count_plain(gradients, world_size)
        self._traffic.count_all_reduce(gradients, world_size)
        gradients.div_(world_size)
        work = dist.all_reduce(gradients, group=self._group, async_op=True)
        assert work is not None
        return self._gate_behind(work)

    def _new_gate(self) -> Gate:
        gate: Gate = torch.futures.Future()
        self._gates.append(gate)
        return gate

    def _gate_behind(self, work: dist.Work) -> Gate:
        """A gate that opens when the collective has ended, well or not."""
        gate = self._new_gate()
        work.get_future().add_done_callback(partial(self._finished, gate))
        return gate

    def _finished(self, gate: Gate, future: torch.futures.Future[Any]) -> None:
        """Gloo's thread is done with a collective."""
        try:
            future.value()
            reason = ""
        except RuntimeError as error:
            reason = str(error)
        self._open(gate, reason)

    def _open(self, gate: Gate, reason: str) -> None:
        with self._lock:
            if not gate.done():
                gate.set_result(reason)

    @property
    def waits(self) -> bool:
        """Whether a bucket is still on its way. Any thread."""
        return any(not gate.done() for gate in list(self._gates))

    def give_up(self, reason: str) -> None:
        """Let nobody wait for Gloo any longer. Any thread."""
        for gate in list(self._gates):
            self._open(gate, f"gloo did not end what it did before the cut: {reason}")

    @property
    def complete(self) -> bool:
        """Whether all gradients were averaged since `begin`."""
        return self._complete

    def begin(self, step: int) -> None:
        """Forget the last step; `step` are committed."""
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
            self._traffic.end_step()
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


def _averaged(gradients: Tensor, gate: Gate) -> Tensor:
    reason = gate.value()
    if reason:
        raise RuntimeError(reason)
    return gradients


__all__ = ["Gate", "GradientExchange", "is_finite"]
