"""What a trace leaves behind in the process."""

import torch
from torch import Tensor, nn
from torch.utils import _device

from shoal.layouts.pipeline.tracing import trace


class Masked(nn.Module):
    """Makes something by itself, on a device that it names with a context."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.device("cpu"):
            mask = torch.ones(2)
        return x * mask


def test_devices_named_by_a_context_hold_after_a_trace() -> None:
    """Also where the first such context of the process is in the traced model: torch looks then
    which functions make tensors."""
    _device._device_constructors.cache_clear()
    trace(Masked(), (), training=True)
    with torch.device("meta"):
        assert torch.ones(2).device.type == "meta"
