"""Averages of gradients over the members, checked for values that are not finite."""

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.abortable.waiter import AbortableWaiter, Completion, OngoingCollective
from shoal.compression.wire import Traffic
from shoal.model.gradients import are_finite, is_finite, is_on_host
from shoal.model.losses import PendingLosses
from shoal.model.not_finite import gradient_not_finite, others_not_finite, sum_not_finite
from shoal.torch_private.c10d import GradBucket
from shoal.torch_private.tensors import after_backward, foreach_norm


class GradientExchange:
    """Averages the gradients of one generation; `average` is its hook in DDP.

    DDP waits for completions made here, so that an abort of `waiter` frees the trainer. With NCCL a
    completion is set before the result is computed, so the backward pass ends with a wait for the
    works themselves.
    """

    aborts_for_good: ClassVar[bool] = False
    """True if another thread may begin collectives after an abort: their waits must end too."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        name_of: Callable[[Tensor], str],
        traffic: Traffic | None = None,
    ) -> None:
        self.waiter = AbortableWaiter(group, for_good=self.aborts_for_good)
        self._group = group
        self._world_size = group.size()
        self._alone = self._world_size == 1
        """True if this member's gradients are the averages already."""
        self._name_of = name_of
        self._traffic = traffic or Traffic()
        self._averaged: list[Tensor] = []
        self._in_progress: list[OngoingCollective] = []
        self.losses = PendingLosses()
        """Losses of this member on a GPU. If one is not finite, no average is finite."""
        self._fault = ""
        self._norms: list[tuple[Tensor, Tensor]] = []
        """Parameters on a GPU, each with the largest magnitude of this member's own gradient."""
        self._complete = False

    def average(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        self._check_own(bucket)
        if self.losses.excess is not None:
            gradients[:1].add_(self.losses.excess)
        # DDP sends its buckets in order.
        self._complete = self._complete or bucket.is_last()
        if self._alone:
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(gradients)
            return done
        self._averaged.append(gradients)
        completion = self._begin_average(bucket)
        if bucket.is_last():
            after_backward(self._await_averages)
        return completion.then(partial(_averaged, gradients))

    def _check_own(self, bucket: GradBucket) -> None:
        gradients = bucket.buffer()
        if not is_on_host(gradients):
            # Reading a norm would make the backward pass wait for the GPU.
            norms = foreach_norm(bucket.gradients(), math.inf)
            self._norms.extend(zip(bucket.parameters(), norms, strict=True))
        elif not self._fault and not is_finite(gradients):
            pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
            self._fault = next(self._name_of(p) for p, g in pairs if not is_finite(g))

    def _await_averages(self) -> None:
        in_progress, self._in_progress = self._in_progress, []
        for each in in_progress:
            each.wait()

    def _begin_average(self, bucket: GradBucket) -> Completion:
        gradients = bucket.buffer()
        self._traffic.count_plain(gradients, self._world_size)
        self._traffic.count_all_reduce(gradients, self._world_size)
        gradients.div_(self._world_size)
        work = dist.all_reduce(gradients, group=self._group, async_op=True)
        assert work is not None
        in_progress = self.waiter.track(work)
        self._in_progress.append(in_progress)
        return in_progress.completion

    @property
    def complete(self) -> bool:
        """True if the average of all gradients was begun since `begin_pass` or `begin`."""
        return self._complete

    def begin_pass(self) -> None:
        """Begin a backward pass. `complete` is true again only if this pass itself reduces all
        gradients: DDP reduces only in the first backward pass after a forward pass."""
        self._complete = False

    def begin(self, step: int) -> None:
        """Begin a step; `step` steps are committed."""
        self._traffic.begin_step()
        self._in_progress.clear()
        self.waiter.forget()
        self.losses.begin()
        self.forget()

    def forget(self) -> None:
        """Forget the gradients of earlier passes, which the script has dropped."""
        self._averaged.clear()
        self._fault = ""
        self._norms.clear()
        self._complete = False

    def has_finite_averages(self) -> bool:
        """True if all averages are finite; the same on all ranks. A GradScaler skips a step for
        which this is False."""
        self._traffic.end_step()
        return are_finite(self._averaged) and not (self._alone and self._own_fault())

    def check(self, step: int) -> None:
        """Raise on every rank unless the averages are finite.

        Raises NonFiniteGradient on members whose own gradient or loss is not finite, and on all
        members if only the sum is not. Raises GenerationBroken on the other members, as the members
        at fault leave.
        """
        if are_finite(self._averaged) and not (self._alone and self._own_fault()):
            self._traffic.end_step()
            return
        # Averages are the same on all ranks, so all of them begin this collective.
        faults = torch.zeros(self._world_size, dtype=torch.int64)
        faults[self._group.rank()] = int(bool(self._own_fault()))
        self.waiter.wait(dist.all_reduce(faults, group=self._group, async_op=True))
        self.losses.check(step)
        if self._fault:
            raise gradient_not_finite(self._fault, step)
        if not int(faults.sum()):
            raise sum_not_finite("", step)
        raise others_not_finite(faults.tolist(), step)

    def _own_fault(self) -> str:
        """Return the name of a parameter whose gradient on this member, before it was averaged, is
        not finite, or "the loss"; empty if all are finite."""
        if self._norms:
            norms, self._norms = self._norms, []
            if not self._fault and not are_finite([norm for _, norm in norms]):
                self._fault = next(self._name_of(p) for p, norm in norms if not is_finite(norm))
        if not self._fault and not self.losses.are_finite():
            self._fault = "the loss"
        return self._fault


def _averaged(gradients: Tensor, completion: Completion) -> Tensor:
    reason = completion.value()
    if reason:
        raise RuntimeError(reason)
    return gradients
