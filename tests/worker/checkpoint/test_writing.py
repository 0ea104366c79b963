"""Ranks write one checkpoint together: complete or absent, with the same answer on all ranks."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.models.checkpoint_world import (
    Table,
    cut,
    differences,
    names_in,
    on_all,
    trained,
    with_aliases,
    write_on_all,
)
from torch.optim import SGD

from shoal.checkpoint import write_plan
from shoal.checkpoint.reading import read
from shoal.checkpoint.writing import write
from shoal.state.optimizer_state import SLOTS, mark_of, take_slots
from shoal.state.shards import Chunk, StateShard, TensorShard, whole_chunk
from shoal_proto.errors import CheckpointFailed, GenerationBroken, InvalidSpec

# DCP gives this warning without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def changed(state_shard, **shards):
    return StateShard(
        step=state_shard.step, shards={**state_shard.shards, **shards}, values=state_shard.values
    )


@pytest.mark.sampled()
@pytest.mark.parametrize("dim", [0, 1])
def test_four_ranks_write_what_one_would(tmp_path, dim):
    whole = trained("adamw")
    errors = write_on_all(tmp_path / "four", [cut(whole, dim, rank, 4) for rank in range(4)])
    assert errors == [None] * 4
    assert differences(read(tmp_path / "four", whole_chunk), with_aliases(whole)) == []
    files = {name for name in names_in(tmp_path / "four") if name.endswith(".distcp")}
    assert files == {f"__{rank}_0.distcp" for rank in range(4)}
    assert names_in(tmp_path) == ["four"]


def test_replicas_write_once(tmp_path):
    whole = trained("sgd")
    assert write_on_all(tmp_path / "alone", [whole]) == [None]
    assert write_on_all(tmp_path / "three", [whole] * 3) == [None] * 3
    assert names_in(tmp_path / "three") == names_in(tmp_path / "alone")


def test_long_tensors_are_written_in_chunks(tmp_path, monkeypatch):
    """The memory that a reader needs besides its own part is bounded."""
    monkeypatch.setattr(write_plan, "CHUNK_BYTES", 64)
    whole = trained("adamw")
    assert (
        write_on_all(tmp_path / "two", [cut(whole, 1, rank, 2) for rank in range(2)]) == [None] * 2
    )
    metadata = dcp.FileSystemReader(tmp_path / "two").read_metadata()
    assert len(metadata.state_dict_metadata["model.first.weight"].chunks) == 4
    assert differences(read(tmp_path / "two", whole_chunk), with_aliases(whole)) == []


def test_plain_torch_reads_plain_values_of_an_optimizer(tmp_path):
    """Values are exact to the last digit and keep their types, as if torch itself had flattened
    them."""
    state = {
        "count": 2**70 + 1,
        "decay": 0.1,
        "seen": True,
        "phase": "warm",
        "norm": None,
        "window": (1e-50, [1e300, float("-inf")]),
        "history": [torch.arange(3.0), torch.tensor(2.5)],
        "factors": {"left": torch.ones(2, 2), "rank": 2},
    }
    slots = take_slots(state, "last.weight", SGD([torch.ones(1)]))
    tensors = {f"optim.last.weight/{key}": t for key, t in slots.tensors.items()}
    shards = {name: TensorShard.whole(tensor) for name, tensor in tensors.items()}
    shards |= dict([mark_of("last.weight")])
    whole = changed(trained("sgd"), **shards)
    values = {**whole.values, SLOTS: {"last.weight": dict(slots.values)}}
    write(tmp_path / "one", replace(whole, values=values))
    found = read(tmp_path / "one", whole_chunk)
    assert found.values[SLOTS] == values[SLOTS]
    for name, tensor in tensors.items():
        assert torch.equal(found.shards[name].tensor, tensor), name
    own = {
        **state,
        "history": [torch.zeros(3), torch.tensor(0.0)],
        "factors": {"left": torch.zeros(2, 2), "rank": 0},
    }
    held = {"optim": {"state": {"last.weight": own}}}
    dcp.load(held, checkpoint_id=tmp_path / "one", no_dist=True)
    loaded = held["optim"]["state"]["last.weight"]
    assert repr(loaded) == repr(state)


def test_an_error_of_one_rank_is_raised_on_all_and_nothing_is_left(tmp_path):
    whole = trained("sgd")
    state_shards = [cut(whole, 0, rank, 3) for rank in range(3)]
    given = state_shards[1].shards["model.first.weight"]
    unreadable = TensorShard(shape=given.shape, chunk=given.chunk, tensor=given.tensor.to("meta"))
    state_shards[1] = changed(state_shards[1], **{"model.first.weight": unreadable})
    errors = write_on_all(tmp_path / "three", state_shards)
    assert [type(error) for error in errors] == [CheckpointFailed] * 3
    assert len({str(error) for error in errors}) == 1
    assert "rank 1" in str(errors[0])
    assert names_in(tmp_path) == []


def test_an_error_of_the_system_is_raised_with_path_and_errno(tmp_path):
    (tmp_path / "file").touch()
    whole = trained("sgd")
    errors = write_on_all(tmp_path / "file" / "deep" / "two", [whole, whole])
    for error in errors:
        assert isinstance(error, CheckpointFailed)
        assert str(tmp_path / "file" / "deep" / "two") in str(error)
        assert error.details == {
            "path": str(tmp_path / "file" / "deep" / "two"),
            "rank": "0",
            "errno": "ENOTDIR",
        }


def test_storage_that_goes_away_while_a_checkpoint_is_written_is_an_error_of_the_system(
    tmp_path, monkeypatch
):
    """Regression: the error of a look at the draft, to remove it, replaced that of the write."""
    path = tmp_path / "mount" / "one"
    stat = Path.stat

    def stale(own, **options):
        if own.name.endswith(".partial"):
            raise OSError(errno.ESTALE, "Stale file handle", str(own))
        return stat(own, **options)

    monkeypatch.setattr(Path, "stat", stale)
    unwritable = trained("sgd")
    given = unwritable.shards["model.first.weight"]
    meta = replace(given, tensor=given.tensor.to("meta"))
    with pytest.raises(CheckpointFailed):
        write(path, changed(unwritable, **{"model.first.weight": meta}))
    assert names_in(path.parent) == []


def test_ranks_that_hold_no_whole_state_are_refused(tmp_path):
    whole = trained("sgd")
    errors = write_on_all(tmp_path / "two", [cut(whole, 0, 0, 3), cut(whole, 0, 2, 3)])
    assert [type(error) for error in errors] == [InvalidSpec] * 2
    assert "the ranks together do not hold all of" in str(errors[0])
    assert names_in(tmp_path) == []


def test_ranks_at_different_steps_are_refused(tmp_path):
    errors = write_on_all(tmp_path / "two", [trained("sgd", 2), trained("sgd", 3)])
    for error in errors:
        assert isinstance(error, CheckpointFailed)
        assert "different steps" in str(error)
        assert "step 2 by rank 0; step 3 by rank 1" in str(error)
    assert names_in(tmp_path) == []


def test_disks_that_are_not_shared_are_noticed(tmp_path):
    """The path of each rank leads to a disk of its own: no rank may believe that there is a
    checkpoint."""
    whole = trained("sgd")

    def act(peers):
        write(tmp_path / f"disk {peers.rank}" / "two", cut(whole, 0, peers.rank, 2), peers)

    errors = on_all(2, act)
    assert [type(error) for error in errors] == [InvalidSpec] * 2
    assert "storage that all ranks share" in str(errors[0])
    assert not (tmp_path / "disk 0" / "two").exists()


def test_a_lost_rank_breaks_the_generation_and_publishes_nothing(tmp_path):
    table = Table(2)
    table.lose()
    with pytest.raises(GenerationBroken, match="the generation ended"):
        write(tmp_path / "two", trained("sgd"), table.peers[0])
    assert not (tmp_path / "two").exists()


def test_a_tensor_without_elements_is_in_the_checkpoint(tmp_path):
    empty = TensorShard.whole(torch.zeros(0, 3))
    write(tmp_path / "one", StateShard(step=1, shards={"model.none": empty}))
    found = read(tmp_path / "one", whole_chunk).shards["model.none"]
    assert (found.shape, found.chunk) == ((0, 3), Chunk.whole((0, 3)))


def test_values_that_cannot_be_written_fail_on_all_ranks_and_leave_nothing(tmp_path):
    """The first rank alone writes these values; the others do not wait for it."""
    whole = trained("sgd")
    odd = replace(whole, values={**whole.values, "odd": object()})
    errors = write_on_all(tmp_path / "two", [odd, whole])
    assert [type(error) for error in errors] == [CheckpointFailed] * 2
    assert "not JSON serializable" in str(errors[1])
    assert names_in(tmp_path) == []
