"""Resharding: each rank of a new generation gets the chunks that it needs from their holders.

Nothing is unpickled.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.abortable.gather import MAX_MESSAGE_BYTES, barrier_after_collective, gather
from shoal.backends.abortable.p2p import AbortableP2P, P2PMessage
from shoal.backends.shared_memory.memory import SharedMemory
from shoal.model.tied_tensors import with_tied_names
from shoal.state.host_copies import MESSAGE_ALIGNMENT_BYTES, aligned
from shoal.state.inventory import (
    Meta,
    TensorTable,
    chunks_from_json,
    chunks_to_json,
    from_message,
    inventory_of,
    malformed,
    pack,
    to_message,
    unpack,
)
from shoal.state.shards import MODEL, Chunk, Needs, StateShard, TensorShard
from shoal.state.shared_exchange import SharedExchange
from shoal.state.step_choice import ChosenStep, choose
from shoal.state.transfer_plan import NamedChunk, TransferPlan, plan
from shoal_proto.errors import InvalidSpec

Target = Callable[[str, Chunk], Tensor | None]
"""Function of (name, needed chunk) that returns a host tensor to receive it into.

None: a tensor is allocated.
"""

IN_FLIGHT_BYTES = 64 * 1024 * 1024
"""Limit of one rank's buffers, shared among its peers; exceeded with more than 64 ranks."""
MIN_BUCKET_BYTES = 256 * 1024
MAX_BUCKET_BYTES = 8 * 1024 * 1024
ROUNDS_IN_FLIGHT = 2


def reshard(
    group: dist.ProcessGroup,
    held: Sequence[StateShard],
    needs: Needs,
    *,
    borrow: bool = False,
    target: Target | None = None,
    memory: SharedMemory | None = None,
) -> StateShard:
    """Return this rank's needed chunks of the newest state that the group holds as a whole.

    Collective. `held`: all shards that this rank holds, of one or several steps. `needs` is called
    once for every tensor that exists at the chosen step. The result is in newly allocated host
    memory, or in the tensors of `target`, which is called only after all checks. `borrow`: a chunk
    without a target is a view of this rank's own shard, if possible. `memory`: memory that the
    group's ranks share; it may be overwritten.

    Raises the same error on all ranks: StateLost if no step is whole, ShapeMismatch or
    DtypeMismatch if ranks contradict each other, MalformedMessage for an invalid message. An error
    of `needs`, of this rank's own shards or of the group is raised on this rank alone. The caller
    must then cut the group, because the other ranks wait.
    """
    rank, world_size = group.rank(), group.size()
    exchange = SharedExchange(memory) if memory and SharedExchange.fits(memory) else None
    messages = _gather_messages(to_message(inventory_of(held)), group, exchange)
    chosen = choose([from_message(message, r) for r, message in enumerate(messages)])
    own_needs = _own_needs(chosen, needs)
    if chosen.on_each(world_size):  # every rank already has what it needs
        wanted: list[Mapping[str, Chunk]] = [{}] * world_size
        wanted[rank] = own_needs
    else:
        names = list(chosen.metas)
        messages = _gather_messages(
            pack(chunks_to_json(own_needs, names, chosen.metas)), group, exchange
        )
        table = TensorTable(chosen.metas)
        wanted = [_needs_of(message, r, table) for r, message in enumerate(messages)]
    bucket_bytes = IN_FLIGHT_BYTES // (2 * ROUNDS_IN_FLIGHT * world_size)
    bucket_bytes = min(max(bucket_bytes, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES)
    own_plan = plan(chosen, wanted, rank, stripe_bytes=bucket_bytes // 2)
    transfer = _Transfer(group, [h for h in held if h.step == chosen.step], bucket_bytes, exchange)
    shards = transfer.carry_out(
        own_plan, own_needs, chosen.metas, borrow=borrow, target=target or _no_target
    )
    return StateShard(
        step=chosen.step,
        shards=shards,
        values=dict(chosen.values),
        elsewhere=frozenset(chosen.metas) - shards.keys(),
    )


def whole_model(
    group: dist.ProcessGroup,
    state_shard: StateShard,
    without_elements: Mapping[str, Tensor],
    order: Sequence[str],
) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer by its names in the user's model, on the host.

    Collective. `without_elements`: empty tensors, which no rank reports. `order`: the names in the
    result's order. Raises what `reshard` raises.
    """
    whole = reshard(group, [state_shard], _of_model)
    # No rank may return while another still waits for its shards.
    barrier_after_collective(group)
    further: Any = state_shard.values["tied"]
    tensors = {name.removeprefix(MODEL): shard.tensor for name, shard in whole.shards.items()}
    copies = {name: tensor.to("cpu", copy=True) for name, tensor in without_elements.items()}
    found = with_tied_names(tensors | copies, further)
    return {name: found[name] for name in dict.fromkeys((*order, *found)) if name in found}


def _of_model(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Chunk | None:
    return Chunk.whole(shape) if name.startswith(MODEL) else None


def _gather_messages(
    message: bytes, group: dist.ProcessGroup, exchange: SharedExchange | None
) -> list[bytes]:
    messages = exchange.gather(message, MAX_MESSAGE_BYTES) if exchange is not None else None
    return gather(message, group) if messages is None else messages


def _own_needs(chosen: ChosenStep, needs: Needs) -> dict[str, Chunk]:
    found: dict[str, Chunk] = {}
    for name, meta in chosen.metas.items():
        chunk = needs(name, meta.shape, meta.dtype)
        if chunk is None or not chunk.num_elements:
            continue
        if len(chunk.sizes) != len(meta.shape) or chunk.overlap(Chunk.whole(meta.shape)) != chunk:
            raise InvalidSpec(
                f"a needed chunk of {name} is not within the tensor",
                seen=str(chunk),
                expected=f"a part of {meta.shape}",
            )
        found[name] = chunk
    return found


def _no_target(name: str, chunk: Chunk) -> None:
    return None


def _needs_of(message: bytes, rank: int, table: TensorTable) -> Mapping[str, Chunk]:
    try:
        return chunks_from_json(unpack(message, rank), table)
    except (TypeError, ValueError, LookupError) as error:
        raise malformed(rank, f"{type(error).__name__}: {error}") from error


# --- bytes ---


def _flat(tensor: Tensor) -> Tensor:
    # `view` would fail: a single element of a row counts as contiguous, with the row's strides.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@dataclass
class _Round:
    works: list[P2PMessage] = field(default_factory=list)
    arriving: list[tuple[Tensor, list[NamedChunk]]] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    """Buffers that must live until they are sent."""


class _Transfer:
    """Transfer of the parts of one plan.

    A rank posts the receives of a round, then its sends, and then waits for the previous round. So
    a rank waits only for ranks in an earlier round: there is no deadlock.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        held: Sequence[StateShard],
        bucket_bytes: int,
        exchange: SharedExchange | None,
    ) -> None:
        self._shared = exchange
        self._p2p = AbortableP2P(group, torch.device("cpu"))
        self._held = held
        self._bucket_bytes = bucket_bytes
        self._metas: Mapping[str, Meta] = {}
        self._pieces: dict[str, TensorShard] = {}

    def carry_out(
        self,
        own_plan: TransferPlan,
        own_needs: Mapping[str, Chunk],
        metas: Mapping[str, Meta],
        *,
        borrow: bool,
        target: Target,
    ) -> dict[str, TensorShard]:
        self._metas = metas
        placed = {name: target(name, chunk) for name, chunk in own_needs.items()}
        borrowed = {
            part.name: self._source(part)
            for part in own_plan.kept
            if borrow and placed[part.name] is None and part.chunk == own_needs[part.name]
        }
        for name, chunk in own_needs.items():
            tensor = borrowed.get(name, placed[name])
            if tensor is None:
                tensor = torch.empty(chunk.sizes, dtype=metas[name].dtype)
            self._pieces[name] = TensorShard(shape=metas[name].shape, chunk=chunk, tensor=tensor)
        if self._shared is not None:
            self._exchange(own_plan, self._shared)
        else:
            self._move(own_plan)
        for part in own_plan.kept:
            if part.name not in borrowed:
                self._target(part).copy_(self._source(part))
        return self._pieces

    def _exchange(self, own_plan: TransferPlan, exchange: SharedExchange) -> None:
        strided: list[tuple[Tensor, Tensor]] = []

        def bytes_for(part: NamedChunk) -> Tensor:
            target = self._target(part)
            if target.is_contiguous():
                return _flat(target)
            strided.append(
                (target, torch.empty_like(target, memory_format=torch.contiguous_format))
            )
            return _flat(strided[-1][1])

        exchange.run(
            {
                peer: [_flat(self._source(part).cpu().contiguous()) for part in parts]
                for peer, parts in own_plan.sends.items()
            },
            {
                peer: [bytes_for(part) for part in parts]
                for peer, parts in own_plan.receives.items()
            },
        )
        for target, arrived in strided:
            target.copy_(arrived)

    def _move(self, own_plan: TransferPlan) -> None:
        sends = {peer: self._buckets(parts) for peer, parts in own_plan.sends.items()}
        receives = {peer: self._buckets(parts) for peer, parts in own_plan.receives.items()}
        num_rounds = max(map(len, [*sends.values(), *receives.values()]), default=0)
        pending: deque[_Round] = deque()
        for number in range(num_rounds):
            current = _Round()
            for peer, buckets in sorted(receives.items()):
                if number < len(buckets):
                    self._receive(peer, buckets[number], current)
            for peer, buckets in sorted(sends.items()):
                if number < len(buckets):
                    self._send(peer, buckets[number], current)
            pending.append(current)
            if len(pending) == ROUNDS_IN_FLIGHT:
                self._complete(pending.popleft())
        for each in pending:
            self._complete(each)
        self._p2p.close()

    def _receive(self, peer: int, parts: list[NamedChunk], current: _Round) -> None:
        target = self._target(parts[0])
        if len(parts) == 1 and target.is_contiguous():
            buffer = _flat(target)
        else:
            buffer = torch.empty(self._spans(parts)[-1][1], dtype=torch.uint8)
            current.arriving.append((buffer, parts))
        current.works.append(self._p2p.recv([buffer], peer))

    def _send(self, peer: int, parts: list[NamedChunk], current: _Round) -> None:
        source = self._source(parts[0])
        if len(parts) == 1 and source.is_contiguous() and source.device.type == "cpu":
            buffer = _flat(source)
        else:
            spans = self._spans(parts)
            buffer = torch.empty(spans[-1][1], dtype=torch.uint8)
            for part, span in zip(parts, spans, strict=True):
                self._view(buffer, part, span).copy_(self._source(part))
        current.kept.append(buffer)
        current.works.append(self._p2p.send([buffer], peer))

    def _complete(self, finished: _Round) -> None:
        for work in finished.works:
            work.wait()
        for buffer, parts in finished.arriving:
            for part, span in zip(parts, self._spans(parts), strict=True):
                self._target(part).copy_(self._view(buffer, part, span))

    # --- positions of parts ---

    def _buckets(self, parts: Sequence[NamedChunk]) -> list[list[NamedChunk]]:
        buckets: list[list[NamedChunk]] = []
        free_bytes = 0
        for part in parts:
            padded_bytes = aligned(self._num_bytes(part), MESSAGE_ALIGNMENT_BYTES)
            if padded_bytes > free_bytes:
                buckets.append([])
                free_bytes = self._bucket_bytes
            buckets[-1].append(part)
            free_bytes -= padded_bytes
        return buckets

    def _spans(self, parts: Sequence[NamedChunk]) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        start = 0
        for part in parts:
            num_bytes = self._num_bytes(part)
            spans.append((start, start + num_bytes))
            start += aligned(num_bytes, MESSAGE_ALIGNMENT_BYTES)
        return spans

    def _num_bytes(self, part: NamedChunk) -> int:
        return part.chunk.num_elements * self._metas[part.name].dtype.itemsize

    def _view(self, buffer: Tensor, part: NamedChunk, span: tuple[int, int]) -> Tensor:
        raw = buffer[span[0] : span[1]]
        return raw.view(self._metas[part.name].dtype).view(part.chunk.sizes)

    def _target(self, part: NamedChunk) -> Tensor:
        shard = self._pieces[part.name]
        return shard.tensor[part.chunk.slices_in(shard.chunk)]

    def _source(self, part: NamedChunk) -> Tensor:
        for state_shard in self._held:
            shard = state_shard.shards.get(part.name)
            if shard is not None and shard.chunk.overlap(part.chunk) == part.chunk:
                return shard.tensor.detach()[part.chunk.slices_in(shard.chunk)]
        raise AssertionError(f"planned to send {part}, which this rank does not hold")
