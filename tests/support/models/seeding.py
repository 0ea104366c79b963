"""Equal models for ranks that are threads of one process, and so share torch's generator."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_one_at_a_time = threading.Lock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed random draws within the block, independent of other threads that draw this way."""
    with _one_at_a_time, torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def draw_parameters(model: nn.Module, seed: int) -> None:
    """Draw all parameters from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
