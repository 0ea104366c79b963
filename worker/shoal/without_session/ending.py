"""End of a process with fixed ranks: its Gloo groups are freed before the interpreter ends.

After a collective, a thread of Gloo's frees its tensors, and takes Python's lock for that. If the
interpreter ends meanwhile, the process aborts, even after a successful training (torch 2.13:
"terminate called without an active exception", SIGABRT). Freeing a group waits for its threads; but
`destroy_process_group()` frees none that a model refers to.
"""

import atexit
import gc
import weakref
from typing import Protocol

import torch.distributed as dist

from shoal.backends.network import retired
from shoal.torch_private.c10d import all_groups


class GroupOwner(Protocol):
    """Owner of groups that it uses until the end of the process."""

    def release_groups(self) -> list[dist.ProcessGroup]:
        """Drop all references to its groups, and return the groups."""


_holders: weakref.WeakSet[GroupOwner] = weakref.WeakSet()


def free_at_exit(holder: GroupOwner) -> None:
    """Free the holder's groups when the process ends: by its last line, an error or `sys.exit`."""
    # Registered anew: it runs before all that was registered until now, such as waits for the
    # freeing.
    atexit.unregister(_free)
    atexit.register(_free)
    _holders.add(holder)


def _free() -> None:
    groups = [group for holder in list(_holders) for group in holder.release_groups()]
    if dist.is_initialized():
        groups += all_groups()
        dist.destroy_process_group()
    # Modules refer to their layouts in circles.
    gc.collect()
    retired.retire(groups)
