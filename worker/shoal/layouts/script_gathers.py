"""The script's own `torch.distributed.all_gather` in a step whose shares are of unequal sizes.

Between ranks that hand in tensors of other sizes than the others expect, Gloo ends a process, or
waits until the limit of a collective: in each generation anew. So in such a step members first tell
each other what they hand in. `torch.distributed.nn.all_gather`, and the layers that scripts for
SimCLR and CLIP have, go through this call too.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shoal.torch_private.watching import before_calls

Check = Callable[[Sequence[Tensor], Tensor], None]
"""(outputs, tensor): raises what the call is to be refused with."""


class _Here(threading.local):
    """By thread: members may be threads of one process."""

    check: Check | None = None


_here = _Here()


def put(check: Check | None) -> None:
    """From here on this is called before the script gathers on torch's default group; None:
    nothing is."""
    _here.check = check


def watch() -> None:
    """Once for the process; harmless where nothing is put."""
    before_calls(dist, "all_gather", _look)


def _look(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> None:
    # Whoever names a group is no script that takes the default one: our own calls do.
    if group is None and _here.check is not None:
        _here.check(tensor_list, tensor)
