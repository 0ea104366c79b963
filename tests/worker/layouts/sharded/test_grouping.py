"""Grouping of modules, decided from the module tree and sizes alone."""

import pytest
import torch
from torch import nn

from shoal.layouts.sharded.grouping import Grouping, group_modules
from shoal_proto.errors import InvalidSpec

MIB = 1 << 20


def linear(num_bytes: int) -> nn.Module:
    return nn.Linear(num_bytes // 4, 1, bias=False, device="meta")


def block() -> nn.Module:
    with torch.device("meta"):
        return nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)


class Sized(nn.Module):
    """Layers with the given numbers of bytes."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(size) for size in sizes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


def modules_of(grouping: Grouping) -> list[tuple[str, ...]]:
    return [group.modules for group in grouping.groups]


def covers(model: nn.Module, grouping: Grouping) -> bool:
    """True if each parameter is in exactly one group."""
    grouped = sorted(name for group in grouping for name in group.parameters)
    return grouped == sorted(name for name, _ in model.named_parameters())


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("width", [4, 16, 64, 256, 512])
def test_a_thousand_small_layers_are_at_most_fifty_groups(width: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(1000)))
    grouping = group_modules(model)
    assert 1 <= len(list(grouping)) <= 50
    assert covers(model, grouping)


@pytest.mark.long
def test_small_layers_in_many_containers_are_at_most_fifty_groups() -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            *(nn.Sequential(*(nn.Linear(200, 200) for _ in range(n))) for n in (37, 63) * 10)
        )
    grouping = group_modules(model)
    assert len(list(grouping)) <= 50
    assert covers(model, grouping)


def test_neighbours_are_joined_until_they_are_large_enough() -> None:
    model = Sized(40, 40, 40, 40, 40, 40, 40)
    grouping = group_modules(model, 100)
    assert modules_of(grouping) == [
        ("layers.0", "layers.1", "layers.2"),
        ("layers.3", "layers.4", "layers.5"),
    ]
    assert grouping.rest.parameters == ("layers.6.weight",)


def test_a_large_layer_stays_alone_and_separates_its_neighbours() -> None:
    model = Sized(60, 400, 60, 60, 60)
    grouping = group_modules(model, 100)
    assert modules_of(grouping) == [
        ("layers.0",),
        ("layers.1",),
        ("layers.2", "layers.3"),
        ("layers.4",),
    ]


def test_repeated_blocks_are_not_cut() -> None:
    """Blocks are larger than the minimum of a group here."""
    with torch.device("meta"):
        model = nn.TransformerEncoder(block(), 4, enable_nested_tensor=False)
    grouping = group_modules(model, 1000)
    assert modules_of(grouping) == [(f"layers.{i}",) for i in range(4)]


def test_large_blocks_are_not_joined_however_many_there_are() -> None:
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(1024, 8, 4096, batch_first=True)
        model = nn.TransformerEncoder(layer, 60, enable_nested_tensor=False)
    assert len(group_modules(model).groups) == 60


def test_without_grouping_each_module_is_alone() -> None:
    model = nn.Sequential(Sized(40, 40), Sized(400))
    assert modules_of(group_modules(model, 0)) == [
        ("0.layers.0",),
        ("0.layers.1",),
        ("1.layers.0",),
    ]


def test_attention_that_reads_the_weights_of_its_parts_stays_whole() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.MultiheadAttention(64, 4), nn.Linear(64, 64))
    assert modules_of(group_modules(model, 0)) == [("0",), ("1",)]


def test_a_shared_weight_is_left_to_the_whole_model() -> None:
    model = Sized(400, 40, 400)
    first, last = model.layers[0], model.layers[2]
    assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
    last.weight = first.weight
    grouping = group_modules(model, 0)
    assert modules_of(grouping) == [("layers.1",)]
    assert grouping.rest.parameters == ("layers.0.weight",)


def test_parameters_of_a_parent_are_left_to_the_whole_model_if_small() -> None:
    model = Sized(400)
    model.scale = nn.Parameter(torch.ones(3))
    assert group_modules(model, 100).rest.parameters == ("scale",)
    assert group_modules(model, 0).rest.parameters == ("scale",)


def test_two_dtypes_in_one_group_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64))
    with pytest.raises(InvalidSpec, match="several dtypes") as refused:
        group_modules(model)
    assert "1.weight: torch.float64" in refused.value.seen
    model[0].requires_grad_(False)  # frozen parameters are only gathered
    assert group_modules(model).rest.num_bytes == 6 * 4 + 6 * 8


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="min_group_bytes"):
        group_modules(Sized(40), -1)
