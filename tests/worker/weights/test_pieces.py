"""Parts of all ranks have each element of each tensor exactly once, under every strategy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from support.models import tensor_models
from support.models.sharded_models import deep
from support.processes.worlds import (
    LaidOutTraining,
    Training,
    largest_difference,
    one_process,
    run_on_gloo,
    this_world,
)
from torch import Tensor, nn

import shoal
from shoal.layouts.base import LayOut
from shoal.layouts.replicated import ReplicatedLayout
from shoal.model.tied_tensors import tied
from shoal.state.shards import Chunk, TensorShard
from shoal.weights.pieces import (
    HeldTensor,
    HeldWeights,
    PublishedPiece,
    balanced,
    check_dtype,
    part_of,
    replicated_weights,
    sharded_weights,
)
from shoal.weights.reading import VersionLayout, merged, whole_tensors
from shoal_proto.errors import InvalidSpec
from shoal_proto.v1.weights_pb2 import Layout

SGD = partial(torch.optim.SGD, lr=0.05)


def numbers() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(48, 5, generator=generator), torch.randint(2, (48,), generator=generator)


class Normed(nn.Module):
    """A model with buffers, a frozen layer and a tensor without elements."""

    def __init__(self) -> None:
        super().__init__()
        # The norm uses its running statistics: those of a batch would differ between ranks.
        self.first, self.norm = nn.Linear(5, 7), nn.BatchNorm1d(7).eval()
        self.frozen = nn.Linear(7, 3).requires_grad_(False)
        self.last = nn.Linear(3, 2)
        self.register_buffer("nothing", torch.zeros(0, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.frozen(self.norm(self.first(inputs))))
        return outputs


class Scaled(Normed):
    """A model that also has a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * self.scale


@dataclass(frozen=True, kw_only=True)
class Case:
    lay_out: LayOut
    training: Training


def plain(model: Callable[[], nn.Module]) -> Training:
    return Training(
        model=model, optimizer=SGD, data=numbers, loss=nn.functional.cross_entropy, num_steps=2
    )


def language(model: Callable[[], nn.Module], **changes: Any) -> Training:
    return Training(
        model=model,
        optimizer=SGD,
        data=tensor_models.tokens,
        loss=tensor_models.next_token,
        num_steps=2,
        **changes,
    )


def by(strategy: Any, model: nn.Module, world: Any) -> Any:
    return strategy.lay_out(model, world)


def mesh(pipeline: int, data: int, tensor: int) -> LayOut:
    sizes = {"pipeline": pipeline, "data": data, "tensor": tensor}
    return partial(by, shoal.Hybrid(**sizes, min_split_bytes=0, microbatches=2))


CASES: dict[str, tuple[int, Case]] = {
    "ddp-2": (2, Case(lay_out=ReplicatedLayout, training=plain(Scaled))),
    "ddp-3": (3, Case(lay_out=ReplicatedLayout, training=plain(deep))),
    "zero1": (3, Case(lay_out=partial(by, shoal.Zero1()), training=plain(deep))),
    "fsdp": (4, Case(lay_out=partial(by, shoal.FSDP()), training=plain(deep))),
    "fsdp-buffers": (3, Case(lay_out=partial(by, shoal.FSDP()), training=plain(Normed))),
    "hsdp": (4, Case(lay_out=partial(by, shoal.HSDP(shard=2)), training=plain(deep))),
    "tensor": (
        2,
        Case(
            lay_out=partial(by, shoal.TensorParallel(min_split_bytes=0)),
            training=language(tensor_models.gpt),
        ),
    ),
    "fsdp-tensor": (
        4,
        Case(
            lay_out=partial(by, shoal.FSDPTensor(tensor=2, min_split_bytes=0)),
            training=language(tensor_models.gpt),
        ),
    ),
    "pipeline": (
        2,
        Case(
            lay_out=partial(by, shoal.Pipeline(microbatches=2)),
            training=language(tensor_models.tied_gpt, interleaved=True),
        ),
    ),
    "hybrid-2-2-2": (
        8,
        Case(lay_out=mesh(2, 2, 2), training=language(tensor_models.tied_gpt, interleaved=True)),
    ),
    "hybrid-1-2-2": (
        4,
        Case(lay_out=mesh(1, 2, 2), training=language(tensor_models.tied_gpt, interleaved=True)),
    ),
}


def publish(name: str) -> tuple[bytes, Any, int]:
    """Train as a rank; return its layout, its segment, and the bytes that it holds."""
    _, case = CASES[name]
    trained = LaidOutTraining(case.training, case.lay_out, this_world())
    for step in range(case.training.num_steps):
        trained.step(step)
    model, _ = case.training.build()
    empty = {name: t for name, t in model.state_dict().items() if not t.numel()}
    held = sharded_weights(trained.layout, step=2, tied=tied(model), without_elements=empty)
    part = part_of(held)
    segment = torch.zeros(part.num_bytes, dtype=torch.uint8)
    part.copy_into(segment)
    held_bytes = sum(each.shard.tensor.nbytes for each in held.tensors.values())
    return part.layout.SerializeToString(), segment.numpy(), held_bytes


def assembled(parts: Sequence[tuple[bytes, Any, int]]) -> dict[str, Tensor]:
    layout = VersionLayout(merged([Layout.FromString(own) for own, _, _ in parts]))
    segments = {rank: torch.from_numpy(raw) for rank, (_, raw, _) in enumerate(parts)}
    return whole_tensors(layout, segments)


@pytest.mark.sampled()
@pytest.mark.parametrize("name", CASES)
def test_the_parts_of_all_ranks_are_the_model_of_one_process(name: str) -> None:
    """`VersionLayout` checks the coverage: it raises for an element that is missing or there
    twice."""
    world_size, case = CASES[name]
    parts = run_on_gloo(world_size, publish, name)
    ours, theirs = assembled(parts), one_process(case.training)
    assert ours.keys() == theirs.keys()
    filled = {name for name, tensor in theirs.items() if tensor.numel()}
    difference = largest_difference(
        {name: ours[name] for name in filled}, {name: theirs[name] for name in filled}
    )
    assert difference < 1e-4


@pytest.mark.parametrize("name", ["ddp-3", "zero1", "hsdp"])
def test_ranks_that_hold_the_same_publish_as_many_bytes_each(name: str) -> None:
    world_size, _ = CASES[name]
    sizes = [len(raw) for _, raw, _ in run_on_gloo(world_size, publish, name)]
    row = 11 * 4 + 64 * 8
    assert max(sizes) - min(sizes) <= row, sizes


def held(rank: int, world_size: int, tensors: dict[str, Tensor], **tied_names: str) -> HeldWeights:
    return replicated_weights(
        tensors, {}, step=3, rank=rank, world_size=world_size, tied={**tied_names}
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_each_row_that_all_ranks_hold_is_published_once(world_size: int) -> None:
    """Shapes are indivisible, without dimensions, without rows, or of one row."""
    generator = torch.Generator().manual_seed(world_size)
    shapes = [(), (1,), (7,), (1, 9), (3, 5), (0, 4), (1, 1, 6), (2, 3, 4), (100, 3)]
    tensors = {str(shape): torch.randn(shape, generator=generator) for shape in shapes}
    parts = []
    for rank in range(world_size):
        part = part_of(held(rank, world_size, tensors))
        segment = torch.zeros(part.num_bytes, dtype=torch.uint8)
        part.copy_into(segment)
        parts.append((part.layout.SerializeToString(), segment.numpy(), 0))
    found = assembled(parts)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_part_is_a_view_until_it_is_copied() -> None:
    tensor = torch.zeros(4, 2)
    part = part_of(held(1, 2, {"w": tensor}))
    tensor += 5
    segment = torch.zeros(part.num_bytes, dtype=torch.uint8)
    part.copy_into(segment)
    assert [piece.chunk for piece in part.pieces] == [Chunk(offsets=(2, 0), sizes=(2, 2))]
    assert segment[:16].view(torch.float32).tolist() == [5.0] * 4


def test_names_of_a_tied_tensor_share_its_bytes() -> None:
    tensors = {"embedding.weight": torch.randn(6, 2)}
    part = part_of(held(0, 1, tensors, **{"head.weight": "embedding.weight"}))
    assert part.num_bytes == 64
    segment = torch.zeros(part.num_bytes, dtype=torch.uint8)
    part.copy_into(segment)
    found = whole_tensors(VersionLayout(part.layout), {0: segment})
    assert found["head.weight"] is found["embedding.weight"]
    assert torch.equal(found["head.weight"], tensors["embedding.weight"])


def test_floating_point_numbers_are_published_in_the_dtype_asked_for() -> None:
    tensors = {
        "w": torch.tensor([1.0, 3.14159265]),
        "half": torch.tensor([2.5], dtype=torch.float16),
        "count": torch.tensor([7]),
    }
    part = part_of(held(0, 1, tensors), torch.bfloat16)
    segment = torch.zeros(part.num_bytes, dtype=torch.uint8)
    part.copy_into(segment)
    found = whole_tensors(VersionLayout(part.layout), {0: segment})
    assert {name: each.dtype for name, each in found.items()} == {
        "w": torch.bfloat16,
        "half": torch.bfloat16,
        "count": torch.int64,
    }
    assert torch.equal(found["w"], tensors["w"].bfloat16())


def test_tensors_that_lie_apart_in_memory_are_published_by_their_values() -> None:
    tensors = {"transposed": torch.arange(12.0).view(3, 4).t(), "every_other": torch.arange(8)[::2]}
    part = part_of(held(0, 1, tensors))
    segment = torch.zeros(part.num_bytes, dtype=torch.uint8)
    part.copy_into(segment)
    found = whole_tensors(VersionLayout(part.layout), {0: segment})
    assert all(torch.equal(found[name], each) for name, each in tensors.items())


def test_tensors_that_others_publish_are_listed_without_bytes() -> None:
    shard = TensorShard.whole(torch.ones(2))
    own = HeldWeights(
        step=1,
        rank=1,
        world_size=2,
        tensors={"bias": HeldTensor(shard=shard, replicas=(0,))},
    )
    part = part_of(own)
    assert [spec.name for spec in part.layout.tensors] == ["bias"]
    assert (len(part.pieces), len(part.layout.slices), part.num_bytes) == (0, 0, 1)


def test_parts_are_balanced_though_one_tensor_dwarfs_the_rest() -> None:
    pieces = [
        PublishedPiece(name=name, chunk=Chunk.whole(t.shape), tensor=t, dtype=t.dtype)
        for name, t in {"small": torch.zeros(10), "large": torch.zeros(1000, 4)}.items()
    ]
    for count in (2, 3, 7):
        sizes = [sum(p.num_bytes for p in balanced(pieces, i, count)) for i in range(count)]
        assert sum(sizes) == sum(piece.num_bytes for piece in pieces)
        assert max(sizes) - min(sizes) <= 2 * 4 * 4


def test_a_dtype_that_no_weights_have_is_refused() -> None:
    for dtype in (torch.int32, torch.complex64, torch.quint8):
        with pytest.raises(InvalidSpec, match="cannot be published in this dtype"):
            check_dtype(dtype)
    check_dtype(torch.bfloat16)
    check_dtype(None)
