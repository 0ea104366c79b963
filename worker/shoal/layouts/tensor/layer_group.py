"""Collectives of ranks that compute layers together: all-reduce, all-gather, broadcast and so on.

Ranks of one machine write values into memory, pass one barrier (`_meet`), and read. Two sets of
slots, used in turn, are enough: while a rank reads, no other rank passes the next barrier. A set
has a slot of `SLOT_BYTES` for each rank. A barrier's word is the number of the exchange, then the
number of the value's elements (40 bits).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.abortable.reduce_scatter import reduce_scatter
from shoal.backends.abortable.waiter import wait_abortable
from shoal.backends.process_group.transports import is_gloo
from shoal.backends.shared_memory.memory import SharedMemory
from shoal.backends.shared_memory.opening import share_memory
from shoal.layouts.layer_exchanges import ExchangeSite, LayerExchanges
from shoal.torch_private.c10d import reduce_scatter_single, timeout_of
from shoal_proto.errors import GenerationBroken

SLOT_BYTES = 4 * 1024 * 1024
"""Limit of one rank's value; larger values go over Gloo. Unwritten pages take no memory."""
NUM_SETS = 2
_SIZE_BITS = 40


class TensorGroup:
    """Tensor group of a rank. All ranks must call the same methods in the same order, on one thread
    at a time, except `cut` and `num_barriers`. Raises the group's errors; GenerationBroken after
    `release`."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        exchanges: LayerExchanges | None = None,
    ) -> None:
        self._exchanges = exchanges or LayerExchanges()
        self.rank, self.size = group.rank(), group.size()
        self._group: dist.ProcessGroup | None = group
        self._device = device
        self._may_share = self.size > 1 and device.type == "cpu" and is_gloo(group)
        self._num_steps = 0
        self._memory: SharedMemory | None = None
        self._slots = torch.empty(0, dtype=torch.uint8)
        self._set = self._exchange_number = 0
        self._reason = ""

    def of_layer(self, name: str) -> "LayerGroup":
        """Return the group for the collectives of one layer."""
        return LayerGroup(ranks=self, site=self._exchanges.add_site(name))

    def begin(self) -> None:
        """Begin a step. The second step sets up shared memory, and is collective: in the first step
        the set-up would delay a recovery."""
        if self._num_steps == 1 and self._may_share:
            self._share()
        self._num_steps += 1

    def _share(self) -> None:
        group = self._open_group()
        limit_s = timeout_of(group, self._device)
        num_bytes = NUM_SETS * self.size * SLOT_BYTES
        self._memory = memory = share_memory(group, num_bytes, limit_s)
        if memory is None:
            return
        if self._reason:
            memory.cut(self._reason)
        self._slots = torch.frombuffer(memory.data, dtype=torch.uint8)

    @property
    def num_barriers(self) -> int:
        """Number of barriers in memory so far. Thread-safe."""
        memory = self._memory
        return memory.num_barriers if memory is not None else 0

    def set_exchange(self, exchange: int) -> None:
        """Set the number of the next collective, as its `ExchangeSite` gave it."""
        self._exchange_number = exchange

    def all_reduce(self, value: Tensor) -> Tensor:
        """Return the sum over the ranks. In shared memory every rank adds up all values itself."""
        rows = self._shared_rows(value)
        if rows is not None:
            return torch.sum(rows, 0, dtype=value.dtype).view(value.shape)
        total = value.clone(memory_format=torch.contiguous_format)
        self._await(dist.all_reduce, total)
        return total

    def all_gather(self, own: Tensor) -> Sequence[Tensor]:
        """Return each rank's value, all of one shape, valid until the next collective."""
        rows = self._shared_rows(own)
        if rows is not None:
            return rows.view(self.size, *own.shape).unbind()
        parts = [own.new_empty(own.shape) for _ in range(self.size)]
        self._await(dist.all_gather, parts, own.contiguous())
        return parts

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """Return the sum of this rank's part; `parts` has a part for each rank."""
        rows = self._shared_rows(parts)
        if rows is not None:
            mine = rows.view(self.size, *parts.shape)[:, self.rank]
            return torch.sum(mine, 0, dtype=parts.dtype)
        whole, own = parts.flatten(0, 1), torch.empty_like(parts[0])
        if whole.device.type != "cpu":
            self._await(reduce_scatter_single, own, whole)
        else:
            # Waits for Gloo's own reduce-scatter cannot be aborted.
            reduce_scatter(own, whole, self._open_group(), dist.ReduceOp.SUM)
        return own

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors, which have one dtype, with the first rank's."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        rows = self._shared_rows(flat)
        if rows is not None:
            flat = rows[0]
        else:
            self._await(dist.broadcast, flat, group_src=0)
        _copy_parts(flat, tensors)

    @torch.no_grad()
    def sum_packed(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over the ranks, in place, with one collective for each dtype."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            _copy_parts(self.all_reduce(flat), alike)

    def cut(self, reason: str) -> None:
        """See `SharedMemory.cut`. Thread-safe."""
        self._reason = reason
        memory = self._memory
        if memory is not None:
            memory.cut(reason)

    def release(self) -> None:
        """Drop the process group and the memory: modules may keep this object. May be called
        twice."""
        self._group, self._may_share = None, False
        self._slots = torch.empty(0, dtype=torch.uint8)
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _open_group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise GenerationBroken("a layer was called after its generation had ended")
        return self._group

    def _await(self, collective: Any, *tensors: Any, **options: Any) -> None:
        group = self._open_group()
        wait_abortable(collective(*tensors, group=group, async_op=True, **options), group)

    def _shared_rows(self, value: Tensor) -> Tensor | None:
        """Share values in memory: return one flat row for each rank, valid until the next
        collective. None, on all ranks, if the value has to go over the group."""
        memory = self._memory
        if memory is None:
            return None
        count, width = value.numel(), value.element_size()
        if value.nbytes > SLOT_BYTES:
            self._meet(memory, count)
            return None
        slot_elements = SLOT_BYTES // width
        rows = self._slots.view(value.dtype).as_strided(
            (self.size, count), (slot_elements, 1), self._set * self.size * slot_elements
        )
        rows[self.rank].view(value.shape).copy_(value)
        self._meet(memory, count)
        self._set = (self._set + 1) % NUM_SETS
        return rows

    def _meet(self, memory: SharedMemory, size: int) -> None:
        """Wait for all ranks; afterwards each can read what any of them wrote before. Records ranks
        that meet for different layers or sizes."""
        message = self._exchange_number << _SIZE_BITS | size
        messages = memory.gather_words(message)
        if any(each != message for each in messages):
            same = all(each >> _SIZE_BITS == self._exchange_number for each in messages)
            self._exchanges.stop_at_mismatch(size if same else None)


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Ranks that compute one layer together."""

    ranks: TensorGroup
    site: ExchangeSite

    def all_reduce(self, value: Tensor, *, backward: bool = False) -> Tensor:
        """See `TensorGroup`. `backward`: the value is a gradient."""
        self._note(backward)
        return self.ranks.all_reduce(value)

    def all_gather(self, own: Tensor, *, backward: bool = False) -> Sequence[Tensor]:
        self._note(backward)
        return self.ranks.all_gather(own)

    def reduce_scatter(self, parts: Tensor, *, backward: bool = False) -> Tensor:
        self._note(backward)
        return self.ranks.reduce_scatter(parts)

    def _note(self, backward: bool) -> None:
        self.ranks.set_exchange(self.site.gradient() if backward else self.site.value())


def _copy_parts(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
