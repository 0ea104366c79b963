"""Reusable host memory for copies of state: the shards of one rank, packed into one buffer."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shoal.state.host_copies import CopyUnderWay, copy_to_host, host_memory
from shoal.state.inventory import Meta
from shoal.state.shards import Chunk, Json, StateShard, TensorShard

# Every shard starts at a multiple of this, so that its bytes can be viewed as any dtype.
_ALIGNMENT_BYTES = 64


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

        Overwrites the shards of the previous call. Allocates new memory only if the size differs:
        page-locked memory if some of the `sources` lie on a GPU.
        """
        spans = {}
        end = 0
        for name, chunk in chunks.items():
            num_bytes = chunk.num_elements * metas[name].dtype.itemsize
            spans[name] = slice(end, end + num_bytes)
            end += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if self._memory.numel() != end:
            # Free the old memory before the new is allocated.
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
    """Copies that one rank keeps of one step: its own snapshot, and those received from peers.

    One thread at a time may write; any thread may call `shown`.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.full = False
        """True if this rank has received all its peers' copies of the step."""
        self.everywhere = False
        """True if the copy of this step is complete on all ranks."""
        self.own: StateShard | None = None
        self.travelling = torch.empty(0, dtype=torch.uint8)
        """Memory of the part of this rank's snapshot that is sent to peers."""
        self._under_way = CopyUnderWay()
        self._peers: dict[int, StateShard] = {}
        self._names: frozenset[str] = frozenset()
        self._knows = False
        self._staying = HostBuffer()
        self._leaving = HostBuffer()
        self._given: dict[int, HostBuffer] = {}

    def clear(self) -> None:
        """Hide all copies: their memory is about to be overwritten."""
        self.step, self.full, self.everywhere = None, False, False
        self.own, self._peers = None, {}

    def take(self, state_shard: StateShard, travels: Callable[[str], bool]) -> None:
        """Begin a snapshot of the state shard, whose tensors may change on return. A GPU may still
        be writing the snapshot: call `wait` before reading it. `travels`: True for the name of a
        tensor that is sent to peers."""
        metas = {
            name: Meta(shard.shape, shard.tensor.dtype)
            for name, shard in state_shard.shards.items()
        }
        leaving = {n: p.chunk for n, p in sorted(state_shard.shards.items()) if travels(n)}
        staying = {n: p.chunk for n, p in state_shard.shards.items() if n not in leaving}
        sources = {name: shard.tensor for name, shard in state_shard.shards.items()}
        own = [sources[name] for name in (*leaving, *staying)]
        shards, self.travelling = self._leaving.arrange(leaving, metas, own)
        shards |= self._staying.arrange(staying, metas, own)[0]
        self._under_way = copy_to_host([shard.tensor for shard in shards.values()], own)
        self._names, self._knows = state_shard.elsewhere, bool(state_shard.elsewhere)
        self.own = StateShard(
            step=state_shard.step, shards=shards, values=state_shard.values, elsewhere=self._names
        )
        self.step = state_shard.step

    def wait(self) -> None:
        """Block until this rank's snapshot can be read. Any thread."""
        self._under_way.wait()

    def know(self, names: frozenset[str]) -> None:
        """Record the names of all tensors that exist at this step."""
        assert self.own is not None
        self._names |= names
        self.own = StateShard(
            step=self.own.step,
            shards=self.own.shards,
            values=self.own.values,
            elsewhere=self._names,
        )
        # Set last: the trainer may ask at any moment.
        self._knows = True

    def buffers_for(
        self, peer: int, chunks: Mapping[str, Chunk], metas: Mapping[str, Meta]
    ) -> tuple[dict[str, TensorShard], Tensor]:
        """Return uninitialized shards for the copy that the peer sends, and their memory."""
        buffer = self._given.setdefault(peer, HostBuffer())
        return buffer.arrange(dict(sorted(chunks.items())), metas)

    def show(
        self, peer: int, shards: Mapping[str, TensorShard], values: Mapping[str, Json]
    ) -> None:
        """Add this peer's copy, now complete, to the copies that `shown` returns."""
        assert self.step is not None
        state_shard = StateShard(
            step=self.step, shards=shards, values=values, elsewhere=self._names
        )
        self._peers = {**self._peers, peer: state_shard}

    def shown(self) -> list[StateShard]:
        """Return all complete copies.

        This rank's snapshot is among them only once it names the tensors that other ranks hold.
        Without these names it could seem to be the whole state, although a lost rank held tensors
        that no remaining rank can name. Step 0 is exempt: before the first step there is only the
        model.
        """
        own, peers = self.own, self._peers
        known = own is not None and (own.step == 0 or bool(own.elsewhere))
        if known:
            self.wait()
        return [*([own] if own is not None and known else []), *peers.values()]

    @property
    def num_bytes(self) -> int:
        buffers = (self._staying, self._leaving, *self._given.values())
        return sum(buffer.num_bytes for buffer in buffers)
