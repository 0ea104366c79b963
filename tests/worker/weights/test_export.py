"""A version as a directory of safetensors files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.weights.memory_series import MemorySeries

from shoal.weights import export as module
from shoal.weights.export import export
from shoal.weights.series import Publications, PublisherRank, SeriesOptions, held_state
from shoal.weights.subscription import Weights
from shoal_proto.errors import InvalidSpec


def published(count: int = 1) -> list[Weights]:
    series = MemorySeries()
    publications = Publications("job/policy", series.connect, SeriesOptions())
    for number in range(1, count + 1):
        head = torch.full((4, 2), float(number), dtype=torch.bfloat16)
        state = {"a": torch.arange(6.0).view(2, 3) * number, "embed": head, "head": head}
        own = held_state(state, step=number * 10, rank=0, world_size=1)
        publications.publish(own, PublisherRank(number=1, rank=0, world_size=1)).wait(timeout=10)
    publications.close()
    return [series.subscription().fetch(number) for number in range(1, count + 1)]


def test_the_files_are_those_that_the_safetensors_library_reads(tmp_path: Path) -> None:
    [weights] = published()
    where = export(weights, tmp_path / "model")
    [file] = where.glob("*.safetensors")
    found = load_file(file)
    assert found.keys() == {"a", "embed"}
    assert all(torch.equal(each, weights[name]) for name, each in found.items())
    index = json.loads((where / module.INDEX).read_text())
    assert index["weight_map"] == {"a": file.name, "embed": file.name}
    assert index["metadata"]["total_size"] == 6 * 4 + 8 * 2


def test_versions_stand_beside_each_other_as_sglang_pulls_them(tmp_path: Path) -> None:
    """`pull()` takes a directory whose index has no delta_encoding for a full checkpoint."""
    (base := tmp_path / "base").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", module.INDEX):
        (base / name).write_text("{}")
    for weights in published(2):
        export(weights, tmp_path / "source", format="sglang", base=base)
    names = sorted(each.name for each in (tmp_path / "source").iterdir())
    assert names == ["weight_v000001", "weight_v000002"]
    newest = tmp_path / "source" / "weight_v000002"
    assert sorted(each.name for each in newest.iterdir()) == [
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    metadata = json.loads((newest / module.INDEX).read_text())["metadata"]
    assert "delta_encoding" not in metadata
    assert (metadata["version"], metadata["step"]) == ("000002", 20)


def test_large_models_are_cut_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", 30)
    [weights] = published()
    where = export(weights, tmp_path / "model")
    names = sorted(each.name for each in where.glob("*.safetensors"))
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_a_version_is_exported_once_and_another_does_not_take_its_directory(
    tmp_path: Path,
) -> None:
    first, second = published(2)
    assert export(first, tmp_path / "model") == export(first, tmp_path / "model")
    with pytest.raises(InvalidSpec, match="is there already"):
        export(second, tmp_path / "model")


def test_an_export_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [weights] = published()
    monkeypatch.setattr(module, "_DTYPES", {torch.float32: "F32"})
    with pytest.raises(InvalidSpec, match="embed cannot be exported"):
        export(weights, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
