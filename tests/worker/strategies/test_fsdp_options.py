"""Options and optimizers that the sharded strategies accept, checked before anything runs."""

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.layouts.hybrid.split_sharded import tensor_degree
from shoal.layouts.sharded import layout
from shoal.layouts.sharded.layout import ShardedOptions, ranks_of_copy
from shoal.model.elementwise_optimizers import ELEMENTWISE
from shoal.strategies import find_strategy
from shoal.strategies.layout.fsdp import FSDP
from shoal_proto.errors import InvalidSpec, UnsupportedOptimizer


class Own(torch.optim.SGD):
    """A user's optimizer, which may read any state."""


def model() -> nn.Module:
    return nn.Linear(3, 2, bias=False)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("fsdp", shoal.FSDP), ("zero2", shoal.Zero2), ("zero3", shoal.Zero3)),
        *(("hsdp", shoal.HSDP), ("fsdp-tensor", shoal.FSDPTensor)),
    ],
)
def test_sharded_strategies_are_found_by_name(name: str, kind: type[FSDP]) -> None:
    found = find_strategy(name)
    assert type(found) is kind
    assert found.name == name


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS, Own])
def test_an_optimizer_that_may_need_whole_parameters_is_refused(kind: Any) -> None:
    built = model()
    with pytest.raises(UnsupportedOptimizer, match=kind.__name__) as refused:
        FSDP().check(built, kind(built.parameters(), lr=0.1))
    assert "AdamW" in refused.value.expected
    assert "elementwise_optimizer=True" in refused.value.fix


def test_an_optimizer_that_the_user_vouches_for_is_accepted() -> None:
    built = model()
    optimizer = Own(built.parameters(), lr=0.1)
    FSDP(elementwise_optimizer=True).check(built, optimizer)
    plan = shoal.plan(built, FSDP(elementwise_optimizer=True), world_size=2, optimizer=optimizer)
    assert plan.ranks[0].parameters == 3 * 4


TELLING = sorted(ELEMENTWISE - {torch.optim.ASGD}, key=lambda kind: kind.__name__)


def test_an_optimizer_that_cannot_step_on_the_meta_device_is_refused_in_planning() -> None:
    """ASGD reads its own numbers in a step; it trains all the same."""
    built = model()
    optimizer = torch.optim.ASGD(built.parameters(), lr=0.1)
    FSDP().check(built, optimizer)
    with pytest.raises(UnsupportedOptimizer, match="ASGD cannot be computed beforehand"):
        shoal.plan(built, "fsdp", world_size=2, optimizer=optimizer)


@pytest.mark.parametrize("kind", TELLING)
def test_state_of_each_elementwise_optimizer_can_be_planned(kind: Any) -> None:
    """State of as many elements as this rank has, and perhaps a count of steps."""
    built = model()
    optimizer = kind(built.parameters(), lr=0.1)
    first, second = shoal.plan(built, "zero2", world_size=2, optimizer=optimizer).ranks
    whole = shoal.plan(built, "zero2", world_size=1, optimizer=optimizer).ranks[0]
    assert first.optimizer == second.optimizer <= whole.optimizer
    extra = 2 * first.optimizer - whole.optimizer
    assert 0 <= extra <= 12  # scalars of each parameter


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidSpec, match="param_dtype") as refused:
        FSDP(param_dtype="int3")
    assert "'bf16'" in refused.value.expected
    with pytest.raises(InvalidSpec, match="reduce_dtype"):
        shoal.Zero2(reduce_dtype="double")
    with pytest.raises(InvalidSpec, match="shard is out of range"):
        shoal.HSDP(shard=1)
    with pytest.raises(InvalidSpec, match="tensor is out of range"):
        shoal.FSDPTensor(tensor=1)
    built = model()
    with pytest.raises(InvalidSpec, match="min_group_bytes"):
        FSDP(min_group_bytes=-1).check(built, torch.optim.SGD(built.parameters(), lr=0.1))
    built.temperature = nn.Parameter(torch.ones(()))
    with pytest.raises(InvalidSpec, match="temperature"):
        FSDP().check(built, torch.optim.SGD(built.parameters(), lr=0.1))


def test_members_must_have_the_same_options() -> None:
    assert FSDP(param_dtype="bf16").options() != FSDP().options()
    assert FSDP(copies=2).options() == FSDP().options()


@pytest.mark.parametrize(
    ("world_size", "shard", "expected"),
    [
        *((8, 4, 4), (6, 4, 6), (9, 4, 9), (10, 4, 5), (12, 4, 4), (7, 4, 7), (3, 4, 3), (1, 4, 1)),
        *((4, 2, 2), (9, 2, 3), (8, None, 8)),
    ],
)
def test_a_copy_has_the_fewest_ranks_from_shard_on_that_divide_the_world(
    world_size: int, shard: int | None, expected: int
) -> None:
    assert ranks_of_copy(world_size, shard) == expected


def test_the_shard_is_an_option_that_members_must_share() -> None:
    assert shoal.HSDP(shard=2).options() != shoal.HSDP(shard=4).options()
    assert "shard" not in shoal.FSDP().options()


@pytest.mark.parametrize(
    ("world_size", "tensor", "expected"),
    [(8, 4, 4), (9, 4, 3), (6, 4, 3), (7, 4, 1), (4, 2, 2), (3, 2, 1), (2, 4, 2), (1, 2, 1)],
)
def test_layers_are_split_over_the_largest_degree_that_divides_the_world(
    world_size: int, tensor: int, expected: int
) -> None:
    assert tensor_degree(world_size, tensor) == expected


def test_plans_and_vouched_optimizers_are_refused_under_fsdp_tensor() -> None:
    with pytest.raises(InvalidSpec, match="fsdp-tensor"):
        shoal.plan(model(), shoal.FSDPTensor(), world_size=2)
    with pytest.raises(InvalidSpec, match="elementwise"):
        shoal.FSDPTensor(elementwise_optimizer=True)
    assert shoal.FSDPTensor(tensor=2).options() != shoal.FSDPTensor(tensor=4).options()


@pytest.mark.parametrize("as_stored", [False, True])
def test_the_default_dtype_of_summed_gradients_follows_torchs_release(
    as_stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dtype depends on the release of torch; members of releases that differ do not train
    together."""
    monkeypatch.setattr(layout, "REDUCES_AS_STORED", as_stored)
    stored, narrow = torch.float32, torch.bfloat16
    summed = {
        text: ShardedOptions(param_dtype=param, reduce_dtype=reduce).reduces_in(stored)
        for text, param, reduce in (
            ("by itself", narrow, None),
            ("given", narrow, torch.float16),
            ("all alike", None, None),
        )
    }
    by_itself = stored if as_stored else narrow
    assert summed == {"by itself": by_itself, "given": torch.float16, "all alike": stored}
    dtype = FSDP(param_dtype="bf16").options()["reduce_dtype"]
    assert dtype == ("as stored" if as_stored else "None")
    assert FSDP().options()["reduce_dtype"] == "None"
