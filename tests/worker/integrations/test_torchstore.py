"""TorchStore's calls, over versions: a get returns one put, whatever a writer does meanwhile."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.integrations import torchstore as ts
from shoal.weights.script import end_publishing
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_proto.errors import InvalidSpec

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


@pytest.mark.parametrize("key", ["policy/v1", "a b", "x" * 300])
def test_any_key_is_a_series(key: str) -> None:
    series = ts.series_of(key, "TorchStore")
    assert series.startswith("TorchStore/")
    assert len(series) < 200
