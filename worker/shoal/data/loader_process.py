"""Preparation of a process that loads batches.

A forked process inherits the trainer's connections, and must not hold them open: peers see a
trainer's end by its closed connections.
"""

import ctypes
import multiprocessing
import multiprocessing.process
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing import util
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from shoal.data.samples import FailedSample
from shoal.torch_private.dataloader import answer_unsent, set_dataset_of_worker
from shoal_proto.errors import LoadingFailed

_PR_SET_PDEATHSIG = 1
_SOCKET_PATH_BYTES = 107
"""Longest path of a socket on Linux (unix(7)); 103 on macOS."""
_NAME_BYTES = len("/listener-01234567")
_SHORT_DIRECTORIES = ("/tmp", "/var/tmp", "/dev/shm")


class LoaderInit:
    """A DataLoader's `worker_init_fn`."""

    def __init__(
        self, dataset: Any, then: Callable[[int], None] | None, sockets: frozenset[str]
    ) -> None:
        """`sockets`: sockets to leave open, found by `open_sockets` before the trainer had
        peers. `then`: the script's own `worker_init_fn`."""
        self._dataset = dataset
        self._then = then
        self._sockets = sockets

    def __call__(self, worker_id: int) -> None:
        _end_with(multiprocessing.parent_process())
        # The inherited handler would drain the member.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _close_sockets_but(self._sockets)
        answer_unsent(_unsent)
        # The script's worker_init_fn expects its own dataset.
        set_dataset_of_worker(self._dataset)
        if self._then is not None:
            self._then(worker_id)


def _end_with(trainer: multiprocessing.process.BaseProcess | None) -> None:
    """End this process as soon as the trainer ends.

    torch's loading processes check their parent only every five seconds, and with forkserver the
    parent is not the trainer.
    """
    assert trainer is not None, "a process of a DataLoader has a parent"
    if sys.platform == "linux" and trainer.pid == os.getppid():
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # This thread alone is not enough: a later fork of the trainer keeps the sentinel open.
    threading.Thread(target=_await_end, args=(trainer,), name="await-trainer", daemon=True).start()


def _await_end(trainer: multiprocessing.process.BaseProcess) -> None:
    wait([trainer.sentinel])
    os._exit(0)


def _unsent(loaded: Any, error: BaseException) -> Any:
    """Return the report for a batch that cannot be sent, if there was a batch."""
    if loaded is None:
        return None
    run, _, is_tuple = loaded
    return run, FailedSample.of(error, None, is_unsent=True), is_tuple


def keep_socket_paths_short() -> None:
    """Choose another directory for multiprocessing's sockets if TMPDIR is too long. Call it before
    loading processes start.

    Raises LoadingFailed if no path is short enough, or multiprocessing already uses a longer one.
    """
    longest = _SOCKET_PATH_BYTES - _NAME_BYTES
    name = "/pymp-01234567"
    if len(os.fsencode(tempfile.gettempdir() + name)) <= longest:
        return
    before = tempfile.tempdir
    short = (each for each in _SHORT_DIRECTORIES if os.access(each, os.W_OK | os.X_OK))
    tempfile.tempdir = next(short, before)
    try:
        # multiprocessing removes the directory when the process ends.
        path = util.get_temp_dir()
    finally:
        tempfile.tempdir = before
    if len(os.fsencode(path)) > longest:
        raise LoadingFailed(
            "loading processes cannot open sockets: the sockets' paths would be too long",
            seen=f"{path}, a directory of {len(os.fsencode(path))} bytes",
            expected=f"at most {longest} bytes, {longest - len(name)} of them TMPDIR's",
            fix="Set TMPDIR to a directory with a shorter path, such as /tmp.",
        )


def open_sockets() -> frozenset[str]:
    """Return the names of this process' sockets in /proc; empty without /proc."""
    return frozenset(link for _, link in _descriptors() if link.startswith("socket:"))


def _close_sockets_but(kept: frozenset[str]) -> None:
    for descriptor, link in list(_descriptors()):
        if link.startswith("socket:") and link not in kept and _is_network(descriptor):
            os.close(descriptor)


def _descriptors() -> Iterator[tuple[int, str]]:
    try:
        links = list(Path("/proc/self/fd").iterdir())
    except FileNotFoundError:
        return
    for descriptor in links:
        try:
            yield int(descriptor.name), str(descriptor.readlink())
        except FileNotFoundError:
            continue


def _is_network(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
        return duplicate.family in (socket.AF_INET, socket.AF_INET6)
