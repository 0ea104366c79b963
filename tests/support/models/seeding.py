"""Equal models for ranks that are threads of one process, and so share torch's generator."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_one_at_a_time = threading.Lock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed random draws within the block, independent of other threads that draw this way."""
    with _one_at_a_time, torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
