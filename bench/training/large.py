"""Model of benches that need a large state: 100 MB of parameters and AdamW's moments."""

import torch
from torch import Tensor, nn

WIDTH, NUM_LAYERS = 1024, 8
GLOBAL_BATCH = 16
STATE_MB = 3 * NUM_LAYERS * (WIDTH * WIDTH + WIDTH) * 4 / 1e6


def new_model() -> nn.Module:
    """Eight layers of 1024 x 1024: 33.6 MB of parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(NUM_LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers)


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def samples() -> tuple[Tensor, Tensor]:
    """Inputs and targets, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, WIDTH, generator=generator)
    return inputs, torch.randn(256, WIDTH, generator=generator)
