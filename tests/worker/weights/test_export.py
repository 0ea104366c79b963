"""Export of a version as a directory of safetensors files."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.weights.memory_series import MemorySeries
from torch import Tensor

from shoal.weights import export as module
from shoal.weights.export import Format, export
from shoal.weights.series import Publications, PublisherRank, SeriesOptions, held_state
from shoal.weights.subscription import Weights
from shoal_proto.errors import InvalidSpec


def published(count: int = 1, metadata: Mapping[str, object] | None = None) -> list[Weights]:
    series = MemorySeries()
    publications = Publications("job/policy", series.connect, SeriesOptions())
    for number in range(1, count + 1):
        head = torch.full((4, 2), float(number), dtype=torch.bfloat16)
        state = {"a": torch.arange(6.0).view(2, 3) * number, "embed": head, "head": head}
        own = held_state(state, step=number * 10, rank=0, world_size=1)
        rank = PublisherRank(number=1, rank=0, world_size=1)
        publications.publish(own, rank, metadata).wait(timeout=10)
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


def test_versions_are_exported_side_by_side_as_sglang_pulls_them(tmp_path: Path) -> None:
    """`pull()` takes a directory as a full checkpoint if its index has no delta_encoding."""
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


class MeasuredTensor(Tensor):
    """A tensor that counts how often its size is asked for."""

    num_measured = 0

    @property
    def nbytes(self) -> int:
        MeasuredTensor.num_measured += 1
        return super().nbytes


def test_the_work_of_cutting_is_linear_in_the_number_of_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [weights] = published()
    tensors = {str(n): torch.zeros(1).as_subclass(MeasuredTensor) for n in range(2000)}
    monkeypatch.setattr(weights, "items", tensors.items)
    export(weights, tmp_path / "model")
    assert MeasuredTensor.num_measured <= 4 * len(tensors)


def test_a_version_is_exported_once_and_another_does_not_take_its_directory(
    tmp_path: Path,
) -> None:
    first, second = published(2)
    assert export(first, tmp_path / "model") == export(first, tmp_path / "model")
    with pytest.raises(InvalidSpec, match="exists already, and holds"):
        export(second, tmp_path / "model")


def test_processes_that_export_at_the_same_time_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes in containers may all have the same process id. The second one begins and ends
    while the first one writes."""
    monkeypatch.setattr("os.getpid", lambda: 1)
    [weights] = published()
    write, inner = module.write_safetensors, []

    def write_slowly(tensors: Mapping[str, Tensor], path: Path) -> None:
        write(tensors, path)
        if not inner:
            inner.append(path)
            export(weights, tmp_path / "model")
            write(tensors, path)

    monkeypatch.setattr(module, "write_safetensors", write_slowly)
    where = export(weights, tmp_path / "model")
    assert [each.name for each in tmp_path.iterdir()] == ["model"]
    [file] = where.glob("*.safetensors")
    assert torch.equal(load_file(file)["a"], weights["a"])


def test_metadata_of_the_publisher_replace_nothing_of_the_index(tmp_path: Path) -> None:
    """A publisher may call its own values version, step or digest, too."""
    own = {"step": "last", "digest": "none", "total_size": 0, "loss": 0.5}
    [weights] = published(metadata=own)
    where = export(weights, tmp_path / "model")
    metadata = json.loads((where / module.INDEX).read_text())["metadata"]
    assert (metadata["step"], metadata["total_size"], metadata["loss"]) == (10, 40, "0.5")
    assert export(weights, where) == where


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    [found] = published()
    weights = Weights(found.version, {**found, "embed": torch.ones(2, dtype=torch.complex64)})
    with pytest.raises(InvalidSpec, match="embed cannot be exported"):
        export(weights, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["safetensors", "sglang"])
def test_weights_without_tensors_are_refused(tmp_path: Path, format: Format) -> None:  # noqa: A002
    """A fetch with `into` leaves no tensors: the export would look complete."""
    [weights] = published()
    with pytest.raises(InvalidSpec, match="hold no tensors") as refused:
        export(Weights(weights.version, {}), tmp_path / "model", format=format)
    assert "without `into`" in refused.value.fix
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_the_file_format_reserves_is_refused(tmp_path: Path) -> None:
    """The safetensors library could not open the file."""
    with pytest.raises(InvalidSpec, match="the file format reserves"):
        module.write_safetensors({"__metadata__": torch.ones(2)}, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
