"""The end of a process whose ranks are fixed: its Gloo groups go before the interpreter does.

Behind the end of a collective a thread of Gloo's frees what it was about, and takes Python's lock
to free a tensor. If the interpreter ends meanwhile, that takes the process with it (torch 2.13:
"terminate called without an active exception", SIGABRT), however well the training went. Freeing a
group waits for its threads; but `destroy_process_group()` frees none that a model refers to.
"""

import atexit
import gc
import weakref
from typing import Protocol

import torch.distributed as dist

from shoal.backends.network import retired
from shoal.torch_private.c10d import all_groups


class HoldsGroups(Protocol):
    """What trains over groups until the end of the process."""

    def let_go(self) -> list[dist.ProcessGroup]:
        """Refer to none of them any more; which they were."""


_holders: weakref.WeakSet[HoldsGroups] = weakref.WeakSet()


def free_at_exit(holder: HoldsGroups) -> None:
    """Have the groups freed when the process ends: by its last line, an error or `sys.exit`."""
    # Anew: what was registered by now is called behind it, as is what waits for the freeing.
    atexit.unregister(_free)
    atexit.register(_free)
    _holders.add(holder)


def _free() -> None:
    groups = [group for holder in list(_holders) for group in holder.let_go()]
    if dist.is_initialized():
        groups += all_groups()
        dist.destroy_process_group()
    # Modules refer to their layouts in circles.
    gc.collect()
    retired.retire(groups)
