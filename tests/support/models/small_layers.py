"""Small models whose use of their parameters is special."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class HalfUsed(nn.Module):
    """A model of two layers, one of which takes part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.used(inputs)
        return outputs


class LimitedRows(nn.Module):
    """A layer that looks up rows of its weight and limits their norms, by a function of torch's."""

    def __init__(self, look_up: Callable[..., Tensor] = nn.functional.embedding) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 4))
        self._look_up = look_up

    def forward(self, rows: Tensor) -> Tensor:
        return self._look_up(rows, self.weight, max_norm=0.1).flatten(1)
