"""What ranks of the tests of state do: a module that their processes can import."""

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.state.exchange import reshard
from shoal.state.pieces import Box, Holding, Piece

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
    """All tensors of a step, each element another number; without optimizer state at step 0."""
    state = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        if step or name.startswith("model."):
            values = torch.arange(torch.Size(shape).numel()) + 1000 * step + 100 * number
            state[name] = values.to(DTYPES.get(name, torch.float32)).reshape(shape)
    return state


def cut(shape: tuple[int, ...], how: str, rank: int, world_size: int) -> Box | None:
    """The rank's box of a tensor: all of it, rows or columns; None if nothing is left for it."""
    dimension = {"whole": len(shape), "rows": 0, "columns": 1}[how]
    if dimension >= len(shape):
        return Box.whole(shape)
    each = -(-shape[dimension] // world_size)
    start, stop = (min(each * index, shape[dimension]) for index in (rank, rank + 1))
    if start == stop:
        return None
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dimension], sizes[dimension] = start, stop - start
    return Box(offsets=tuple(offsets), sizes=tuple(sizes))


def holding_of(state: dict[str, Tensor], step: int, how: str, rank: int, size: int) -> Holding:
    """What the rank holds of the state, as views of it."""
    pieces = {}
    for name, tensor in state.items():
        shape = tuple(tensor.shape)
        box = cut(shape, how, rank, size)
        if box is not None:
            part = tensor[box.within(Box.whole(shape))]
            pieces[name] = Piece(shape=shape, box=box, tensor=part)
    return Holding(step=step, pieces=pieces, values={"lr": 0.1 * step})


def reshard_on_rank(before: tuple[str, int], after: tuple[str, int], borrow: bool) -> str:
    """What differs from what there should be, or nothing. The first ranks hold, the first need."""
    rank = dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    state = whole_state(7)
    held = [holding_of(state, 7, *before[:1], rank, before[1])] if rank < before[1] else []
    how, world_size = after

    def needs(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Box | None:
        assert state[name].dtype == dtype
        return cut(shape, how, rank, world_size) if rank < world_size else None

    got = reshard(group, held, needs, borrow=borrow)
    expected = holding_of(state, 7, how, rank, world_size) if rank < world_size else None
    return difference(got, expected or Holding(step=7, pieces={}, values={"lr": 0.1 * 7}))


def difference(got: Holding, expected: Holding) -> str:
    """In words; empty if there is none."""
    if (got.step, got.values) != (expected.step, expected.values):
        return f"{got.step} {got.values}"
    if got.pieces.keys() != expected.pieces.keys():
        return f"names: {got.pieces.keys() ^ expected.pieces.keys()}"
    for name, piece in expected.pieces.items():
        other = got.pieces[name]
        if (other.box, other.shape) != (piece.box, piece.shape):
            return f"{name}: {other.box} of {other.shape}"
        if other.tensor.dtype != piece.tensor.dtype or not torch.equal(other.tensor, piece.tensor):
            return f"{name}: {other.tensor} for {piece.tensor}"
    return ""
