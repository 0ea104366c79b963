"""Reusable host memory for copies of state: the shards of one rank, packed into one buffer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.state.host_copies import CopyUnderWay, aligned, copy_to_host, host_memory
from shoal.state.inventory import Inventory
from shoal.state.shards import Json, StateShard, TensorShard


class HostBuffer:
    """Host buffer that holds one set of shards."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._inventory: Inventory | None = None
        self._shards: Mapping[str, TensorShard] = {}

    def arrange(
        self,
        inventory: Inventory,
        includes: Callable[[str], bool],
        sources: Sequence[Tensor] = (),
    ) -> tuple[Mapping[str, TensorShard], Tensor]:
        """Return a shard for each included name of the inventory's one listing, in the order of
        names, and their memory, to be overwritten. The same inventory object gets the same shards
        again, and must come with the same names. New memory is page-locked if some of the `sources`
        lie on a GPU."""
        if inventory is not self._inventory:
            # Free the old memory before new memory is allocated.
            self._shards, self._inventory = {}, None
            self._shards = self._lay_out(inventory, includes, sources)
            self._inventory = inventory
        return self._shards, self._memory

    def _lay_out(
        self, inventory: Inventory, includes: Callable[[str], bool], sources: Sequence[Tensor]
    ) -> dict[str, TensorShard]:
        (listing,) = inventory.listings
        chunks = {name: chunk for name, chunk in sorted(listing.chunks.items()) if includes(name)}
        spans = {}
        end = 0
        for name, chunk in chunks.items():
            num_bytes = chunk.num_elements * inventory.metas[name].dtype.itemsize
            spans[name] = slice(end, end + num_bytes)
            end += aligned(num_bytes)
        if self._memory.numel() != end:
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = host_memory(end, sources)
        shards = {}
        for name, chunk in chunks.items():
            meta = inventory.metas[name]
            tensor = self._memory[spans[name]].view(meta.dtype).view(chunk.sizes)
            shards[name] = TensorShard(shape=meta.shape, chunk=chunk, tensor=tensor)
        return shards

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()


class StepCopies:
    """Copies that one rank keeps of one step: its own, and those received from peers. One thread at
    a time may write; any thread may call `complete_copies`."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.has_all_peer_copies = False
        """True if this rank has received all its peers' copies of the step."""
        self.is_complete_everywhere = False
        """True once this rank knows that the copy of this step is complete on all ranks."""
        self.own_copy: StateShard | None = None
        self.inventory = Inventory(metas={}, listings=())
        """Inventory of `own_copy`, without step and values."""
        self.sent_memory = torch.empty(0, dtype=torch.uint8)
        """Memory of the part of this rank's own copy that is sent to peers."""
        self._copy_in_progress = CopyUnderWay()
        self._peers: dict[int, StateShard] = {}
        self._names: frozenset[str] = frozenset()
        self._kept_buffer = HostBuffer()
        self._sent_buffer = HostBuffer()
        self._peer_buffers: dict[int, HostBuffer] = {}

    def clear(self) -> None:
        """Hide all copies: their memory is about to be overwritten."""
        self.step, self.has_all_peer_copies, self.is_complete_everywhere = None, False, False
        self.own_copy, self._peers = None, {}

    def begin_own_copy(
        self, state_shard: StateShard, inventory: Inventory, travels: Callable[[str], bool]
    ) -> None:
        """Begin a snapshot of the state shard. Once this returns, its tensors may be changed as
        `copy_to_host` allows. Call `wait` before reading the snapshot. Memory is arranged anew only
        for another `inventory` object. `travels`: True for the name of a tensor that is sent to
        peers."""
        self.inventory = inventory
        held = state_shard.shards
        tensors = [shard.tensor for shard in held.values()]
        sent, self.sent_memory = self._sent_buffer.arrange(inventory, travels, tensors)
        kept, _ = self._kept_buffer.arrange(inventory, lambda name: not travels(name), tensors)
        shards = {**sent, **kept}
        self._copy_in_progress = copy_to_host(
            [shard.tensor for shard in shards.values()], [held[name].tensor for name in shards]
        )
        self._names = state_shard.elsewhere
        self.own_copy = replace(state_shard, shards=shards)
        self.step = state_shard.step

    def wait(self) -> None:
        """Block until this rank's own copy can be read. Thread-safe."""
        self._copy_in_progress.wait()

    def record_names(self, names: frozenset[str]) -> None:
        """Record the names of all tensors that exist at this step."""
        assert self.own_copy is not None
        self._names |= names
        self.own_copy = replace(self.own_copy, elsewhere=self._names)

    def buffers_for(
        self, peer: int, inventory: Inventory, travels: Callable[[str], bool]
    ) -> tuple[Mapping[str, TensorShard], Tensor]:
        """Return shards for the copy that the peer sends, and their memory."""
        buffer = self._peer_buffers.setdefault(peer, HostBuffer())
        return buffer.arrange(inventory, travels)

    def add_peer_copy(
        self, peer: int, shards: Mapping[str, TensorShard], values: Mapping[str, Json]
    ) -> None:
        """Add this peer's copy, now complete, to the copies that `complete_copies` returns."""
        assert self.step is not None
        state_shard = StateShard(
            step=self.step, shards=shards, values=values, elsewhere=self._names
        )
        self._peers = {**self._peers, peer: state_shard}

    def complete_copies(self) -> list[StateShard]:
        """Return all complete copies. This rank's own copy is left out until it names the tensors
        that other ranks hold: else it could seem to be the whole state. Step 0 is exempt."""
        own_copy, peers = self.own_copy, self._peers
        known = own_copy is not None and (own_copy.step == 0 or bool(own_copy.elsewhere))
        if known:
            self.wait()
        return [*([own_copy] if own_copy is not None and known else []), *peers.values()]

    @property
    def num_bytes(self) -> int:
        buffers = (self._kept_buffer, self._sent_buffer, *self._peer_buffers.values())
        return sum(buffer.num_bytes for buffer in buffers)
