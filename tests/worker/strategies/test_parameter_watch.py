"""Writes to parameters that torch does not count are found by their elements."""

import pytest
import torch
from torch import Tensor, nn

from shoal.strategies.rollback import parameter_watch
from shoal.strategies.rollback.parameter_watch import ParameterWatch

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


@pytest.fixture(params=["host", "device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Location of tensors. `device`: as if reading a tensor required a wait."""
    if request.param == "device":
        monkeypatch.setattr(parameter_watch, "is_on_host", lambda tensor: False)


def parameters() -> dict[str, Tensor]:
    found: dict[str, Tensor] = {
        str(dtype): nn.Parameter(torch.ones(5, 3).to(dtype), requires_grad=False)
        for dtype in DTYPES
    }
    not_numbers = nn.Parameter(torch.full((2,), float("nan")), requires_grad=False)
    return found | {"nan": not_numbers, "empty": nn.Parameter(torch.empty(0, 3))}


@pytest.mark.usefixtures("where")
def test_nothing_is_found_if_nothing_was_written() -> None:
    watch = ParameterWatch(parameters())
    watch.mark()
    assert watch.changed(closely=True) == set()


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("name", [*map(str, DTYPES), "nan"])
def test_a_close_check_finds_a_write_through_data(name: str) -> None:
    held = parameters()
    watch = ParameterWatch(held)
    watch.mark()
    held[name].data.zero_()
    assert watch.changed(closely=True) == {name}
    watch.mark()
    assert watch.changed(closely=True) == set()


@pytest.mark.usefixtures("where")
def test_a_close_check_finds_other_memory() -> None:
    held = parameters()
    watch = ParameterWatch(held)
    watch.mark()
    held["nan"].data = held["nan"].data.clone()
    assert watch.changed(closely=True) == {"nan"}


@pytest.mark.usefixtures("where")
def test_quick_checks_find_a_write_to_each_parameter_in_turn() -> None:
    held = parameters()
    watch = ParameterWatch(held)
    found: set[str] = set()
    for _ in range(parameter_watch.EVERY_STEPS_ON_GPU * parameter_watch.NUM_TURNS):
        watch.mark()
        for each in held.values():
            each.data.copy_(each.data.logical_not())
        found |= watch.changed(closely=False)
    assert found == held.keys() - {"empty"}
