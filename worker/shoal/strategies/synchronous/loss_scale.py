"""Update of torch's GradScaler after a step that the session took.

The scaler itself would examine this member's gradients only, which may be a shard, and would step
the optimizer.
"""

import math

import torch
import torch.distributed as dist

from shoal.backends.abortable.waiter import all_reduce
from shoal.torch_private.amp import load_scaler_state, scaler_state

LARGEST = torch.finfo(torch.float32).max


def update(scaler: torch.amp.GradScaler, *, overflowed: bool) -> None:
    """Update the scale as `GradScaler.update` does after a step.

    `overflowed`: a gradient was Inf or NaN on any member.
    """
    state = scaler_state(scaler)
    if overflowed:
        state["scale"] *= state["backoff_factor"]
        state["_growth_tracker"] = 0
    else:
        state["_growth_tracker"] += 1
        if state["_growth_tracker"] == state["growth_interval"]:
            grown = state["scale"] * state["growth_factor"]
            if math.isfinite(grown) and grown <= LARGEST:
                state["scale"] = grown
            state["_growth_tracker"] = 0
    load_scaler_state(scaler, state)


def reduce_found_inf(found: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """True on all ranks if `found` is True on any of them. Collective."""
    flag = torch.tensor([float(found)], device=device)
    if group.size() > 1:
        all_reduce(flag, group)
    return bool(flag.item())
