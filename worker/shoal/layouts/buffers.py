"""Buffers that ranks have computed from samples of their own, such as running means."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.backends.abortable.waiter import wait_abortable
from shoal.torch_private.modules import buffer_table, transient_buffers


class RunningBuffers:
    """The persistent buffers of a model that every rank holds.

    DDP gives all ranks those of the first with the next forward pass. Until then each rank would
    show those of its own samples, and after a loss the job would go on with another rank's.
    """

    def __init__(self, model: nn.Module) -> None:
        # Going through the modules of a model takes longer than to send a few buffers.
        self._tables = [
            (buffer_table(part), transient_buffers(part))
            for part in model.modules()
            if buffer_table(part)
        ]

    def share(self, group: dist.ProcessGroup) -> None:
        """Collective: give every rank those of the first. Nothing is sent where there are none."""
        if self._tables and group.size() > 1 and (buffers := list(self._each_once())):
            broadcast_packed(buffers, group)

    def _each_once(self) -> Iterator[Tensor]:
        known: set[int] = set()
        for table, passing in self._tables:
            for name, buffer in table.items():
                if buffer is not None and name not in passing and id(buffer) not in known:
                    known.add(id(buffer))
                    yield buffer


@torch.no_grad()
def broadcast_packed(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite the tensors, of any dtypes, with those of the group's first rank: one broadcast."""
    packed = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
    wait_abortable(dist.broadcast(packed, group=group, group_src=0, async_op=True), group)
    parts = torch.split(packed, [tensor.nbytes for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        # A part may begin where its dtype may not.
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
