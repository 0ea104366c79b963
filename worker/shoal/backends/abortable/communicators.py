"""Create communicators on a device. The trainer's wait for a communicator can be aborted.

NCCL creates a communicator in a group's first operation, which returns once all ranks have made it;
until then, torch has nothing to abort. In NCCL's non-blocking mode an abort would wait for the lock
that torch holds meanwhile (`NCCLComm::waitReady`). So a thread makes the call, and the trainer
waits for the thread.
"""

import threading
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist

from shoal.backends.abortable.waiter import AbortableWaiter, add_subgroup
from shoal.torch_private.c10d import takes_batches


def add_subgroups(
    groups: Iterable[dist.ProcessGroup], whole: dist.ProcessGroup, device: torch.device
) -> None:
    """Register the subgroups, so that an abort of the whole group's waits ends waits in them too,
    and connect them on the device. Collective.

    Raises RuntimeError if a group could not be connected, or if the whole group's waiters are
    aborted.
    """
    for group in groups:
        add_subgroup(group, whole)
        if group.size() > 1 and takes_batches(group, device):
            connect(group, device, AbortableWaiter(whole))


def connect(group: dist.ProcessGroup, device: torch.device, waiter: AbortableWaiter) -> None:
    """Create the group's communicator on this device. Collective. Raises RuntimeError if that fails
    or the waiter is aborted. After an abort the creating thread may stay blocked."""
    _connect_in_thread(lambda: group.allreduce([torch.zeros(1, device=device)]), device, waiter)


def connect_neighbours(
    group: dist.ProcessGroup, whole: dist.ProcessGroup, device: torch.device
) -> None:
    """Connect each rank of the group with the next rank, if the backend needs that. Collective;
    raises what `add_subgroups` raises."""
    if not takes_batches(group, device):
        return
    rank, waiter = group.rank(), AbortableWaiter(whole)
    for lower in (rank - 1, rank):
        if not 0 <= lower < group.size() - 1:
            continue
        message = [torch.zeros(1, device=device)]
        sends = partial(group.send, message, rank + 1, 0)
        receives = partial(group.recv, message, rank - 1, 0)
        _connect_in_thread(sends if lower == rank else receives, device, waiter)


def _connect_in_thread(
    begin: Callable[[], dist.Work], device: torch.device, waiter: AbortableWaiter
) -> None:
    completion = waiter.new_completion()
    thread = threading.Thread(
        target=_run_and_report,
        args=(begin, device, partial(waiter.complete, completion)),
        name="shoal-connect",
        daemon=True,
    )
    thread.start()
    reason = completion.wait()
    waiter.forget()
    if reason:
        # Every backend recognises this class as a failure of the group.
        raise dist.DistBackendError(reason)


def _run_and_report(
    begin: Callable[[], dist.Work], device: torch.device, end: Callable[[str], None]
) -> None:
    try:
        begin().wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        end(str(error) or "a communicator could not be created; the error has no text")
    else:
        end("")
