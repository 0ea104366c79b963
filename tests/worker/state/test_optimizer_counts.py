"""An optimizer's step counts are restored to the device on which its kernels read them."""

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
    assert place_state(parameters[0], torch.tensor(3.0), optimizer).device.type == device
    assert place_state(parameters[0], torch.ones(2), optimizer).device.type == "meta"
    assert place_state(parameters[1], torch.tensor(3.0), optimizer).device.type == "cpu"
