"""Communicators on a device, made while the trainer can be let through.

NCCL makes a communicator with the first operation of a group, in a call that returns once all ranks
are in it. Nothing ends that call: until it returns, torch has no communicator to abort, and in the
non-blocking form torch holds the communicator's lock meanwhile (`NCCLComm::waitReady`), for which
an abort waits. So a thread makes the call, and the trainer waits for the thread.
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
    """Collective: count these groups, made within another, to that one's waiters, and connect them
    on the device.

    A group is connected before its ranks send each other messages in batches: the first batch of a
    group that is not connected takes all ranks of the group. Raises RuntimeError if a group could
    not be connected, or if it was given up with the waiters of the whole.
    """
    for group in groups:
        add_subgroup(group, whole)
        if group.size() > 1 and takes_batches(group, device):
            connect(group, device, AbortableWaiter(whole))


def connect(group: dist.ProcessGroup, device: torch.device, waiter: AbortableWaiter) -> None:
    """Collective: make the communicator of the group on this device. Raises RuntimeError if that
    failed, and as soon as the waiter is aborted; the thread that makes it is left behind then."""
    _connect_by(lambda: group.allreduce([torch.zeros(1, device=device)]), device, waiter)


def connect_neighbours(
    group: dist.ProcessGroup, whole: dist.ProcessGroup, device: torch.device
) -> None:
    """Collective: make the connections that carry messages between a rank of the group and the next
    rank, if the group's communicator does not include them. Raises as `add_subgroups`."""
    if not takes_batches(group, device):
        return
    rank, waiter = group.rank(), AbortableWaiter(whole)
    for lower in (rank - 1, rank):
        if not 0 <= lower < group.size() - 1:
            continue
        message = [torch.zeros(1, device=device)]
        sends = partial(group.send, message, rank + 1, 0)
        receives = partial(group.recv, message, rank - 1, 0)
        _connect_by(sends if lower == rank else receives, device, waiter)


def _connect_by(
    begin: Callable[[], dist.Work], device: torch.device, waiter: AbortableWaiter
) -> None:
    completion = waiter.new_completion()
    thread = threading.Thread(
        target=_make,
        args=(begin, device, partial(waiter.complete, completion)),
        name="shoal-connect",
        daemon=True,
    )
    thread.start()
    reason = completion.wait()
    waiter.forget()
    if reason:
        # A class that every backend recognises as a failure of the group.
        raise dist.DistBackendError(reason)


def _make(begin: Callable[[], dist.Work], device: torch.device, end: Callable[[str], None]) -> None:
    try:
        begin().wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        end(str(error) or "a communicator could not be made, without a reason")
    else:
        end("")
