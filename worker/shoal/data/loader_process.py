"""What a process that loads batches does before it loads.

It is forked from a trainer as a rule, and has what a trainer has: connections, and a handler of
signals. Peers notice a trainer's death, or that it has cut its group, by connections that end; so
none may stay open here.
"""

import ctypes
import multiprocessing
import multiprocessing.process
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from shoal.torch_private.dataloader import set_dataset_of_worker

_PR_SET_PDEATHSIG = 1


class Beginning:
    """The `worker_init_fn` of a DataLoader."""

    def __init__(
        self, dataset: Any, then: Callable[[int], None] | None, sockets: frozenset[str]
    ) -> None:
        """`sockets` may stay open: `open_sockets` before the trainer had peers. `then` is the
        script's own function."""
        self._dataset = dataset
        self._then = then
        self._sockets = sockets

    def __call__(self, worker_id: int) -> None:
        _end_with(multiprocessing.parent_process())
        # A session's handler asks for a drain; this process is none of the job's members.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _close_sockets_but(self._sockets)
        # A worker_init_fn looks there for its own dataset.
        set_dataset_of_worker(self._dataset)
        if self._then is not None:
            self._then(worker_id)


def _end_with(trainer: multiprocessing.process.BaseProcess | None) -> None:
    """Let this process end when the trainer does, however that ends. torch's own look for their
    parent every five seconds, and that is not the trainer where a server forks them for it."""
    assert trainer is not None, "what a DataLoader starts has a parent"
    if sys.platform == "linux" and trainer.pid == os.getppid():
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # What a later process has forked with it holds the sentinel too: not enough by itself there.
    threading.Thread(target=_await_end, args=(trainer,), name="await-trainer", daemon=True).start()


def _await_end(trainer: multiprocessing.process.BaseProcess) -> None:
    wait([trainer.sentinel])
    os._exit(0)


def open_sockets() -> frozenset[str]:
    """Names of this process' sockets, as the system tells them; none where it does not."""
    return frozenset(link for _, link in _descriptors() if link.startswith("socket:"))


def _close_sockets_but(kept: frozenset[str]) -> None:
    for descriptor, link in list(_descriptors()):
        if link.startswith("socket:") and link not in kept and _is_network(descriptor):
            os.close(descriptor)


def _descriptors() -> Iterator[tuple[int, str]]:
    try:
        found = list(Path("/proc/self/fd").iterdir())
    except FileNotFoundError:
        return
    for descriptor in found:
        try:
            yield int(descriptor.name), str(descriptor.readlink())
        except FileNotFoundError:
            continue  # what listed them


def _is_network(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
        return duplicate.family in (socket.AF_INET, socket.AF_INET6)
