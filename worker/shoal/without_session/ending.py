"""End of a process with fixed ranks: its Gloo groups are freed before the interpreter ends.

After a collective, a Gloo thread frees its tensors under Python's lock. If the interpreter ends
meanwhile, the process aborts, even after successful training (torch 2.13: "terminate called without
an active exception", SIGABRT). Freeing a group waits for its threads, but
`destroy_process_group()` does not free a group that a model refers to.
"""

import atexit
import gc
import weakref
from typing import Protocol

import torch.distributed as dist

from shoal.backends.network import retired
from shoal.torch_private.c10d import all_groups


class GroupOwner(Protocol):
    """An object that uses process groups until the end of the process."""

    def release_groups(self) -> list[dist.ProcessGroup]:
        """Drop all references to the groups, and return the groups."""


_holders: weakref.WeakSet[GroupOwner] = weakref.WeakSet()


def free_at_exit(holder: GroupOwner) -> None:
    """Free the holder's groups when the process ends, by its last line, an error or `sys.exit`."""
    # Registered again, to run before all functions registered so far, such as waits for groups.
    atexit.unregister(_free)
    atexit.register(_free)
    _holders.add(holder)


def _free() -> None:
    groups = [group for holder in list(_holders) for group in holder.release_groups()]
    if dist.is_initialized():
        groups += all_groups()
        dist.destroy_process_group()
    # Modules and their layouts are in reference cycles.
    gc.collect()
    retired.retire(groups)
