"""Reduce-scatter after which a value that is not finite on one rank is seen by all ranks."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.abortable.waiter import wait_abortable
from shoal.layouts.sharded.layer_order import LayerOrder, RecordedOrder, sum_number
from shoal.layouts.sharded.reduce_scatter import reduce_scatter, sends_each_part_once
from shoal.layouts.sharded.shared_slots import SharedSlots
from shoal.model.gradients import bare_backward, is_finite, is_on_host
from shoal.model.losses import PendingLosses
from shoal.torch_private.fsdp import DefaultReduceScatter


class NanPropagatingReduceScatter(DefaultReduceScatter):
    """torch's reduce-scatter, but if one rank's gradients are not finite, all ranks get NaN. Each
    rank gets only its own rows of the sum: without this, a rank whose rows are finite would train
    on while another stops. Spreading NaN costs one pass over the gradients, and no message. With
    `copies` the result is averaged over these ranks too: they hold the same rows, and used other
    samples."""

    def __init__(self, parameter: str) -> None:
        self.parameter = parameter
        """Name of the first parameter of the group."""
        self.blind = False
        """True if this rank holds only padding, no rows, of some parameters."""
        self.slots: SharedSlots | None = None
        """Slots in shared memory; None: the ranks share none."""
        self.number = 0
        """Index of the group of parameters in the model."""
        self.orders: list[LayerOrder | RecordedOrder] = []
        """Order checks: among the ranks of the sum, and over Gloo among `copies`."""
        self.copies: dist.ProcessGroup | None = None
        """The ranks that hold the same rows as this rank; None if no other rank does."""
        self.losses = PendingLosses()
        """Losses of this rank in the step; a loss that is not finite also spreads NaN."""
        self._filled: weakref.ref[Tensor] | None = None
        self.ours: Callable[[], bool] | None = None
        """Returns True if the pass in progress may produce gradients; None: any pass may."""
        self.forget()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory: in one call for whole gradients, in the next for this rank's part of their
        sum. Raises InvalidSpec for a backward pass that is not the session's."""
        if self.ours is not None and not self.ours():
            raise bare_backward()
        whole = self._filled() if self._filled is not None else None
        self._filled = None
        if whole is None and self.slots is not None:
            slot = self.slots.reserve_sum(math.prod(size) * dtype.itemsize)
            if slot is not None:
                whole = slot.view(dtype)
                self._filled = weakref.ref(whole)
                return whole
        empty: Tensor = super().allocate(size, dtype=dtype, device=device)
        return empty

    def forget(self) -> None:
        """Discard the results of the last step."""
        self.own = False
        """True if this rank's own gradients were not finite. Always False on a GPU, as reading the
        result would wait for the GPU."""
        self.given_finite: list[Tensor] = []
        """Flags of a blind rank, one for each pass: True if its part of the sum is finite. They
        stay on the device, as reading them waits for all work queued there."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self.own = propagate_nan(input_tensor, self.losses) or self.own
        work = None
        for order in self.orders:
            order.check(sum_number(self.number))
        if not async_op and sends_each_part_once(input_tensor, group, op):
            slots = self.slots
            if slots is None or not slots.reduce_scatter(
                output_tensor, input_tensor, op, self.number
            ):
                reduce_scatter(output_tensor, input_tensor, group, op)
        else:
            work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        if self.copies is not None:
            assert not async_op, "fully_shard reduces without async_op"
            average(output_tensor, self.copies)
        if self.blind:
            self.given_finite.append(_largest(output_tensor).isfinite())
        return work


def average(rows: Tensor, copies: dist.ProcessGroup) -> None:
    """Average the rows over the copies, in place. Collective among `copies`."""
    wait_abortable(dist.all_reduce(rows, group=copies, async_op=True), copies)
    rows.div_(copies.size())


def propagate_nan(gradients: Tensor, losses: PendingLosses) -> bool:
    """Make all elements NaN if an element or a loss is NaN or Inf; returns True if one was. On a
    GPU returns False without waiting."""
    if not is_on_host(gradients):
        spread_nan(gradients, losses)
        return False
    if is_finite(gradients) and losses.are_finite():
        return False
    gradients.fill_(math.nan)
    return True


def spread_nan(gradients: Tensor, losses: PendingLosses) -> None:
    """Spread NaN on a device without waiting for it: the host does not learn if one was found."""
    largest = _largest(gradients)
    excess = largest - largest
    if losses.excess is not None:
        excess = excess + losses.excess
    gradients.add_(excess.to(gradients.dtype))


def _largest(numbers: Tensor) -> Tensor:
    """Return the largest absolute value; NaN if there is a NaN, 0 for no elements. One pass in the
    numbers' own dtype: unlike a sum, a maximum of finite numbers does not overflow."""
    if not numbers.numel():
        return numbers.new_zeros(())
    largest: Tensor = torch.linalg.vector_norm(numbers, math.inf)
    return largest
