"""Where an optimizer's counts of steps are put back: where its kernels look for them."""

import pytest
import torch
from torch import nn

from shoal.state.replicated import beside


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
    """With the parameter under kernels that read them there, else on the host."""
    parameters = [nn.Parameter(torch.empty(2, device="meta")), nn.Parameter(torch.empty(2))]
    optimizer = torch.optim.SGD([{"params": [each]} for each in parameters], lr=0.1)
    optimizer.param_groups[0].update(setting)
    assert beside(parameters[0], torch.tensor(3.0), optimizer).device.type == device
    assert beside(parameters[0], torch.ones(2), optimizer).device.type == "meta"
    assert beside(parameters[1], torch.tensor(3.0), optimizer).device.type == "cpu"
