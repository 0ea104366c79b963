"""Transfer of a state from one member to others: a JSON manifest, then raw bytes.

Nothing is unpickled. Members form a tree, and a receiver forwards each message as it arrives. The
messages are the manifest's size (int64), the manifest (step, values, and [name, dtype, shape] of
each tensor), and the tensors in the manifest's order, each at a multiple of 16 bytes in its bucket.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.abortable.p2p import AbortableP2P, P2PMessage
from shoal.state.host_copies import MESSAGE_ALIGNMENT_BYTES, aligned, as_bytes, copy_to_host
from shoal.state.shards import DTYPES, StateShard, TensorShard, name_of
from shoal_proto.errors import MalformedMessage

MAX_MANIFEST_BYTES = 64 * 1024 * 1024
BUCKET_BYTES = 32 * 1024 * 1024
MESSAGE_BYTES = 4 * 1024 * 1024
"""Size of one message, which takes half a minute over 1 Mb/s."""
MESSAGES_IN_FLIGHT = 2
FAN_OUT = 2


def send(state_shard: StateShard, receivers: Sequence[int], group: dist.ProcessGroup) -> None:
    """Send a state to the members of these ranks, which must call `receive` meanwhile. This rank
    must hold the whole state."""
    held = {name: shard.tensor for name, shard in state_shard.shards.items()}
    entries = [[name, name_of(tensor.dtype), list(tensor.shape)] for name, tensor in held.items()]
    manifest = json.dumps(
        {"step": state_shard.step, "values": state_shard.values, "tensors": entries}
    )
    text = torch.frombuffer(bytearray(manifest.encode()), dtype=torch.uint8)
    branch = Branch(group.rank(), receivers, group)
    branch.pass_on(torch.tensor([text.numel()]))
    branch.pass_on(text)
    tensors = list(held.values())
    # Torch caches page-locked memory, so buckets reuse it.
    pinned = any(tensor.is_cuda for tensor in tensors)
    for bucket in _buckets([_num_bytes(t.dtype, t.shape) for t in tensors]):
        packed = torch.zeros(bucket[-1][2], dtype=torch.uint8, pin_memory=pinned)
        sources = [as_bytes(tensors[index].contiguous()) for index, _, _ in bucket]
        starts = [start for _, start, _ in bucket]
        targets = [
            packed[start : start + len(raw)] for start, raw in zip(starts, sources, strict=True)
        ]
        copy_to_host(targets, sources).wait()
        branch.pass_on(packed)


def receive(source: int, receivers: Sequence[int], group: dist.ProcessGroup) -> StateShard:
    """Receive the state that the member of rank `source` sends. This rank must be in `receivers`.

    Raises MalformedMessage for an invalid manifest. The caller must check that the state fits the
    model.
    """
    length = torch.zeros(1, dtype=torch.int64)
    branch = Branch(source, receivers, group)
    branch.pass_on(length)
    num_bytes = int(length)
    if not 0 < num_bytes <= MAX_MANIFEST_BYTES:
        raise MalformedMessage(
            f"rank {source} announced a manifest of impossible size",
            seen=f"{num_bytes} bytes",
            expected=f"1 to {MAX_MANIFEST_BYTES}",
        )
    text = torch.zeros(num_bytes, dtype=torch.uint8)
    branch.pass_on(text)
    try:
        manifest: Any = json.loads(text.numpy().tobytes())
        step, values = int(manifest["step"]), dict(manifest["values"])
        entries = [(name, DTYPES[dtype], _shape(s)) for name, dtype, s in manifest["tensors"]]
        sizes_bytes = [_num_bytes(dtype, shape) for _, dtype, shape in entries]
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedMessage(
            f"rank {source} sent a manifest that cannot be read", seen=repr(error)[:200]
        ) from error
    shards: dict[str, TensorShard] = {}
    for bucket in _buckets(sizes_bytes):
        packed = torch.zeros(bucket[-1][2], dtype=torch.uint8)
        branch.pass_on(packed)
        for index, start, _ in bucket:
            name, dtype, shape = entries[index]
            stop = start + _num_bytes(dtype, shape)
            shards[name] = TensorShard.whole(packed[start:stop].view(dtype).reshape(shape))
    return StateShard(step=step, shards=shards, values=values)


class Branch:
    """Position of this rank in the tree of members, whose root is the source."""

    def __init__(self, source: int, receivers: Sequence[int], group: dist.ProcessGroup) -> None:
        order = [source, *sorted(receivers)]
        position = order.index(group.rank())
        self._parent = order[(position - 1) // FAN_OUT] if position else None
        self._children = order[FAN_OUT * position + 1 : FAN_OUT * (position + 1) + 1]
        self._p2p = AbortableP2P(group, torch.device("cpu"))

    def pass_on(self, tensor: Tensor) -> None:
        """Receive the tensor from the parent, if there is one, and send it to the children."""
        parent = self._parent
        parts: Iterable[Tensor] = split_into_messages(tensor)
        if parent is not None:
            parts = _completed((part, [self._p2p.recv([part], parent)]) for part in parts)
        for _ in _completed(
            (part, [self._p2p.send([part], rank) for rank in self._children]) for part in parts
        ):
            pass


def _completed(started: Iterable[tuple[Tensor, Sequence[P2PMessage]]]) -> Iterator[Tensor]:
    """Yield each part once its messages are complete; a few parts are in progress at a time."""
    in_progress: deque[tuple[Tensor, Sequence[P2PMessage]]] = deque()
    for each in started:
        in_progress.append(each)
        if len(in_progress) == MESSAGES_IN_FLIGHT:
            yield _awaited(*in_progress.popleft())
    while in_progress:
        yield _awaited(*in_progress.popleft())


def _awaited(part: Tensor, messages: Sequence[P2PMessage]) -> Tensor:
    for message in messages:
        message.wait()
    return part


def split_into_messages(tensor: Tensor) -> Sequence[Tensor]:
    starts = range(0, tensor.numel(), MESSAGE_BYTES)
    return [tensor[start : start + MESSAGE_BYTES] for start in starts]


def _shape(sizes: Sequence[int]) -> torch.Size:
    if any(size < 0 for size in sizes):
        raise ValueError(f"{sizes!r:.100} is not a shape")
    return torch.Size(sizes)


def _num_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _buckets(sizes_bytes: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Split the tensors into buckets: lists of (index, start, stop in the bucket)."""
    run: list[tuple[int, int, int]] = []
    for index, size in enumerate(sizes_bytes):
        start = run[-1][2] if run else 0
        padded = aligned(size, MESSAGE_ALIGNMENT_BYTES)
        if run and start + padded > BUCKET_BYTES:
            yield run
            run, start = [], 0
        run.append((index, start, start + padded))
    if run:
        yield run
