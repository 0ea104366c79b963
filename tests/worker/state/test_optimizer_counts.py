"""An optimizer's state is restored to the devices on which its kernels read it."""

import pytest
import torch
from torch import nn

from shoal.state.replicated import place_state


@pytest.mark.parametrize(
    ("setting", "device"),
    [
        ({}, "cpu"),
        ({"fused": True}, "meta"),
        ({"capturable": True}, "meta"),
        ({"fused": None}, "cpu"),
    ],
)
def test_counts_go_where_the_optimizer_reads_them(setting: dict[str, object], device: str) -> None:
    """Counts go to the parameter's device if the kernels read them there, otherwise to the host."""
    parameters = [nn.Parameter(torch.empty(2, device="meta")), nn.Parameter(torch.empty(2))]
    optimizer = torch.optim.SGD([{"params": [each]} for each in parameters], lr=0.1)
    optimizer.param_groups[0].update(setting)
    count = torch.tensor(3.0)
    assert place_state(parameters[0], "step", count, optimizer).device.type == device
    assert place_state(parameters[1], "step", count, optimizer).device.type == "cpu"


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("key", ["exp_avg", "eta"])
def test_other_state_goes_to_the_parameters_device(shape: tuple[int, ...], key: str) -> None:
    """A scalar goes there too: it may be the state of a scalar parameter."""
    parameter = nn.Parameter(torch.empty(shape, device="meta"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert place_state(parameter, key, torch.ones(shape), optimizer).device.type == "meta"
    assert place_state(parameter, key, torch.tensor(1.0), optimizer).device.type == "meta"


def test_what_nadam_reads_in_each_step_stays_on_the_host() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.NAdam([parameter])
    placed = place_state(parameter, "mu_product", torch.tensor(0.5), optimizer)
    assert placed.device.type == "cpu"
