"""Private parts of torch's DataLoader: its worker processes. Checked with torch 2.13 and 2.15."""

import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.queues import Queue
from typing import Any

from torch._C import _remove_worker_pids, _set_worker_pids
from torch.utils.data import dataloader, get_worker_info
from torch.utils.data._utils import worker

LOCK_S = 1.0
"""Limit of the wait for a lock that a live loader process holds for microseconds."""


def end_iteration(iterator: Any) -> None:
    """Return once the loader processes of an iterator have ended.

    Processes that do not end within seconds are killed: multiprocessing would wait for them at
    exit.
    """
    if isinstance(iterator, dataloader._MultiProcessingDataLoaderIter):
        is_over: Any = iterator._workers_done_event
        if is_over._cond.acquire(timeout=LOCK_S):
            is_over._cond.release()
        else:
            # A process that was killed or stopped holds the event's lock, and torch would wait.
            kill_processes(iterator)
            iterator._workers_done_event = threading.Event()  # type: ignore[assignment]
        iterator._shutdown_workers()
        kill_processes(iterator)


def kill_processes(iterator: Any) -> None:
    """Kill the loader processes, also hanging ones, and wait for their end."""
    if isinstance(iterator, dataloader._MultiProcessingDataLoaderIter):
        for process in iterator._workers:
            process.kill()
        for process in iterator._workers:
            process.join()


def has_timed_out(error: BaseException) -> bool:
    """True if `next` of an iterator exceeded its DataLoader's timeout. `next` may be called
    again."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader timed out")


def answer_unsent(answer: Callable[[Any, BaseException], Any]) -> None:
    """Install a handler in this loader process that sends `answer(batch, error)` for an unsent
    batch.

    By default multiprocessing prints the error, and the trainer waits forever.
    """
    answered: set[int] = set()

    def on_error(self: Any, error: BaseException, unsent: Any) -> None:
        index, batch = unsent
        if index in answered:
            # The answer cannot be sent either: the trainer notices the end of this process.
            traceback.print_exception(error)
            os._exit(1)
        answered.add(index)
        self.put((index, answer(batch, error)))

    # The queue looks up this method when its thread starts, at the first batch.
    Queue._on_queue_feeder_error = on_error  # type: ignore[attr-defined]


def processes_of(iterator: Any) -> list[int]:
    """Return the ids of the loader processes; none if the caller's process loads."""
    if isinstance(iterator, dataloader._MultiProcessingDataLoaderIter):
        return [int(process.pid or 0) for process in iterator._workers]
    return []


def ended_processes_of(iterator: Any, within_s: float = 0.0) -> list[int]:
    """Return the ids of the loader processes that have ended. Waits up to `within_s` for the
    first.
    """
    if not isinstance(iterator, dataloader._MultiProcessingDataLoaderIter):
        return []
    # A process closes its sentinel before its parent can reap it; a child of the process can hold
    # the sentinel open.
    closed = wait([each.sentinel for each in iterator._workers], within_s)
    ended = [e for e in iterator._workers if e.sentinel in closed or not e.is_alive()]
    return [int(each.pid or 0) for each in ended]


def defer_process_errors(iterator: Any) -> None:
    """Report the end of a loader process within `raise_on_process_end` only.

    torch's handler of SIGCHLD raises wherever the main thread is.
    """
    is_multiprocessing = isinstance(iterator, dataloader._MultiProcessingDataLoaderIter)
    if is_multiprocessing and iterator._worker_pids_set:
        _remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


@contextmanager
def raise_on_process_end(iterator: Any) -> Iterator[None]:
    """Raise RuntimeError in the main thread as soon as a loader process ends, within the block."""
    _set_worker_pids(id(iterator), tuple(processes_of(iterator)))
    try:
        yield
    finally:
        _remove_worker_pids(id(iterator))


def set_dataset_of_worker(dataset: Any) -> None:
    """Set `get_worker_info().dataset` in the calling loader process."""
    # The class of the worker info is frozen, and has no `__dict__` in newer versions.
    object.__setattr__(get_worker_info(), "dataset", dataset)


@contextmanager
def hidden_worker_info() -> Iterator[None]:
    """Make `get_worker_info()` return None within the block."""
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info
