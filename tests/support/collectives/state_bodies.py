"""Bodies of ranks in the tests of state: a module that their processes can import."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.shared_memory.memory import SharedMemory
from shoal.backends.shared_memory.opening import share_memory
from shoal.state import resharding as exchange
from shoal.state import shared_exchange
from shoal.state.shards import Chunk, Needs, StateShard, TensorShard
from shoal_proto.errors import MalformedMessage, ShoalError

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed": (11, 5),
    "model.wide": (3, 17),
    "model.bias": (2,),
    "model.deep": (4, 3, 5),
    "optim.embed/exp_avg": (11, 5),
    "optim.embed/step": (),
}
DTYPES = {"model.wide": torch.bfloat16, "model.bias": torch.bool, "optim.embed/step": torch.int64}


def whole_state(step: int) -> dict[str, Tensor]:
    """Return all tensors of a step, with distinct elements; without optimizer state at step 0."""
    state = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        if step or name.startswith("model."):
            values = torch.arange(torch.Size(shape).numel()) + 1000 * step + 100 * number
            state[name] = values.to(DTYPES.get(name, torch.float32)).reshape(shape)
    return state


def cut(shape: tuple[int, ...], how: str, rank: int, world_size: int) -> Chunk | None:
    """Return the rank's box of a tensor: all of it, rows or columns; None if it is empty."""
    dimension = {"whole": len(shape), "rows": 0, "columns": 1}[how]
    if dimension >= len(shape):
        return Chunk.whole(shape)
    each = -(-shape[dimension] // world_size)
    start, stop = (min(each * index, shape[dimension]) for index in (rank, rank + 1))
    if start == stop:
        return None
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dimension], sizes[dimension] = start, stop - start
    return Chunk(offsets=tuple(offsets), sizes=tuple(sizes))


def holding_of(state: dict[str, Tensor], step: int, how: str, rank: int, size: int) -> StateShard:
    """Return the rank's part of the state, as views of it."""
    shards = {}
    for name, tensor in state.items():
        shape = tuple(tensor.shape)
        chunk = cut(shape, how, rank, size)
        if chunk is not None:
            part = tensor[chunk.slices_in(Chunk.whole(shape))]
            shards[name] = TensorShard(shape=shape, chunk=chunk, tensor=part)
    return StateShard(step=step, shards=shards, values={"lr": 0.1 * step})


def needs_of(how: str, rank: int, size: int) -> Needs:
    """Return a rank's needs of any tensor; none if it is not among the first `size`."""

    def needs(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Chunk | None:
        assert dtype == DTYPES.get(name, torch.float32), name
        return cut(shape, how, rank, size) if rank < size else None

    return needs


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


class Targets:
    """Memory for every second tensor, some of it with transposed strides."""

    def __init__(self) -> None:
        self._given: dict[str, Tensor | None] = {}

    def __call__(self, name: str, chunk: Chunk) -> Tensor | None:
        dtype, number = DTYPES.get(name, torch.float32), len(self._given)
        memory = torch.empty(chunk.sizes, dtype=dtype) if number % 2 == 0 else None
        if number % 4 == 0 and len(chunk.sizes) == 2:
            memory = torch.empty(chunk.sizes[::-1], dtype=dtype).t()
        self._given[name] = memory
        return memory

    def all_taken(self, got: StateShard) -> bool:
        """True if each tensor is in the memory that was given for it."""
        return self._given.keys() == got.shards.keys() and all(
            memory is None or got.shards[name].tensor is memory
            for name, memory in self._given.items()
        )


def shared(num_bytes: int) -> SharedMemory:
    """Make memory that all ranks share, and use it even for small boxes."""
    shared_exchange.MIN_BOX_BYTES = 1
    memory = share_memory(_group(), num_bytes, 60.0)
    assert memory is not None
    return memory


def reshard_all(
    changes: list[tuple[tuple[str, int], tuple[str, int]]], shared_bytes: int = 0
) -> dict[str, str]:
    """Return, for each change from one cut to another, the differences from the expected state."""
    rank, state = dist.get_rank(), whole_state(7)
    memory = shared(shared_bytes) if shared_bytes else None
    found = {}
    for before, after in changes:
        for bucket_bytes, borrow, target in (
            (exchange.MIN_BUCKET_BYTES, True, None),
            (32, False, None),
            (exchange.MIN_BUCKET_BYTES, True, Targets()),
            (32, False, Targets()),
        ):
            exchange.MIN_BUCKET_BYTES = exchange.MAX_BUCKET_BYTES = bucket_bytes
            held = [holding_of(state, 7, before[0], rank, before[1])] if rank < before[1] else []
            needs = needs_of(after[0], rank, after[1])
            got = exchange.reshard(
                _group(), held, needs, borrow=borrow, target=target, memory=memory
            )
            assert target is None or target.all_taken(got)
            expected = (
                holding_of(state, 7, after[0], rank, after[1])
                if rank < after[1]
                else StateShard(step=7, shards={}, values={"lr": 0.1 * 7})
            )
            wrong = difference(got, expected)
            if not borrow:
                for shard in got.shards.values():
                    shard.tensor.zero_()
            wrong += difference_of_states(state, whole_state(7))
            if wrong:
                found[f"{before} to {after}, buckets of {bucket_bytes}"] = wrong
    return found


def difference_of_states(one: dict[str, Tensor], other: dict[str, Tensor]) -> str:
    return ", ".join(name for name in one if not torch.equal(one[name], other[name]))


def reshard_large(shared_bytes: int = 0) -> bool:
    """Reshard 12 MB from rows to columns, to rows, and to whole tensors; True if it is right."""
    memory = shared(shared_bytes) if shared_bytes else None
    rank, shape = dist.get_rank(), (1501, 2003)
    exchange.MAX_BUCKET_BYTES = 1 << 19
    state = {"model.w": torch.arange(1501 * 2003, dtype=torch.float32).reshape(shape)}
    same = True
    for before, after in (("rows", "columns"), ("columns", "rows"), ("rows", "whole")):
        held = holding_of(state, 1, before, rank, 3)
        got = exchange.reshard(_group(), [held], needs_of(after, rank, 3), memory=memory)
        same &= difference(got, holding_of(state, 1, after, rank, 3)) == ""
    return same


def count_calls() -> dict[str, dict[str, int]]:
    """Return the calls of torch.distributed that are made if no tensor has to be sent."""
    rank = dist.get_rank()
    long = {f"model.{index:04}.{index * 7919:x}": torch.zeros(3) for index in range(3000)}
    found = {}
    for label, state, how in (
        ("each has all", whole_state(7), "whole"),
        ("each has its part", whole_state(7), "rows"),
        ("a long list", long, "whole"),
    ):
        calls: Counter[str] = Counter()
        with _Counting(calls):
            exchange.reshard(_group(), [holding_of(state, 7, how, rank, 3)], needs_of(how, rank, 3))
        found[label] = dict(calls)
    return found


class _Counting:
    """Counts this process's calls of torch.distributed."""

    NAMES = ("all_reduce", "broadcast", "isend", "irecv", "send", "recv", "barrier")

    def __init__(self, calls: Counter[str]) -> None:
        self._calls = calls
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        for name in self.NAMES:
            self._count(dist, name, name)
        # Shoal's all-gather of bytes is a call of the group.
        self._count(dist.ProcessGroup, "allgather", "all_gather")

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _count(self, owner: Any, name: str, counted: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls[counted] += 1
            return real(*args, **kwargs)

        self._patch.setattr(owner, name, call)


def refused() -> dict[str, str]:
    """Return the errors of invalid exchanges, one after another over the same group."""
    rank, group = dist.get_rank(), _group()
    state = whole_state(7)
    rows = holding_of(state, 7, "rows", rank, 3)
    odd = dict(state)
    if rank:
        odd["model.wide"] = torch.zeros(3, 18, dtype=torch.bfloat16)
    other = dict(state)
    if rank:
        other["model.wide"] = torch.zeros(3, 17)
    found = {}
    for label, held in (
        ("lost", [rows]),
        ("nobody", []),
        ("shapes", [holding_of(odd, 7, "whole", 0, 1)]),
        ("dtypes", [holding_of(other, 7, "whole", 0, 1)]),
        ("garbage", []),
        ("boundless", []),
        ("last", [holding_of(state, 7, "whole", 0, 1)]),
    ):
        try:
            if label == "garbage" and rank:
                exchange.gather(b"no inventory", group)
                raise MalformedMessage("as the other one is told")
            if label == "boundless" and rank:
                exchange.gather(bytes(exchange.MAX_MESSAGE_BYTES + 1), group)
            found[label] = str(exchange.reshard(group, held, needs_of("rows", rank, 2)).step)
        except ShoalError as error:
            found[label] = type(error).__name__
    return found


def difference(got: StateShard, expected: StateShard) -> str:
    """Describe the difference; empty if there is none."""
    if (got.step, got.values) != (expected.step, expected.values):
        return f"{got.step} {got.values}"
    if got.shards.keys() != expected.shards.keys():
        return f"names: {got.shards.keys() ^ expected.shards.keys()}"
    for name, shard in expected.shards.items():
        other = got.shards[name]
        if (other.chunk, other.shape) != (shard.chunk, shard.shape):
            return f"{name}: {other.chunk} of {other.shape}"
        if other.tensor.dtype != shard.tensor.dtype or not torch.equal(other.tensor, shard.tensor):
            return f"{name}: {other.tensor} for {shard.tensor}"
    return ""
