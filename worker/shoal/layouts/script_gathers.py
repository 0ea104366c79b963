"""The script's own `torch.distributed.all_gather` in a step whose shares are of unequal sizes.

If ranks hand in tensors of other sizes than the others expect, Gloo ends a process, or waits until
the limit of a collective, in each generation anew. So in such a step members first tell each other
what they hand in. `torch.distributed.nn.all_gather`, and the layers that scripts for SimCLR and
CLIP have, go through this call too.
"""

from typing import Any

import torch.distributed as dist

from shoal import step_context
from shoal.torch_private.watching import before_calls


def watch() -> None:
    """Check gathers from now on, in steps that ask for it. The first call counts."""
    before_calls(dist, "all_gather", _look)


def _look(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> None:
    # Shoal's own calls name a group.
    if group is None and (check := step_context.current().check_gather) is not None:
        check(tensor_list, tensor)
