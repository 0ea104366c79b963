"""Collectives of ranks that compute layers together: sums, parts, a value of the first rank.

Over Gloo each of these is a collective of its own, whose end a thread of Gloo's hands to the
trainer through the interpreter. Ranks of one machine write what they have into memory that all can
read, and meet there once; then each adds up or picks out for itself. A rank may be at the next
collective while another still reads of this one, and at the one after that only when all have come
to the next: so there are two sets of places.

Nothing in a value says of which layer it is. For which layers a rank meets others, in memory and
over Gloo, is noted in `LayerExchanges`; and so it is where values that meet in memory differ in
size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.abortable.waiter import wait_abortable
from shoal.backends.process_group.transports import is_gloo
from shoal.backends.shared_memory.memory import SharedMemory
from shoal.backends.shared_memory.opening import share_memory
from shoal.layouts.layer_exchanges import ExchangeSite, LayerExchanges
from shoal.torch_private.c10d import reduce_scatter_single, timeout_of
from shoal_proto.errors import GenerationBroken

PLACE_BYTES = 4 * 1024 * 1024
"""Bytes for the values of one rank; larger ones go over Gloo. Unwritten pages take no memory."""
NUM_SETS = 2
_SIZE_BITS = 40


class TensorGroup:
    """Group as one rank sees it. All ranks call the same methods in order, on one thread
    but for `cut` and `num_met`. Raises the group's errors; GenerationBroken after `release`."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        exchanges: LayerExchanges | None = None,
    ) -> None:
        """`exchanges`: where it is noted for which layers these ranks meet."""
        self._exchanges = exchanges or LayerExchanges()
        self.rank, self.size = group.rank(), group.size()
        self._group: dist.ProcessGroup | None = group
        self._device = device
        self._may_share = self.size > 1 and device.type == "cpu" and is_gloo(group)
        self._num_steps = 0
        self._memory: SharedMemory | None = None
        self._places = torch.empty(0, dtype=torch.uint8)
        self._set = self._exchange_number = 0
        self._reason = ""

    def of_layer(self, name: str) -> "LayerGroup":
        """The same ranks, for the collectives of this layer."""
        return LayerGroup(ranks=self, site=self._exchanges.site(name))

    def begin(self) -> None:
        """A step begins. Collective in the second one: from there on ranks of one machine meet in
        memory. In the first one, members stand still that were just left by another."""
        if self._num_steps == 1 and self._may_share:
            self._share()
        self._num_steps += 1

    def _share(self) -> None:
        group = self._of_generation()
        limit_s = timeout_of(group, self._device)
        num_bytes = NUM_SETS * self.size * PLACE_BYTES
        self._memory = memory = share_memory(group, num_bytes, limit_s)
        if memory is None:
            return
        if self._reason:
            memory.cut(self._reason)
        self._places = torch.frombuffer(memory.room, dtype=torch.uint8)

    @property
    def num_met(self) -> int:
        """Number of times that the ranks have met in memory. Any thread."""
        memory = self._memory
        return memory.num_met if memory is not None else 0

    def set_exchange(self, exchange: int) -> None:
        """Set the exchange that the next collective is for: a number of `ExchangeSite`."""
        self._exchange_number = exchange

    def all_reduce(self, value: Tensor) -> Tensor:
        """The sum over the ranks, added in their order in memory."""
        rows = self._written(value)
        if rows is not None:
            return torch.sum(rows, 0, dtype=value.dtype).view(value.shape)
        total = value.clone(memory_format=torch.contiguous_format)
        self._await(dist.all_reduce, total)
        return total

    def all_gather(self, own: Tensor) -> Sequence[Tensor]:
        """Gather each rank's value, by rank, of one shape. Read it before the next collective."""
        rows = self._written(own)
        if rows is not None:
            return rows.view(self.size, *own.shape).unbind()
        parts = [own.new_empty(own.shape) for _ in range(self.size)]
        self._await(dist.all_gather, parts, own.contiguous())
        return parts

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """The sum over the ranks of the part that is this rank's: `parts` has one for each rank."""
        rows = self._written(parts)
        if rows is not None:
            mine = rows.view(self.size, *parts.shape)[:, self.rank]
            return torch.sum(mine, 0, dtype=parts.dtype)
        whole = parts.flatten(0, 1)
        if whole.device.type != "cpu":
            own = torch.empty_like(parts[0])
            self._await(reduce_scatter_single, own, whole)
            return own
        # Gloo's own sums up a copy of the whole on every rank, and cannot be waited for abortably.
        received = torch.empty_like(whole)
        self._await(dist.all_to_all_single, received, whole)
        return received.view_as(parts).sum(0)

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors, of one dtype, with those of the first rank."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        rows = self._written(flat)
        if rows is not None:
            flat = rows[0]
        else:
            self._await(dist.broadcast, flat, group_src=0)
        _spread(flat, tensors)

    @torch.no_grad()
    def sum_packed(self, tensors: Sequence[Tensor]) -> None:
        """Make each the sum over the ranks, in one collective for each dtype."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            _spread(self.all_reduce(flat), alike)

    def cut(self, reason: str) -> None:
        """See `SharedMemory.cut`. Any thread."""
        self._reason = reason
        memory = self._memory
        if memory is not None:
            memory.cut(reason)

    def release(self) -> None:
        """Let go of the group, which modules may refer to for longer. May be called twice."""
        self._group, self._may_share = None, False
        self._places = torch.empty(0, dtype=torch.uint8)
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _of_generation(self) -> dist.ProcessGroup:
        if self._group is None:
            raise GenerationBroken("layers of a generation that is over were called")
        return self._group

    def _await(self, collective: Any, *tensors: Any, **options: Any) -> None:
        group = self._of_generation()
        wait_abortable(collective(*tensors, group=group, async_op=True, **options), group)

    def _written(self, value: Tensor) -> Tensor | None:
        """Share values in memory, by rank, flat; to be read before the next collective. None, on
        all ranks alike, if the value has to go over the group."""
        memory = self._memory
        if memory is None:
            return None
        count, width = value.numel(), value.element_size()
        if value.nbytes > PLACE_BYTES:
            self._meet(memory, count)
            return None
        place = PLACE_BYTES // width
        rows = self._places.view(value.dtype).as_strided(
            (self.size, count), (place, 1), self._set * self.size * place
        )
        rows[self.rank].view(value.shape).copy_(value)
        self._meet(memory, count)
        self._set = (self._set + 1) % NUM_SETS
        return rows

    def _meet(self, memory: SharedMemory, size: int) -> None:
        """Meet all ranks; after it all can read what any wrote before. Raises GenerationBroken as
        `SharedMemory.meet`. Ranks that come for different layers, or with values of different
        sizes, go on; all ranks are refused when their records are compared."""
        word = self._exchange_number << _SIZE_BITS | size
        words = memory.meet(word)
        if any(each != word for each in words):
            same = all(each >> _SIZE_BITS == self._exchange_number for each in words)
            self._exchanges.differ(size if same else None)


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """The ranks that compute one layer together."""

    ranks: TensorGroup
    site: ExchangeSite

    def all_reduce(self, value: Tensor, *, backward: bool = False) -> Tensor:
        """See `TensorGroup`; so are the others. `backward`: of gradients."""
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


def _spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
