"""Of torch's DataLoader: its processes. As in torch 2.13 and 2.15."""

from typing import Any

from torch.utils.data import dataloader, get_worker_info


def end_iteration(iterator: Any) -> None:
    """Return once the processes of a DataLoader's iterator have ended; those that do not within
    seconds are terminated."""
    if isinstance(iterator, dataloader._MultiProcessingDataLoaderIter):
        iterator._shutdown_workers()


def processes_of(iterator: Any) -> list[int]:
    """Ids of the processes that load; none where the caller's own does."""
    if isinstance(iterator, dataloader._MultiProcessingDataLoaderIter):
        return [int(process.pid or 0) for process in iterator._workers]
    return []


def set_dataset_of_worker(dataset: Any) -> None:
    """What `get_worker_info().dataset` is in a process that loads, which calls this."""
    # Its class is frozen, and has no `__dict__` in newer versions.
    object.__setattr__(get_worker_info(), "dataset", dataset)
