"""All-gathers of fully_shard: in shared memory or as torch has them, and never for ever."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.abortable.waiter import wait_abortable
from shoal.layouts.sharded.layer_order import PASSES_END, LayerOrder, NotedOrder, to_gather
from shoal.layouts.sharded.shared_slots import SharedSlots
from shoal.torch_private.fsdp import DefaultAllGather


class SharedMemoryAllGather(DefaultAllGather):
    """Gathers in the slots, if there are any with room, and else as torch does."""

    def __init__(self, slots: SharedSlots | None, number: int = 0) -> None:
        """`number`: of the group of parameters, among those of the model."""
        self._slots, self._number = slots, number
        self.order: LayerOrder | NotedOrder | None = None
        """Order check for ranks that gather over Gloo or on a device."""

    def release(self) -> None:
        """Hold the slots no longer: modules keep this in circles, and with it the memory, until
        Python looks for those. What is gathered from here on goes as torch has it."""
        self._slots = self.order = None

    def finish(self) -> None:
        """Forward passes end here. Raises, over Gloo, where another rank goes on with them."""
        if self.order is not None:
            self.order.check(PASSES_END)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._slots is not None:
            room = self._slots.to_gather(math.prod(size) * dtype.itemsize)
            if room is not None:
                return torch.frombuffer(room, dtype=dtype)
        empty: Tensor = super().allocate(size, dtype=dtype, device=device)
        return empty

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        # `input_tensor` is this rank's place in `output_tensor`.
        slots = self._slots
        gathering = slots.gather(output_tensor, self._number) if slots is not None else None
        if gathering is not None:
            # torch waits for it before it copies from the output, asked to or not.
            return gathering
        if self.order is not None:
            self.order.check(to_gather(self._number))
        work = super().__call__(output_tensor, input_tensor, group, async_op=True)
        if async_op:
            return work
        wait_abortable(work, group)
        return None
