"""What the ranks that compute layers together tell each other: sums, parts, a value of the first.

Over Gloo each of these is a collective of its own, whose end a thread of Gloo's hands to the
trainer through the interpreter. Ranks of one machine write what they have into memory that all can
read, and meet there once; then each adds up or picks out for itself. A rank may be at the next
collective while another still reads of this one, and at the one after that only when all have come
to the next: so there are two sets of places.

Nothing in a value says of which layer it is. So ranks also tell at each meeting in memory what they
have done so far: where a rank has left a layer out, or has values of another size, all of them know
before any computes with another's. Over Gloo that would take a message of its own, and is found by
what `LayerExchanges` notes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.abortable.last_word import meet_before_leaving
from shoal.backends.abortable.waiter import wait_abortable
from shoal.backends.network.gloo import is_gloo
from shoal.backends.shared_memory.memory import SharedMemory
from shoal.backends.shared_memory.opening import share_memory
from shoal.layouts.layer_exchanges import LayerExchanges, Site, different_layers
from shoal.torch_private.c10d import timeout_of
from shoal_proto.errors import GenerationBroken, InvalidSpec

PLACE_BYTES = 4 * 1024 * 1024
"""Of what one rank writes; larger values go over Gloo. A page that nobody writes to is none."""
NUM_SETS = 2
_DEED_BITS = 24
_PASSES_END = (1 << _DEED_BITS) - 1
_SO_FAR = (1 << 40) - 1
"""Of what was done so far, as much as goes into a word beside the last deed."""
_ODD = 1_000_003
"""What was done so far stays different, whatever follows, once it is."""

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TensorGroup:
    """Of one rank. All ranks call the same methods in the same order, on one thread but for `cut`
    and `num_met`. Errors are the group's as they come; GenerationBroken behind `release`."""

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
        self._names: list[str] = []
        self._may_share = self.size > 1 and device.type == "cpu" and is_gloo(group)
        self._num_steps = 0
        self._memory: SharedMemory | None = None
        self._places = torch.empty(0, dtype=torch.uint8)
        self._set = 0
        self._so_far = 0
        self._reason = ""

    def of_layer(self, name: str) -> "LayerGroup":
        """The same ranks, for the collectives of this layer."""
        self._names.append(name)
        return LayerGroup(ranks=self, number=len(self._names) - 1, site=self._exchanges.site(name))

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
        """So many times the ranks have met in memory. Any thread."""
        memory = self._memory
        return memory.num_met if memory is not None else 0

    def all_reduce(self, value: Tensor, deed: int) -> Tensor:
        """The sum over the ranks, added in their order in memory."""
        rows = self._written(value, deed)
        if rows is not None:
            return torch.sum(rows, 0, dtype=value.dtype).view(value.shape)
        total = value.clone(memory_format=torch.contiguous_format)
        self._await(dist.all_reduce, total)
        return total

    def all_gather(self, own: Tensor, deed: int) -> Sequence[Tensor]:
        """What each rank has, by rank, of one shape. To be read before the next collective."""
        rows = self._written(own, deed)
        if rows is not None:
            return rows.view(self.size, *own.shape).unbind()
        parts = [own.new_empty(own.shape) for _ in range(self.size)]
        self._await(dist.all_gather, parts, own.contiguous())
        return parts

    def reduce_scatter(self, parts: Tensor, deed: int) -> Tensor:
        """The sum over the ranks of the part that is this rank's: `parts` has one for each rank."""
        rows = self._written(parts, deed)
        if rows is not None:
            mine = rows.view(self.size, *parts.shape)[:, self.rank]
            return torch.sum(mine, 0, dtype=parts.dtype)
        whole = parts.flatten(0, 1)
        if whole.device.type != "cpu":
            own = torch.empty_like(parts[0])
            self._await(_reduce_scatter, own, whole)
            return own
        # Gloo's own sums up a copy of the whole on every rank, and cannot be waited for abortably.
        received = torch.empty_like(whole)
        self._await(dist.all_to_all_single, received, whole)
        return received.view_as(parts).sum(0)

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors, of one dtype, with those of the first rank."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        rows = self._written(flat, _PASSES_END)
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
            _spread(self.all_reduce(flat, _PASSES_END), alike)

    def finish(self) -> None:
        """Forward passes end here that nothing follows for which ranks would meet. Raises
        InvalidSpec, on all ranks, where another one goes on with them in memory."""
        self._did(_PASSES_END, 0)
        if self._memory is not None:
            self._meet(_PASSES_END, 0)

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

    def _written(self, value: Tensor, deed: int) -> Tensor | None:
        """What the ranks have written, by rank, flat; to be read before the next collective. None,
        on all ranks alike: it goes over the group."""
        count, width = value.numel(), value.element_size()
        self._did(deed, count)
        if self._memory is None:
            return None
        if value.nbytes > PLACE_BYTES:
            self._meet(deed, count)
            return None
        place = PLACE_BYTES // width
        rows = self._places.view(value.dtype).as_strided(
            (self.size, count), (place, 1), self._set * self.size * place
        )
        rows[self.rank].view(value.shape).copy_(value)
        self._meet(deed, count)
        self._set = (self._set + 1) % NUM_SETS
        return rows

    def _did(self, deed: int, size: int) -> None:
        self._so_far = ((self._so_far * _ODD + deed + 1) * _ODD + size) & _SO_FAR

    def _meet(self, deed: int, size: int) -> None:
        """Behind it all that ranks wrote before it can be read by all.

        Raises GenerationBroken as `SharedMemory.meet`; InvalidSpec, on all ranks, if they have not
        done the same so far.
        """
        memory = self._memory
        assert memory is not None, "it is shared"
        words = memory.meet(self._so_far << _DEED_BITS | deed)
        if len(set(words)) > 1:
            raise self._refused(memory, [word & _PASSES_END for word in words], size)

    def _refused(self, memory: SharedMemory, deeds: Sequence[int], size: int) -> InvalidSpec:
        sizes: Sequence[int] = ()

        def tell() -> None:
            nonlocal sizes
            sizes = memory.meet(size)

        meet_before_leaving(tell, GenerationBroken)
        said = [self._in_words(deed) for deed in deeds]
        if sizes:
            said = [f"{each}, {count} numbers" for each, count in zip(said, sizes, strict=True)]
        return different_layers("; ".join(f"rank {rank}: {each}" for rank, each in enumerate(said)))

    def _in_words(self, deed: int) -> str:
        if deed == _PASSES_END:
            return "done with its passes"
        number, is_backward = divmod(deed, 2)
        name = self._names[number] if number < len(self._names) else str(number)
        return f"at the {'gradients' if is_backward else 'outputs'} of {name or 'the model'}"


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """The ranks that compute one layer together."""

    ranks: TensorGroup
    number: int
    """Of the layer, among those of the group."""
    site: Site

    def all_reduce(self, value: Tensor, *, backward: bool = False) -> Tensor:
        """See `TensorGroup`; so are the others. `backward`: of gradients."""
        return self.ranks.all_reduce(value, self._deed(backward))

    def all_gather(self, own: Tensor, *, backward: bool = False) -> Sequence[Tensor]:
        return self.ranks.all_gather(own, self._deed(backward))

    def reduce_scatter(self, parts: Tensor, *, backward: bool = False) -> Tensor:
        return self.ranks.reduce_scatter(parts, self._deed(backward))

    def _deed(self, backward: bool) -> int:
        if backward:
            self.site.gradient()
        else:
            self.site.value()
        return 2 * self.number + backward


def _spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
