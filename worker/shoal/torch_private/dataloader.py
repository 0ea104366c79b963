"""Of torch's DataLoader: its processes. As in torch 2.13 and 2.15."""

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.queues import Queue
from typing import Any

from torch._C import _remove_worker_pids, _set_worker_pids
from torch.utils.data import dataloader, get_worker_info
from torch.utils.data._utils import worker


def end_iteration(iterator: Any) -> None:
    """Return once the processes of a DataLoader's iterator have ended; those that do not within
    seconds are killed: multiprocessing would wait for them at the trainer's end."""
    if isinstance(iterator, dataloader._MultiProcessingDataLoaderIter):
        iterator._shutdown_workers()
        kill_processes(iterator)


def kill_processes(iterator: Any) -> None:
    """SIGKILL the processes that load: those that do nothing any more end by nothing else."""
    if isinstance(iterator, dataloader._MultiProcessingDataLoaderIter):
        for process in iterator._workers:
            process.kill()
        for process in iterator._workers:
            process.join()


def has_timed_out(error: BaseException) -> bool:
    """True if `next` of an iterator waited for its DataLoader's timeout; it may be called again."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader timed out")


def answer_unsent(answer: Callable[[Any, BaseException], Any]) -> None:
    """In a process that loads: where a loaded batch cannot be sent, because a thread of
    multiprocessing fails to pickle it or to open a socket, send `answer(batch, error)` in its
    place. multiprocessing itself prints the error, and the trainer waits for ever."""
    answered: set[int] = set()

    def on_error(self: Any, error: BaseException, unsent: Any) -> None:
        index, batch = unsent
        if index in answered:
            # Not even that can be sent: the end of this process tells the trainer.
            traceback.print_exception(error)
            os._exit(1)
        answered.add(index)
        self.put((index, answer(batch, error)))

    # Looked up on the queue when its thread starts, which is with the first batch.
    Queue._on_queue_feeder_error = on_error  # type: ignore[attr-defined]


def processes_of(iterator: Any) -> list[int]:
    """Ids of the processes that load; none where the caller's own does."""
    if isinstance(iterator, dataloader._MultiProcessingDataLoaderIter):
        return [int(process.pid or 0) for process in iterator._workers]
    return []


def ended_processes_of(iterator: Any, within_s: float = 0.0) -> list[int]:
    """Ids of those that have ended by themselves, or were killed; of the first that does within so
    long, if none has."""
    if not isinstance(iterator, dataloader._MultiProcessingDataLoaderIter):
        return []
    if within_s:
        wait([each.sentinel for each in iterator._workers], within_s)
    return [int(each.pid or 0) for each in iterator._workers if not each.is_alive()]


def raise_nothing_at_their_end(iterator: Any) -> None:
    """Let the end of a process that loads be told within `raising_at_their_end` only.

    torch's handler of SIGCHLD raises a RuntimeError wherever the main thread is at that moment: in
    the midst of a collective, say.
    """
    is_multiprocessing = isinstance(iterator, dataloader._MultiProcessingDataLoaderIter)
    if is_multiprocessing and iterator._worker_pids_set:
        _remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


@contextmanager
def raising_at_their_end(iterator: Any) -> Iterator[None]:
    """Within, a process that ends raises RuntimeError in the main thread at once; elsewhere torch
    looks for them every five seconds of a wait."""
    _set_worker_pids(id(iterator), tuple(processes_of(iterator)))
    try:
        yield
    finally:
        _remove_worker_pids(id(iterator))


def set_dataset_of_worker(dataset: Any) -> None:
    """What `get_worker_info().dataset` is in a process that loads, which calls this."""
    # Its class is frozen, and has no `__dict__` in newer versions.
    object.__setattr__(get_worker_info(), "dataset", dataset)


@contextmanager
def hidden_worker_info() -> Iterator[None]:
    """Within, `get_worker_info()` is None, as in a process that loads for nobody."""
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info
