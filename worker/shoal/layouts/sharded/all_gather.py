"""All-gathers of fully_shard, abortable: in shared memory, or else torch's own."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.abortable.waiter import wait_abortable
from shoal.layouts.layer_exchanges import PASSES_END
from shoal.layouts.sharded.layer_order import LayerOrder, RecordedOrder, gather_number
from shoal.layouts.sharded.shared_slots import SharedSlots
from shoal.torch_private.fsdp import DefaultAllGather


class SharedMemoryAllGather(DefaultAllGather):
    """All-gather in shared slots; torch's own if there are no slots or they are too small."""

    def __init__(self, slots: SharedSlots | None, number: int = 0) -> None:
        """`number`: index of the parameter group."""
        self._slots, self._number = slots, number
        self.order: LayerOrder | RecordedOrder | None = None
        """Order check for ranks that gather over Gloo or on a device."""

    def release(self) -> None:
        """Drop the slots, which reference cycles would keep. Later gathers are torch's own."""
        self._slots = self.order = None

    def finish(self) -> None:
        """End the forward passes. Over Gloo, a collective call: raises InvalidSpec on all ranks if
        a rank begins another layer instead."""
        if self.order is not None:
            self.order.check(PASSES_END)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._slots is not None:
            slot = self._slots.reserve_gather(math.prod(size) * dtype.itemsize)
            if slot is not None:
                return torch.frombuffer(slot, dtype=dtype)
        empty: Tensor = super().allocate(size, dtype=dtype, device=device)
        return empty

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        slots = self._slots
        gathering = slots.gather(output_tensor, self._number) if slots is not None else None
        if gathering is not None:
            # `async_op` is ignored: torch waits for the work before it copies from the output.
            return gathering
        if self.order is not None:
            self.order.check(gather_number(self._number))
        work = super().__call__(output_tensor, input_tensor, group, async_op=True)
        if async_op:
            return work
        wait_abortable(work, group)
        return None
