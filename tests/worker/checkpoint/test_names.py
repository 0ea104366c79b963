"""Names in a checkpoint are those that plain torch gives the same state."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.models.checkpoint_world import trained
from support.oracles.plain_torch import OPTIMIZERS, make, save, train

from shoal.checkpoint.index import read_index
from shoal.checkpoint.names import (
    OWN,
    entries_of,
    groups_of,
    name_of_tensor,
    own_state,
    path_of,
    slots_of,
)
from shoal.checkpoint.writing import write
from shoal_proto.errors import InvalidSpec, MalformedMessage

# DCP gives this warning without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.sampled()
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_entries_are_those_of_plain_torch(tmp_path, optimizer_name):
    """Keys, shapes, dtypes and paths are the same: a reader of one format reads the other."""
    model, optimizer = make(optimizer_name)
    train(model, optimizer, range(3))
    save(tmp_path / "torch", model, optimizer)
    write(tmp_path / "shoal", trained(optimizer_name))
    theirs, ours = (
        dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("torch", "shoal")
    )
    own = ".".join(OWN)
    assert ours.planner_data.pop(own) == OWN
    del ours.state_dict_metadata[own]
    assert ours.planner_data == theirs.planner_data
    for each in theirs.state_dict_metadata.values():
        if hasattr(properties := getattr(each, "properties", None), "strides"):
            properties.strides = None  # torch writes it since 2.14, and no reader needs it
    assert ours.state_dict_metadata == theirs.state_dict_metadata


@pytest.mark.parametrize(
    "name",
    [
        "model.a.b.weight",
        "model.bias",
        "optim.a.b.weight/exp_avg",
        "optim.bias/step",
        "optim.a.weight/#history.0",
        "optim.a.weight/#factors.left.1",
        "optim.a.weight/#factors.01",
        "optim.a.weight/#of.dots.0",
    ],
)
def test_a_name_is_the_same_after_conversion_to_a_path_and_back(name):
    inside = {"a.weight": {"history": [], "factors": {}, "of.dots": []}}
    assert name_of_tensor(path_of(name), inside) == name


def test_a_key_with_a_dot_is_no_part_of_another_value():
    entries = {("optim", "state", "p", "a.b"): 1, ("optim", "state", "p", "a", "b"): 2}
    assert slots_of(entries, {"p": {"a": {"b": 2}}}) == {"p": {"a": {"b": 2}, "a.b": 1}}


def test_groups_are_the_same_after_conversion_to_entries_and_back():
    groups = [
        {"params": ["a", "b"], "lr": 0.1, "betas": {"$tuple": [0.9, 0.99]}, "fused": None},
        {"params": ["c"], "lr": {"$numbers": ["float64", 0.1]}, "betas": [0.8], "fused": True},
    ]
    entries = entries_of(7, {"groups": groups})
    assert groups_of(entries) == groups
    assert entries["optim", "param_groups", 0, "betas"] == (0.9, 0.99)
    assert entries["optim", "param_groups", 1, "betas"] == [0.8]
    lr = entries["optim", "param_groups", 1, "lr"]
    assert isinstance(lr, torch.Tensor)
    assert (lr.dtype, lr.item()) == (torch.float64, 0.1)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (("optim", "state.a.weight.exp_avg"), "flattened"),
        (("optim", "state", "a.weight", "factors", "left"), "cannot be part"),
    ],
)
def test_a_path_that_has_no_name_is_refused(path, reason):
    with pytest.raises(InvalidSpec, match=reason) as raised:
        name_of_tensor(path, {})
    assert ".".join(path) in str(raised.value)


def test_the_index_has_the_paths_that_were_written(tmp_path):
    write(tmp_path / "one", trained("sgd"))
    index = read_index(tmp_path / "one")
    assert ("optim", "state", "first.weight", "momentum_buffer") in index.tensors
    assert ("model", "again.weight") in index.tensors
    assert ("optim", "param_groups", 1, "params") in index.objects


@pytest.mark.parametrize(
    "damage", [{"step": "many"}, {"step": None}, {"values": 7}, {"step": float("inf")}]
)
def test_a_damaged_entry_of_shoals_own_is_malformed(damage):
    with pytest.raises(MalformedMessage, match=r"shoal\.state cannot be read"):
        own_state(json.dumps({"format": 1, "step": 3, "values": {}} | damage))
