"""Ranks of any layout read what they need from a checkpoint; errors say clearly what cannot be
read."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.models.checkpoint_world import (
    binding,
    cut,
    differences,
    needs_cut,
    trained,
    with_aliases,
    write_on_all,
)
from support.oracles.plain_torch import OPTIMIZERS, make, save, train
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from shoal.checkpoint import names
from shoal.checkpoint.reading import read
from shoal.checkpoint.writing import write
from shoal.state.shards import Chunk, whole_chunk
from shoal_proto.errors import (
    ChecksumMismatch,
    DtypeMismatch,
    InvalidSpec,
    MalformedMessage,
    ShapeMismatch,
)

# DCP gives this warning without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


BY_PYTHON_3_11_2 = Path(__file__).with_name("python_3_11_2")


@pytest.fixture(scope="module")
def whole():
    return trained("adamw")


@pytest.fixture(scope="module")
def by_rows_on_four(whole, tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "rows"
    assert write_on_all(path, [cut(whole, 0, rank, 4) for rank in range(4)]) == [None] * 4
    return path


@pytest.fixture
def damaged(by_rows_on_four, tmp_path):
    return shutil.copytree(by_rows_on_four, tmp_path / "damaged")


@pytest.mark.sampled()
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_checkpoint_of_one_world_size_is_read_by_another(whole, by_rows_on_four, dim, world_size):
    for rank in range(world_size):
        found = read(by_rows_on_four, needs_cut(dim, rank, world_size))
        expected = cut(with_aliases(whole), dim, rank, world_size)
        assert differences(found, expected) == []


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path, optimizer_name):
    write(tmp_path / "one", trained(optimizer_name, 3))
    model, own = binding(optimizer_name, seed=9)
    own.fill(read(tmp_path / "one", own.needed_chunk))
    train(model, own.optimizer, range(3, 6))
    assert differences(own.collect(6), trained(optimizer_name, 6)) == []


def test_a_rank_reads_no_more_than_the_parts_it_needs(damaged, whole):
    """The files of the other ranks are overwritten with zeros, without any effect."""
    for rank in (1, 2, 3):
        file = damaged / f"__{rank}_0.distcp"
        file.write_bytes(bytes(file.stat().st_size))
    name = "model.first.weight"
    part = cut(whole, 0, 0, 4).shards[name]

    def needs(asked, shape, dtype):
        return part.chunk if asked == name else None

    found = read(damaged, needs)
    assert list(found.shards) == [name]
    assert torch.equal(found.shards[name].tensor, part.tensor)


# --- checkpoints of plain torch ---


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_a_checkpoint_of_plain_torch_is_read(tmp_path, optimizer_name):
    model, optimizer = make(optimizer_name)
    train(model, optimizer, range(3))
    save(tmp_path / "torch", model, optimizer, step=3)
    ours, own = binding(optimizer_name, seed=9)
    state_shard = read(tmp_path / "torch", own.needed_chunk)
    assert state_shard.step == 3
    own.fill(state_shard)
    for either, its_optimizer in ((model, optimizer), (ours, own.optimizer)):
        train(either, its_optimizer, range(3, 6))
    state = ours.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_a_model_alone_is_read_too(tmp_path):
    model, _ = make("sgd")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "torch", no_dist=True)
    state_shard = read(tmp_path / "torch", whole_chunk)
    assert (state_shard.step, state_shard.values) == (0, {})
    assert state_shard.shards.keys() == {f"model.{name}" for name in model.state_dict()}


@pytest.mark.parametrize(
    ("optimizer_state", "reason"),
    [
        (
            lambda model, optimizer: get_optimizer_state_dict(
                model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
            ),
            "without flatten_optimizer_state_dict",
        ),
        (lambda model, optimizer: optimizer.state_dict(), "not optimizer.state_dict()"),
    ],
    ids=["flattened", "numbered"],
)
def test_optimizer_state_that_names_no_parameters_is_refused(tmp_path, optimizer_state, reason):
    model, optimizer = make("adamw")
    train(model, optimizer, range(2))
    state = {"model": model.state_dict(), "optim": optimizer_state(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path / "torch", no_dist=True)
    with pytest.raises(InvalidSpec) as raised:
        read(tmp_path / "torch", whole_chunk)
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda state: state.update({"last.bias": torch.zeros(4)}), ShapeMismatch),
        (lambda state: state.update({"last.bias": torch.zeros(3).double()}), DtypeMismatch),
        (lambda state: state.pop("last.bias"), ShapeMismatch),
    ],
    ids=["shape", "dtype", "missing"],
)
def test_another_model_is_refused_by_name(tmp_path, change, error):
    state = dict(make("sgd")[0].state_dict())
    change(state)
    dcp.save({"model": state}, checkpoint_id=tmp_path / "torch", no_dist=True)
    _, own = binding("sgd")
    with pytest.raises(error, match=r"last\.bias"):
        own.fill(read(tmp_path / "torch", own.needed_chunk))


# --- invalid and damaged checkpoints ---


def test_a_directory_without_an_index_is_no_checkpoint(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InvalidSpec, match=f"{path} is not a checkpoint"):
            read(path, whole_chunk)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: os.truncate(path / "__2_0.distcp", 100), "truncated"),
        (lambda path: (path / "__2_0.distcp").unlink(), "no file __2_0.distcp"),
        (lambda path: os.truncate(path / ".metadata", 1000), "index .* cannot be read"),
        (lambda path: (path / ".metadata").write_bytes(b"not a pickle"), "cannot be read"),
        (lambda path: (path / ".metadata").write_bytes(pickle.dumps({"a": 1})), "cannot be read"),
    ],
    ids=["truncated", "missing", "truncated index", "no index", "another pickle"],
)
def test_the_error_for_a_damaged_checkpoint_has_its_path(damaged, damage, reason):
    damage(damaged)
    with pytest.raises(MalformedMessage, match=reason) as raised:
        read(damaged, whole_chunk)
    assert str(damaged) in str(raised.value)


def test_a_single_changed_bit_is_noticed(damaged, whole):
    """torch.load does not notice the change."""
    file = damaged / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    part = cut(whole, 0, 1, 4).shards["model.first.weight"].tensor
    content[content.index(part.numpy().tobytes())] ^= 1
    file.write_bytes(content)
    with pytest.raises(ChecksumMismatch, match="has changed since it was written") as raised:
        read(damaged, whole_chunk)
    assert str(damaged) in str(raised.value)


class Malice:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self._path),))


def test_an_index_that_would_run_code_is_refused(damaged, tmp_path):
    (damaged / ".metadata").write_bytes(pickle.dumps(Malice(tmp_path / "owned")))
    with pytest.raises(MalformedMessage, match="mkdir is not allowed in an index"):
        read(damaged, whole_chunk)
    assert not (tmp_path / "owned").exists()


class Attribute:
    """Pickled form of an enum's member in some releases of Python: `getattr` of anything."""

    def __init__(self, owner: object, name: object) -> None:
        self._of = (owner, name)

    def __reduce__(self) -> tuple[object, ...]:
        return (getattr, self._of)


def with_memory_format(path, value, protocol=pickle.DEFAULT_PROTOCOL):
    """Write the checkpoint's index with `value` in the place of each memory format."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, each: object) -> Any:
            return value.__reduce__() if isinstance(each, _MEM_FORMAT_ENCODING) else NotImplemented

    metadata = dcp.FileSystemReader(path).read_metadata()
    with (path / ".metadata").open("wb") as file:
        Pickler(file, protocol).dump(metadata)


def test_a_checkpoint_of_a_python_that_pickles_enums_by_their_names_is_read():
    """The checkpoint was written by Debian 12's Python 3.11.2, with torch 2.13.0."""
    assert b"getattr" in (BY_PYTHON_3_11_2 / ".metadata").read_bytes()
    found = read(BY_PYTHON_3_11_2, whole_chunk)
    weight = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(found.shards["model.weight"].tensor, weight)
    assert torch.equal(found.shards["optim.weight/exp_avg"].tensor, -weight)
    assert found.step == 3
    assert found.values["groups"][0]["lr"] == 0.1


@pytest.mark.parametrize("protocol", [2, pickle.DEFAULT_PROTOCOL])
def test_enums_are_read_by_their_names(damaged, whole, protocol):
    member = Attribute(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    with_memory_format(damaged, member, protocol)
    assert b"getattr" in (damaged / ".metadata").read_bytes()
    assert differences(read(damaged, whole_chunk), with_aliases(whole)) == []


@pytest.mark.parametrize(
    "attribute",
    [
        Attribute(_MEM_FORMAT_ENCODING, "__class__"),
        Attribute(_MEM_FORMAT_ENCODING, "mro"),
        Attribute(TensorProperties, "__init__"),
        Attribute(torch.Size, "numel"),
        Attribute(Attribute(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"), "value"),
    ],
    ids=["class", "method", "other class", "type", "member's own"],
)
def test_no_other_attribute_is_read(damaged, attribute):
    with_memory_format(damaged, attribute)
    with pytest.raises(MalformedMessage, match=r"getattr of .* is not allowed in an index"):
        read(damaged, whole_chunk)


def test_an_index_with_a_path_outside_the_checkpoint_is_refused(damaged):
    metadata = dcp.FileSystemReader(damaged).read_metadata()
    for stored in metadata.storage_data.values():
        stored.relative_path = "../elsewhere.distcp"
    (damaged / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(MalformedMessage, match=r"elsewhere\.distcp"):
        read(damaged, whole_chunk)


def test_an_index_that_lacks_a_part_of_a_tensor_is_refused(damaged):
    """DCP itself would leave the previous memory contents in these parts."""
    metadata = dcp.FileSystemReader(damaged).read_metadata()
    metadata.state_dict_metadata["model.first.weight"].chunks.pop()
    (damaged / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(MalformedMessage, match=r"does not hold all of model\.first\.weight"):
        read(damaged, whole_chunk)


def test_an_index_with_further_properties_of_tensors_is_read(damaged, whole, monkeypatch):
    """torch 2.15 writes strides; torch 2.13 itself fails to read them."""
    plain = TensorProperties.__getstate__
    metadata = dcp.FileSystemReader(damaged).read_metadata()
    monkeypatch.setattr(
        TensorProperties, "__getstate__", lambda properties: (*plain(properties)[:5], (6, 1))
    )
    (damaged / ".metadata").write_bytes(pickle.dumps(metadata))
    assert differences(read(damaged, whole_chunk), with_aliases(whole)) == []


def test_a_newer_format_is_refused(tmp_path, whole, monkeypatch):
    monkeypatch.setattr(names, "FORMAT", 2)
    write(tmp_path / "one", whole)
    monkeypatch.undo()
    with pytest.raises(InvalidSpec, match="newer format; saw 2; expected at most 1"):
        read(tmp_path / "one", whole_chunk)


def test_a_newer_version_of_dcp_is_refused(damaged):
    metadata = dcp.FileSystemReader(damaged).read_metadata()
    metadata.version = "2.0.0"
    (damaged / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(InvalidSpec, match=r"version 2\.0\.0"):
        read(damaged, whole_chunk)


def test_shoals_own_entry_is_json(by_rows_on_four, whole):
    state = {"shoal": {"state": ""}}
    dcp.load(state, checkpoint_id=by_rows_on_four, no_dist=True)
    own = json.loads(state["shoal"]["state"])
    assert (own["format"], own["step"]) == (1, whole.step)


def test_a_box_beyond_the_tensor_is_refused(by_rows_on_four):
    with pytest.raises(MalformedMessage, match="does not hold all of"):
        read(by_rows_on_four, lambda *_: Chunk(offsets=(0, 0), sizes=(100, 6)))
