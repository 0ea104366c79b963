"""Reduce-scatter after which a value that is not finite on one rank is seen by all ranks."""

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.abortable.reduce_scatter import reduce_scatter, sends_each_part_once
from shoal.backends.abortable.waiter import all_reduce
from shoal.layouts.sharded.layer_order import LayerOrder, RecordedOrder, sum_number
from shoal.layouts.sharded.shared_slots import SharedSlots
from shoal.model.gradients import bare_backward, is_finite, is_on_host
from shoal.model.losses import PendingLosses
from shoal.torch_private.fsdp import DefaultReduceScatter


class NanPropagatingReduceScatter(DefaultReduceScatter):
    """torch's reduce-scatter, but if one rank's gradients are not finite, all ranks get NaN: no
    rank trains on while another stops. The result is also averaged over `copies`, ranks with the
    same rows and other samples."""

    def __init__(self, parameter: str) -> None:
        self.parameter = parameter
        self.blind = False
        """True if this rank holds only padding, no rows, of some parameters."""
        self.slots: SharedSlots | None = None
        self.number = 0
        self.orders: list[LayerOrder | RecordedOrder] = []
        """Order checks: among the ranks of the sum, and over Gloo among `copies`."""
        self.copies: dist.ProcessGroup | None = None
        """Ranks that hold the same rows as this rank; None if no other rank does."""
        self.losses = PendingLosses()
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
        """Discard the results of the previous step."""
        self.own = False
        self.excess: Tensor | None = None
        """Zero if this rank's own gradients on a device were finite in each pass, else NaN; None if
        no gradients were on a device. Reading the value waits for all work queued there."""
        self.given_finite: list[Tensor] = []
        """Flags of a blind rank, on the device, one for each pass: True if its part of the sum is
        finite."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self._spread(input_tensor)
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

    def _spread(self, own: Tensor) -> None:
        if is_on_host(own):
            self.own = propagate_nan(own, self.losses) or self.own
            return
        excess = spread_nan(own, self.losses)
        self.excess = excess if self.excess is None else self.excess + excess


def own_fault(reductions: Iterable[NanPropagatingReduceScatter]) -> str:
    """Return the first parameter of a group with own gradients that were not finite; empty if there
    is none. Waits for a device once."""
    on_device = []
    for each in reductions:
        if each.own:
            return each.parameter
        if each.excess is not None:
            on_device.append((each.parameter, each.excess))
    if not on_device:
        return ""
    excesses = torch.stack([excess for _, excess in on_device]).tolist()
    pairs = zip(on_device, excesses, strict=True)
    return next((name for (name, _), excess in pairs if math.isnan(excess)), "")


def average(rows: Tensor, copies: dist.ProcessGroup) -> None:
    """Average the rows over the copies, in place. Collective among `copies`. NaN results only from
    NaN: infinities get one sign, and rows are divided before they are summed."""
    divisor = 1 << (copies.size() - 1).bit_length()
    rows.div_(divisor)
    torch.nan_to_num(rows, nan=math.nan, posinf=math.inf, neginf=math.inf, out=rows)
    all_reduce(rows, copies)
    rows.div_(copies.size() / divisor)


def propagate_nan(gradients: Tensor, losses: PendingLosses) -> bool:
    """Make all elements NaN, and return True, if an element or a loss is NaN or Inf."""
    if is_finite(gradients) and losses.are_finite():
        return False
    gradients.fill_(math.nan)
    return True


def spread_nan(gradients: Tensor, losses: PendingLosses) -> Tensor:
    """Make all elements NaN as `propagate_nan`, without waiting for the device. Returns NaN in
    float32, on the device, if an element or a loss was NaN or Inf, else 0."""
    largest = _largest(gradients)
    excess = largest - largest
    if losses.excess is not None:
        excess = excess + losses.excess
    gradients.add_(excess.to(gradients.dtype))
    return excess.float()


def _largest(numbers: Tensor) -> Tensor:
    """Return the largest absolute value; NaN if there is a NaN, 0 for no elements."""
    if not numbers.numel():
        return numbers.new_zeros(())
    largest: Tensor = torch.linalg.vector_norm(numbers, math.inf)
    return largest
