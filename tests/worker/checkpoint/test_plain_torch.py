"""Plain torch, without Shoal, reads Shoal's checkpoints and trains on as Shoal would."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.models.checkpoint_world import cut, trained, write_on_all
from support.oracles import plain_torch


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the directory in which a process without Shoal saved what it read from checkpoints of
    three ranks."""
    place = tmp_path_factory.mktemp("plain")
    for name in plain_torch.OPTIMIZERS:
        state_shards = [cut(trained(name, 3), 0, rank, 3) for rank in range(3)]
        assert write_on_all(place / name, state_shards) == [None] * 3
    written = place / "written"
    written.mkdir()
    script = Path(plain_torch.__file__)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, place, written],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return written


def model_after(name, steps):
    model, optimizer = plain_torch.make(name)
    plain_torch.train(model, optimizer, range(steps))
    return model.state_dict()


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("name", plain_torch.OPTIMIZERS)
def test_plain_torch_loads_the_model(written, name):
    found, expected = torch.load(written / f"{name}.model"), model_after(name, 3)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", plain_torch.OPTIMIZERS)
def test_plain_torch_loads_the_optimizer_and_takes_the_same_next_steps(written, name):
    found, expected = torch.load(written / f"{name}.went_on"), model_after(name, 5)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", plain_torch.OPTIMIZERS)
def test_plain_torch_converts_a_checkpoint_to_one_file(written, name):
    found = torch.load(written / f"{name}.converted")
    expected = model_after(name, 3)
    assert found["model"].keys() == expected.keys()
    assert all(torch.equal(found["model"][key], expected[key]) for key in expected)
    assert [len(group["params"]) for group in found["optim"]["param_groups"]] == (
        [7] if name == "adamw" else [1, 6]
    )
