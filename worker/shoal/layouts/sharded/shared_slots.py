"""All-gathers and sums of fully_shard in shared memory, if all ranks are on one machine.

For an all-gather, each rank writes its rows into its part of a common slot. For a sum, each rank
writes into its own slot, and adds up its part of all slots. The barrier of a sum completes earlier
gathers too.

At each barrier, ranks announce which slots they still use, and compare digests of what they have
gathered and summed: no rank computes with rows of another layer.

Memory: `NUM_GATHERED` slots for all-gathers, then `NUM_SUMMED` slots of each rank for sums. A
barrier's word: digest (44 bits), last operation (16 bits), and a bit for each gather slot in use.
"""

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.abortable.gather import final_barrier
from shoal.backends.process_group.reductions import add_up
from shoal.backends.shared_memory.memory import SharedMemory, whole_pages
from shoal.backends.shared_memory.opening import share_memory
from shoal.backends.shared_memory.regions import KeptRegions
from shoal.layouts.layer_exchanges import PASSES_END
from shoal.layouts.sharded.layer_order import (
    different_operations,
    gather_number,
    sum_number,
)
from shoal_proto.errors import GenerationBroken, InvalidSpec

NUM_GATHERED = 3
"""Slots for all-gathers: one to copy from, one for the next all-gather, one that torch keeps."""
NUM_SUMMED = 2
_NO_SLOT = NUM_GATHERED
_LAST_BITS = 16
_MASK = (1 << 44) - 1
_DIGEST_FACTOR = 1_000_003
"""Odd: digests that differ stay different under equal operations."""


class SharedSlots:
    """Slots as one rank uses them. All ranks must call the same methods in the same order."""

    def __init__(self, memory: SharedMemory, gathered_bytes: int, summed_bytes: int) -> None:
        self._memory = memory
        self.names: Sequence[str] = ()
        self.ranks: Sequence[int] = range(memory.world_size)
        """Global ranks of the ranks that share the slots, for error messages."""
        self.report_refusal: Callable[[InvalidSpec], None] = lambda refusal: None
        self._gathered_bytes, self._summed_bytes = gathered_bytes, summed_bytes
        end = NUM_GATHERED * gathered_bytes
        self._gathered = memory.data[:end]
        self._summed = torch.frombuffer(memory.data[end:], dtype=torch.uint8)
        self._starts = [
            torch.frombuffer(self._gathered[slot * gathered_bytes :], dtype=torch.uint8).data_ptr()
            for slot in range(NUM_GATHERED)
        ]
        self._uses: list[weakref.ref[memoryview] | None] = [None] * NUM_GATHERED
        self._used_anywhere = 0
        self._num_sums = 0
        self._digest = self._last = 0

    @property
    def memory(self) -> SharedMemory:
        """Shared memory of the slots. Other code may use it only between steps."""
        return self._memory

    @classmethod
    def open(
        cls,
        group: dist.ProcessGroup,
        gathered_bytes: int,
        summed_bytes: int,
        limit_s: float,
        kept: KeptRegions | None = None,
    ) -> "SharedSlots | None":
        """Open slots for whole tensors of at most these sizes; None, on all ranks, if they cannot
        share memory. Collective. `limit_s`, `kept`, errors: see `share_memory`."""
        gathered_bytes, summed_bytes = whole_pages(gathered_bytes), whole_pages(summed_bytes)
        each = dist.get_world_size(group) * NUM_SUMMED
        size = NUM_GATHERED * gathered_bytes + each * summed_bytes
        memory = share_memory(group, size, limit_s, kept)
        return cls(memory, gathered_bytes, summed_bytes) if memory is not None else None

    def reserve_gather(self, num_bytes: int) -> memoryview | None:
        """Reserve a slot for the all-gather that `gather` begins, while anything refers to the
        returned memory. None, on all ranks, if no slot is free and large enough."""
        free = [slot for slot in range(NUM_GATHERED) if not self._used_anywhere >> slot & 1]
        if not free or not 0 < num_bytes <= self._gathered_bytes:
            return None
        start = free[0] * self._gathered_bytes
        data = self._gathered[start : start + num_bytes]
        self._uses[free[0]] = weakref.ref(data)
        # All ranks reserve the same slot: in use until the next barrier says otherwise.
        self._used_anywhere |= 1 << free[0]
        return data

    def gather(self, output: Tensor, number: int = 0) -> "SlotGather | None":
        """Return work; wait for it before other ranks' parts are read. If `output` is not from
        `reserve_gather`, make a barrier and return None, on all ranks. `number`: index of the
        parameter group."""
        start = output.data_ptr()
        slot = self._starts.index(start) if start in self._starts else _NO_SLOT
        self._note(gather_number(number), slot)
        if slot != _NO_SLOT:
            return SlotGather(self)
        self.barrier()
        return None

    def reserve_sum(self, num_bytes: int) -> Tensor | None:
        """Return memory for this rank's addend of a sum; None if the sum is too large. The memory
        must not be read after `reduce_scatter`."""
        if num_bytes > self._summed_bytes:
            return None
        start = self._start_of(self._memory.rank)
        return self._summed[start : start + num_bytes]

    def reduce_scatter(self, own: Tensor, whole: Tensor, op: Any, number: int = 0) -> bool:
        """Fill `own` with this rank's part of the sum or mean of the ranks' `whole`, see `add_up`.
        Returns False, on all ranks, if `whole` is too large; otherwise makes a barrier. Raises
        InvalidSpec unless `op` is SUM or AVG. `number`: see `gather`."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise InvalidSpec(
                "shared memory has no such reduction", seen=str(op), expected="SUM or AVG"
            )
        self._note(sum_number(number), 0)
        mine = self.reserve_sum(whole.nbytes)
        if mine is None:
            return False
        if whole.data_ptr() != mine.data_ptr():
            mine.view(whole.dtype).copy_(whole.view(-1))
        self.barrier()
        world_size, width = self._memory.world_size, whole.element_size()
        parts = self._summed.view(whole.dtype).as_strided(
            (world_size, own.numel()),
            (NUM_SUMMED * self._summed_bytes // width, 1),
            self._start_of(0) // width + self._memory.rank * own.numel(),
        )
        add_up(parts, own)
        if op == dist.ReduceOp.AVG:
            own.div_(world_size)
        self._num_sums += 1
        return True

    def cut(self, reason: str) -> None:
        """See `SharedMemory.cut`."""
        self._memory.cut(reason)

    def close(self) -> None:
        """See `SharedMemory.close`. May be called twice."""
        self._memory.close()

    def _start_of(self, rank: int) -> int:
        return (rank * NUM_SUMMED + self._num_sums % NUM_SUMMED) * self._summed_bytes

    @property
    def num_barriers(self) -> int:
        """Number of barriers so far."""
        return self._memory.num_barriers

    def finish(self) -> None:
        """End forward passes that no backward follows, with a barrier. Raises what `barrier`
        raises, also if another rank's passes go on."""
        self._note(PASSES_END, 0)
        self.barrier()

    def _note(self, exchange: int, slot: int) -> None:
        self._last = exchange & ((1 << _LAST_BITS) - 1)
        operation = (self._last + 1) * (_NO_SLOT + 1) + slot
        self._digest = (self._digest * _DIGEST_FACTOR + operation) & _MASK

    def barrier(self) -> None:
        """Wait for all ranks; afterwards each rank can read what every rank wrote before. Raises
        GenerationBroken if `SharedMemory.gather_words` does; InvalidSpec, on all ranks, if the
        ranks' gathers and sums so far differ."""
        in_use = 0
        for number, use in enumerate(self._uses):
            if use is not None and use() is not None:
                in_use |= 1 << number
        own = (self._digest << _LAST_BITS | self._last) << NUM_GATHERED
        messages = self._memory.gather_words(own | in_use)
        if len({message >> NUM_GATHERED for message in messages}) > 1:
            final_barrier(self._memory.gather_words, GenerationBroken)
            operations = [_exchange_number(message >> NUM_GATHERED) for message in messages]
            refusal = different_operations(self.ranks, operations, self.names)
            self.report_refusal(refusal)
            raise refusal
        self._used_anywhere = 0
        for message in messages:
            self._used_anywhere |= message & ((1 << NUM_GATHERED) - 1)


def _exchange_number(message: int) -> int:
    last = message & ((1 << _LAST_BITS) - 1)
    return last if last != PASSES_END & ((1 << _LAST_BITS) - 1) else PASSES_END


class SlotGather(dist.Work):
    """All-gather that is complete after the ranks' next barrier, whichever call makes it."""

    def __init__(self, slots: SharedSlots) -> None:
        super().__init__()
        self._slots = slots
        self._began = slots.num_barriers

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make a barrier, unless one was made since the gather, within the time limit of
        `SharedMemory.gather_words`. Raises what `barrier` raises."""
        if self._slots.num_barriers == self._began:
            self._slots.barrier()
        return True
