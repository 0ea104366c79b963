"""TorchStore's calls, over versions: a get returns one put, whatever a writer does meanwhile."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from support.processes.worlds import run_on_gloo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_map

from shoal.integrations import torchstore as ts
from shoal.weights.script import end_publishing
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_proto.errors import InvalidSpec, ShapeMismatch

SHAPES = {"a": (257, 64), "b": (64, 257), "c": (1024,)}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    with LocalCluster(LocalClusterConfig(directory=tmp_path / "cluster")) as running:
        monkeypatch.setenv("SHOAL_COORDINATOR", running.coordinator)
        yield running
        ts.reset_client()
        end_publishing("TorchStore/policy")


def state_of(number: float) -> dict[str, dict[str, torch.Tensor]]:
    """A nested state dict, of a model and its parts."""
    return {"model": {name: torch.full(shape, number) for name, shape in SHAPES.items()}}


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
async def test_a_get_never_mixes_two_puts() -> None:
    """A writer puts one state after the other; two readers get as often as they can."""
    torn, seen = 0, set()
    writing = True

    async def read() -> None:
        nonlocal torn
        while writing:
            found = await ts.get_state_dict("policy", state_of(0.0))
            tensors = [each.flatten() for each in found["model"].values()]
            values = {float(each[at]) for each in tensors for at in (0, -1)}
            torn += len(values) > 1
            seen.update(values)

    await ts.put_state_dict(state_of(1.0), "policy")
    readers = [asyncio.create_task(read()) for _ in range(2)]
    for number in range(2, 60):
        await ts.put_state_dict(state_of(float(number)), "policy")
    writing = False
    await asyncio.gather(*readers)
    assert torn == 0
    assert len(seen) > 3
    whole = await ts.get_state_dict("policy")
    assert float(whole["model"]["c"][0]) == 59.0
    with pytest.raises(InvalidSpec, match="not of this model"):
        await ts.get_state_dict("policy", {"model": {"other": torch.zeros(2)}})
    partial = {"model": {"c": torch.zeros(1024)}}
    await ts.get_state_dict("policy", partial, strict=False)
    assert float(partial["model"]["c"][0]) == 59.0


class OneVersion:
    """A subscription to a series with one version, of these tensors."""

    series = "TorchStore/policy"

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    async def fetch_async(self) -> dict[str, torch.Tensor]:
        return self._tensors

    def close(self) -> None:
        pass


def get_what_there_is() -> dict[str, Any]:
    """Get a version that lacks two of the reader's tensors, into slices over two ranks."""
    mesh = init_device_mesh("cpu", (2,))

    def sliced(number: float) -> torch.Tensor:
        return distribute_tensor(torch.full((3, 4), number), mesh, [Shard(0)])

    reader = {
        "common": sliced(0.0),
        "weight": nn.Parameter(torch.zeros(2)),
        "absent": sliced(7.0),
        "gone": torch.full((2,), 7.0),
    }
    wide = torch.arange(12.0).reshape(3, 4)
    version = OneVersion({"common": wide, "weight": torch.ones(2), "more": torch.ones(5)})
    other_shape = OneVersion({"common": wide + 1.0, "weight": torch.ones(1)})
    with pytest.MonkeyPatch.context() as patch, capture_logs() as logs:
        patch.setattr(ts, "subscribe", lambda series: version)
        found = asyncio.run(ts.get_state_dict("policy", reader, strict=False))
        ts.reset_client()
        patch.setattr(ts, "subscribe", lambda series: other_shape)
        with pytest.raises(ShapeMismatch) as refusal:
            asyncio.run(ts.get_state_dict("policy", reader, strict=False))
        ts.reset_client()
    wholes = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in found.items()}
    return {
        "tensors": {name: tensor.detach().tolist() for name, tensor in wholes.items()},
        "logged": [each["names"] for each in logs if each["event"] == "tensors_not_in_version"],
        "refused": str(refusal.value),
    }


@pytest.mark.long
def test_a_get_that_is_not_strict_writes_slices_and_names_what_is_missing() -> None:
    """Missing tensors stay as they are, DTensors too. If one does not fit, nothing is written."""
    for seen in run_on_gloo(2, get_what_there_is):
        assert seen["tensors"] == {
            "common": torch.arange(12.0).reshape(3, 4).tolist(),
            "weight": [1.0, 1.0],
            "absent": [[7.0] * 4] * 3,
            "gone": [7.0, 7.0],
        }
        assert seen["logged"] == [["absent", "gone"]]
        assert "weight has another shape" in seen["refused"]


STRUCTURES: list[dict[Any, Any]] = [
    {"model": {"layers.0.weight": 1, "b": 2}, "step": 3},
    {"heads": [1, {"w": 2}, [3, 4]], "pair": (1, (2,))},
    {"many": list(range(12))},
    {"a/b": 1, "a": {"b": 2}, "%2F": 3, "a%": {"": 4}, "": {"/": 5}},
    {"state": {0: {"m": 1}, 1: {"m": 2}, "0": {"m": 3}}},
    {"[0]": 1, "(0)": {"[1]": 2}, "{0}": [3], "x[0]": 4},
]


@pytest.mark.parametrize("state", STRUCTURES, ids=range(len(STRUCTURES)))
def test_a_state_dict_comes_back_as_it_was_put(state: dict[Any, Any]) -> None:
    flat = ts._flattened(tree_map(torch.tensor, state))
    shuffled = {name: flat[name] for name in sorted(flat, key=lambda each: each[::-1])}
    for found in (ts._nested(flat), ts._nested(shuffled)):
        assert tree_map(int, found) == state


def test_plain_names_are_paths() -> None:
    flat = ts._flattened({"model": {"layers.0.weight": torch.ones(1)}, "heads": [torch.ones(1)]})
    assert list(flat) == ["model/layers.0.weight", "heads/[0]"]


@pytest.mark.parametrize(
    "state",
    [
        {"a": [1]},
        {"a": []},
        {"a": [torch.ones(2), {}]},
        {"a": {1.5: torch.ones(1)}},
        {"a": {True: torch.ones(1)}},
        {"a": None},
    ],
    ids=str,
)
def test_values_that_would_not_come_back_are_refused(state: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match="cannot be published"):
        ts._flattened(state)


@pytest.mark.parametrize("key", ["policy/v1", "a b", "x" * 300])
def test_any_key_is_a_series(key: str) -> None:
    series = ts.series_of(key, "TorchStore")
    assert series.startswith("TorchStore/")
    assert len(series) < 200
