"""Reading slices of any cut from slices of any other; refusals of invalid layouts."""

import threading
from typing import Any

import pytest
import torch
from support.processes.worlds import run_on_gloo
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shoal.state.shards import Chunk, TensorShard
from shoal.weights import reading
from shoal.weights.pieces import HeldTensor, HeldWeights, part_of
from shoal.weights.reading import Installation, StoredTensor, VersionLayout, merged
from shoal.weights.series import held_state
from shoal_proto.errors import InvalidSpec, MalformedMessage
from shoal_proto.v1.weights_pb2 import Layout, Slice, TensorSpec

SHAPES = {"wide": (5, 12), "tall": (13, 4), "flat": (7,), "scalar": (), "empty": (0, 3)}


def values(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(SHAPES[name], generator=generator)


def cut(dim: int, rank: int, world_size: int, shape: tuple[int, ...]) -> Chunk:
    """Return this rank's rows or columns; a scalar is rank 0's."""
    if not shape:
        return Chunk.whole(shape)
    dim = min(dim, len(shape) - 1)
    bounds = [shape[dim] * each // world_size for each in (rank, rank + 1)]
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = bounds[0], bounds[1] - bounds[0]
    return Chunk(offsets=tuple(offsets), sizes=tuple(sizes))


def published(dim: int, world_size: int) -> tuple[Layout, dict[int, Tensor]]:
    """Return the model, cut along `dim` over `world_size` publishing ranks."""
    layouts, segments = [], {}
    for rank in range(world_size):
        tensors = {}
        for name, shape in SHAPES.items():
            chunk = cut(dim, rank, world_size, shape)
            part = values(name)[chunk.slices_in(Chunk.whole(shape))]
            ranks = (rank,) if shape or not rank else ()
            shard = TensorShard(shape=shape, chunk=chunk, tensor=part)
            tensors[name] = HeldTensor(shard=shard, replicas=ranks)
        held = HeldWeights(step=1, rank=rank, world_size=world_size, tensors=tensors)
        part_of_rank = part_of(held)
        segments[rank] = torch.zeros(part_of_rank.num_bytes, dtype=torch.uint8)
        part_of_rank.copy_into(segments[rank])
        layouts.append(part_of_rank.layout)
    return merged(layouts), segments


def install_on_mesh(dim: int, publishers: int, placements: list[Any]) -> dict[str, bool]:
    """Install a reading rank's slices of each tensor, and compare them."""
    raw, segments = published(dim, publishers)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    targets = {
        name: distribute_tensor(torch.zeros(shape), mesh, placements)
        if len(shape) > 1 and 0 not in shape
        else torch.zeros(shape)
        for name, shape in SHAPES.items()
    }
    installation = Installation(VersionLayout(raw), targets)
    needed = installation.ranges or segments
    installation.write({each: segments[each] for each in needed})
    wholes = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in targets.items()}
    return {name: torch.equal(whole, values(name)) for name, whole in wholes.items()}


@pytest.mark.sampled()
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "placements",
    [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()]],
    ids=["rows-columns", "copies-rows", "columns-copies"],
)
def test_a_mesh_of_readers_installs_its_own_slices(dim: int, placements: list[Any]) -> None:
    for same in run_on_gloo(4, install_on_mesh, dim, 3, placements):
        assert all(same.values()), same


def test_only_bytes_that_hold_something_of_a_slice_are_needed() -> None:
    raw, segments = published(0, 4)
    layout = VersionLayout(raw)
    assert layout.ranges_of({"tall": Chunk.whole((13, 4))}).keys() == {0, 1, 2, 3}
    assert layout.ranges_of({"empty": Chunk.whole((0, 3))}) == {}
    [scalar] = layout.ranges_of({"scalar": Chunk.whole(())})[0]
    assert scalar[1] - scalar[0] == 4
    middle = Chunk(offsets=(1, 1), sizes=(2, 3))
    [(first, behind)] = layout.ranges_of({"tall": middle})[0]
    only = torch.full_like(segments[0], 255)
    only[first:behind] = segments[0][first:behind]
    target = torch.zeros(2, 3)
    layout.tensors["tall"].read_into(target, middle, {0: only})
    assert torch.equal(target, values("tall")[1:3, 1:4])
    assert behind - first == 2 * 4 * 4


def test_a_module_takes_a_version_that_other_ranks_cut() -> None:
    raw, segments = published(1, 5)
    model = nn.ParameterDict({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    Installation(VersionLayout(raw), model).write(segments)
    assert all(torch.equal(each, values(name)) for name, each in model.state_dict().items())


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_processors_that_torch_does_not_use_share_an_installation(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values are right whichever thread writes a tensor, in whichever mode it was made."""
    raw, segments = published(1, 3)
    monkeypatch.setattr(reading, "THREAD_BYTES", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(threads)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    writers = set()
    read_into = StoredTensor.read_into

    def noted(stored: StoredTensor, *arguments: Any) -> None:
        writers.add(threading.current_thread().name)
        read_into(stored, *arguments)

    monkeypatch.setattr(StoredTensor, "read_into", noted)
    model = nn.ParameterDict({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    with torch.inference_mode():
        model["wide"] = torch.zeros(SHAPES["wide"])
    Installation(VersionLayout(raw), model).write(segments)
    assert all(torch.equal(each, values(name)) for name, each in model.state_dict().items())
    assert all(each.requires_grad for each in model.parameters() if not each.is_inference())
    assert (len(writers) > 1) == (threads > 1)


def test_tensors_that_may_depend_on_the_callers_state_are_written_by_its_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensors on a GPU are written on the caller's current stream. Tensors that share memory are
    written by one thread: the version may hold different values for them."""

    class Tagged(Tensor):
        pass

    monkeypatch.setattr(reading, "THREAD_BYTES", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    tensors = {str(number): torch.zeros(4) for number in range(6)}
    tensors["0"] = torch.zeros(4).as_subclass(Tagged)
    tensors["empty"] = torch.zeros(0)
    tensors["tied"], tensors["also_tied"] = torch.zeros(2, 4)
    shares = reading._shares({name: TensorShard.whole(each) for name, each in tensors.items()})
    assert shares[0][-3:] == ["0", "tied", "also_tied"]
    assert sorted(name for share in shares for name in share) == sorted(tensors)
    assert len(shares) == 4


def spec(name: str = "w", shape: tuple[int, ...] = (4, 2)) -> TensorSpec:
    return TensorSpec(name=name, dtype="float32", shape=shape)


def rows(start: int, count: int, at: int = 0, segment: int = 0) -> Slice:
    return Slice(offsets=(start, 0), sizes=(count, 2), at=at, segment=segment)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(tensors=[spec()], segment_bytes=[64]), "0 elements"),
        (Layout(tensors=[spec()], slices=[rows(0, 3)], segment_bytes=[64]), "6 elements"),
        (
            Layout(tensors=[spec()], slices=[rows(0, 2), rows(1, 2)], segment_bytes=[64]),
            "twice",
        ),
        (Layout(tensors=[spec()], slices=[Slice(at=40)], segment_bytes=[64]), "beyond its segment"),
        (Layout(tensors=[spec()], slices=[Slice(segment=1)], segment_bytes=[64]), "beyond its"),
        (Layout(tensors=[spec()], slices=[Slice(at=2)], segment_bytes=[64]), "at byte 2"),
        (Layout(tensors=[spec()], slices=[rows(2, 3)], segment_bytes=[64]), "beyond"),
        (Layout(tensors=[spec()], slices=[Slice(tensor=1)], segment_bytes=[64]), "tensor 1 of 1"),
        (
            Layout(tensors=[spec()], slices=[Slice(offsets=(0,), sizes=(4,))], segment_bytes=[64]),
            "other dimensions",
        ),
        (
            Layout(tensors=[spec(), spec()], slices=[Slice(), Slice(tensor=1)], segment_bytes=[64]),
            "a name twice",
        ),
        (Layout(tensors=[TensorSpec(name="w", dtype="int3", shape=[1])]), "int3"),
    ],
)
def test_malformed_layouts_are_refused(layout: Layout, reason: str) -> None:
    with pytest.raises(MalformedMessage, match=reason):
        VersionLayout(layout)


def test_names_that_differ_are_shown() -> None:
    raw, _ = published(0, 1)
    with pytest.raises(InvalidSpec, match="without mine; with empty, flat"):
        Installation(VersionLayout(raw), {"mine": torch.zeros(2), "wide": torch.zeros(5, 12)})


class Tied(nn.Module):
    """A model whose head may be its embedding."""

    def __init__(self, *, ties: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        if ties:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize("by_name", [False, True])
def test_tensors_that_differ_are_not_written_to_one_tensor(by_name: bool) -> None:
    """The reader's configuration ties what the trainer has untied. Equal tensors may be written."""
    own, reader = Tied(ties=False), Tied(ties=True)
    before = reader.embedding.weight.detach().clone()

    def install() -> None:
        if by_name:
            reading.write_common(own.state_dict(), reader.state_dict(keep_vars=True))
            return
        part = part_of(held_state(own, step=1, rank=0, world_size=1))
        memory = torch.zeros(part.num_bytes, dtype=torch.uint8)
        part.copy_into(memory)
        Installation(VersionLayout(merged([part.layout])), reader).write({0: memory})

    with pytest.raises(InvalidSpec, match="are one tensor here, and differ in the version"):
        install()
    assert torch.equal(reader.embedding.weight, before)
    own.head.weight.data.copy_(own.embedding.weight)
    install()
    assert torch.equal(reader.embedding.weight, own.embedding.weight)
