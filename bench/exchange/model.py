"""The exchange that every peer makes: a worker sends 100 MB of fp32 gradients, the server takes a
step of SGD, and the worker receives 100 MB of values."""

import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Protocol

import torch
from torch import Tensor

SHAPES = {f"layer{i}.weight": (1000, 2500) for i in range(10)}
LR = 0.1
NUM_BYTES = sum(4 * rows * columns for rows, columns in SHAPES.values())
"""Size of the gradients, sent in one direction."""

Exchange = Callable[[], None]
"""Pushes once, and receives the values as they are after that push."""


class Peer(Protocol):
    """A transport to measure. Its module has these two functions."""

    def serve(self, owner: Connection, num_workers: int) -> None:
        """Serve the parameters from a separate process. Sends the server's address to `owner` once
        it accepts calls, and returns when the other end of `owner` is closed."""
        ...

    def connect(self, address: str, number: int, num_workers: int) -> Exchange:
        """Return the exchange of worker `number`, in a separate process."""
        ...


class Parameters:
    """The values on a server, with SGD by the kernel that Shoal uses too."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.values = [torch.zeros(shape) for shape in SHAPES.values()]
        self._optimizer = torch.optim.SGD(self.values, lr=LR, fused=True)
        self.lock = threading.Lock()

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """Apply one step. The caller must hold the lock until the values are sent or copied."""
        for value, gradient in zip(self.values, gradients, strict=True):
            value.grad = gradient
        self._optimizer.step()


def new_gradients() -> list[Tensor]:
    return [torch.full(shape, 0.5) for shape in SHAPES.values()]


def flat_parts(received: bytearray) -> list[Tensor]:
    """Return the consecutive gradients in `received` as tensors that share its memory."""
    flat = torch.frombuffer(received, dtype=torch.float32)
    sizes = [rows * columns for rows, columns in SHAPES.values()]
    return [
        part.view(shape)
        for part, shape in zip(torch.split(flat, sizes), SHAPES.values(), strict=True)
    ]


def await_end(owner: Connection) -> None:
    """Return when the other end is closed."""
    owner.poll(None)


__all__ = [
    "LR",
    "NUM_BYTES",
    "SHAPES",
    "Exchange",
    "Parameters",
    "Peer",
    "await_end",
    "flat_parts",
    "new_gradients",
]
