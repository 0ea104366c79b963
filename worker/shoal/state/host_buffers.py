"""Host memory for copies of state, one rank's shards behind each other, used again and again."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shoal.state.host_copies import CopyUnderWay, copy_to_host, host_memory
from shoal.state.inventory import Meta
from shoal.state.shards import Chunk, Json, StateShard, TensorShard

# Every shard starts at a multiple of this, so that any dtype can be viewed there.
_ALIGNMENT_BYTES = 64


class HostBuffer:
    """Buffer with shards in it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def arrange(
        self,
        chunks: Mapping[str, Chunk],
        metas: Mapping[str, Meta],
        sources: Sequence[Tensor] = (),
    ) -> tuple[dict[str, TensorShard], Tensor]:
        """Shards with nothing in them yet, in the order of `chunks`, and the memory they lie in.

        Those of the last time are gone. Takes new memory only if the size is another: page-locked
        if it is for these `sources` and some of them lie on a GPU.
        """
        places = {}
        end = 0
        for name, chunk in chunks.items():
            num_bytes = chunk.num_elements * metas[name].dtype.itemsize
            places[name] = slice(end, end + num_bytes)
            end += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if self._memory.numel() != end:
            # Let go of the old memory before the new is taken.
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = host_memory(end, sources)
        shards = {
            name: TensorShard(
                shape=metas[name].shape,
                chunk=chunk,
                tensor=self._memory[places[name]].view(metas[name].dtype).view(chunk.sizes),
            )
            for name, chunk in chunks.items()
        }
        return shards, self._memory

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()


class StepCopies:
    """What one rank keeps of one step: its own snapshot, and what peers have given it.

    Written by one thread at a time; `shown` may be called by any.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.full = False
        """Whether all that this rank is to have of the step is here."""
        self.everywhere = False
        """Whether all ranks have completed this step."""
        self.own: StateShard | None = None
        self.travelling = torch.empty(0, dtype=torch.uint8)
        """The memory of what goes to peers of the own snapshot."""
        self._under_way = CopyUnderWay()
        self._peers: dict[int, StateShard] = {}
        self._names: frozenset[str] = frozenset()
        self._knows = False
        self._staying = HostBuffer()
        self._leaving = HostBuffer()
        self._given: dict[int, HostBuffer] = {}

    def clear(self) -> None:
        """Show nothing any more: the memory is about to be written."""
        self.step, self.full, self.everywhere = None, False, False
        self.own, self._peers = None, {}

    def take(self, state_shard: StateShard, travels: Callable[[str], bool]) -> None:
        """Make a snapshot of the state shard, which may change on return. A GPU writes it from then
        on: `wait` before reading it."""
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
        """Return once the own snapshot can be read. Any thread."""
        self._under_way.wait()

    def know(self, names: frozenset[str]) -> None:
        """Learn the names of all tensors that exist at this step."""
        assert self.own is not None
        self._names |= names
        self.own = StateShard(
            step=self.own.step,
            shards=self.own.shards,
            values=self.own.values,
            elsewhere=self._names,
        )
        # Behind that: the trainer may ask at any moment.
        self._knows = True

    def room_for(
        self, peer: int, chunks: Mapping[str, Chunk], metas: Mapping[str, Meta]
    ) -> tuple[dict[str, TensorShard], Tensor]:
        """Shards for what the peer is about to send, and the memory that it goes to as it comes."""
        buffer = self._given.setdefault(peer, HostBuffer())
        return buffer.arrange(dict(sorted(chunks.items())), metas)

    def show(
        self, peer: int, shards: Mapping[str, TensorShard], values: Mapping[str, Json]
    ) -> None:
        """The peer's part is complete."""
        assert self.step is not None
        state_shard = StateShard(
            step=self.step, shards=shards, values=values, elsewhere=self._names
        )
        self._peers = {**self._peers, peer: state_shard}

    def shown(self) -> list[StateShard]:
        """Return all that is complete.

        The own snapshot only once it is known what else there was: alone it might be taken for the
        whole of a state of which a lost rank held what nobody else can name. Before the first step
        there is the model and no more.
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
