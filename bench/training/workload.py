"""Workload of every system in bench/recovery.py, and the record of a worker's steps.

It imports none of the systems, so that each peer's interpreter can import it.
"""

import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

NUM_FEATURES, NUM_CLASSES = 256, 10
NUM_SAMPLES = 4096
GLOBAL_BATCH = 64
PAUSE_S = 0.01
"""Pause in each step in place of work on a device, so that the cores are not the limit."""


def new_model() -> nn.Module:
    """A network of 101,386 parameters, the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def samples() -> tuple[Tensor, Tensor]:
    """Inputs and targets, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=generator)
    return inputs, torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=generator)


class StepLog:
    """A file of one JSON line for each committed step, `steps-PID` in the directory."""

    def __init__(self, directory: Path) -> None:
        self._pid = os.getpid()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._descriptor = os.open(directory / f"steps-{self._pid}", flags, 0o644)

    def committed(self, *, formation: int, world_size: int, step: int = 0) -> None:
        """Record a step. `formation` changes with each change of the training workers."""
        line = {
            "at_s": time.monotonic(),  # one clock for all processes of this machine
            "pid": self._pid,
            "agent": os.getppid(),
            "formation": formation,
            "world_size": world_size,
            "step": step,
        }
        # A single write: a SIGKILL cannot leave part of a line.
        os.write(self._descriptor, (json.dumps(line) + "\n").encode())
