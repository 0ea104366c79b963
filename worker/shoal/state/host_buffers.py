"""Reusable host memory for copies of state: the shards of one rank, packed into one buffer."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shoal.state.host_copies import CopyUnderWay, aligned, copy_to_host, host_memory
from shoal.state.inventory import Meta
from shoal.state.shards import Chunk, Json, StateShard, TensorShard


class HostBuffer:
    """Host buffer that holds one set of shards."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def arrange(
        self,
        chunks: Mapping[str, Chunk],
        metas: Mapping[str, Meta],
        sources: Sequence[Tensor] = (),
    ) -> tuple[dict[str, TensorShard], Tensor]:
        """Return uninitialized shards, in the order of `chunks`, and the memory they lie in.
        Overwrites the shards of the previous call. Allocates new memory only if the size differs;
        that memory is page-locked if some of the `sources` lie on a GPU."""
        spans = {}
        end = 0
        for name, chunk in chunks.items():
            num_bytes = chunk.num_elements * metas[name].dtype.itemsize
            spans[name] = slice(end, end + num_bytes)
            end += aligned(num_bytes)
        if self._memory.numel() != end:
            # Free the old memory before new memory is allocated.
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = host_memory(end, sources)
        shards = {
            name: TensorShard(
                shape=metas[name].shape,
                chunk=chunk,
                tensor=self._memory[spans[name]].view(metas[name].dtype).view(chunk.sizes),
            )
            for name, chunk in chunks.items()
        }
        return shards, self._memory

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()


class StepCopies:
    """Copies that one rank keeps of one step: its own copy, and the copies received from peers.
    One thread at a time may write; any thread may call `complete_copies`."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.has_all_peer_copies = False
        """True if this rank has received all its peers' copies of the step."""
        self.is_complete_everywhere = False
        """True once this rank knows that the copy of this step is complete on all ranks."""
        self.own_copy: StateShard | None = None
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

    def begin_own_copy(self, state_shard: StateShard, travels: Callable[[str], bool]) -> None:
        """Begin to copy the state shard, whose tensors may change once this returns. A GPU
        may still be writing the copy then: call `wait` before reading it. `travels`: True for
        the name of a tensor that is sent to peers."""
        metas = {
            name: Meta(shard.shape, shard.tensor.dtype)
            for name, shard in state_shard.shards.items()
        }
        sent = {n: p.chunk for n, p in sorted(state_shard.shards.items()) if travels(n)}
        kept = {n: p.chunk for n, p in state_shard.shards.items() if n not in sent}
        sources = {name: shard.tensor for name, shard in state_shard.shards.items()}
        tensors = [sources[name] for name in (*sent, *kept)]
        shards, self.sent_memory = self._sent_buffer.arrange(sent, metas, tensors)
        shards |= self._kept_buffer.arrange(kept, metas, tensors)[0]
        self._copy_in_progress = copy_to_host([shard.tensor for shard in shards.values()], tensors)
        self._names = state_shard.elsewhere
        self.own_copy = StateShard(
            step=state_shard.step, shards=shards, values=state_shard.values, elsewhere=self._names
        )
        self.step = state_shard.step

    def wait(self) -> None:
        """Block until this rank's own copy can be read. Thread-safe."""
        self._copy_in_progress.wait()

    def record_names(self, names: frozenset[str]) -> None:
        """Record the names of all tensors that exist at this step."""
        assert self.own_copy is not None
        self._names |= names
        self.own_copy = StateShard(
            step=self.own_copy.step,
            shards=self.own_copy.shards,
            values=self.own_copy.values,
            elsewhere=self._names,
        )

    def buffers_for(
        self, peer: int, chunks: Mapping[str, Chunk], metas: Mapping[str, Meta]
    ) -> tuple[dict[str, TensorShard], Tensor]:
        """Return uninitialized shards for the copy that the peer sends, and their memory."""
        buffer = self._peer_buffers.setdefault(peer, HostBuffer())
        return buffer.arrange(dict(sorted(chunks.items())), metas)

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
        """Return all complete copies.

        This rank's own copy is among them only once it names the tensors that other ranks hold.
        Without these names it could seem to be the whole state, although a lost rank held tensors
        that no remaining rank can name. Step 0 is exempt: before the first step there is only the
        model.
        """
        own_copy, peers = self.own_copy, self._peers
        known = own_copy is not None and (own_copy.step == 0 or bool(own_copy.elsewhere))
        if known:
            self.wait()
        return [*([own_copy] if own_copy is not None and known else []), *peers.values()]

    @property
    def num_bytes(self) -> int:
        buffers = (self._kept_buffer, self._sent_buffer, *self._peer_buffers.values())
        return sum(buffer.num_bytes for buffer in buffers)
