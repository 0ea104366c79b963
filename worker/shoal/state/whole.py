"""The whole model of what ranks hold."""

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.state.exchange import reshard
from shoal.state.pieces import MODEL, Box, Holding


def whole_model(group: dist.ProcessGroup, holding: Holding) -> dict[str, Tensor]:
    """Every parameter and persistent buffer by its name in the user's model, on the host.

    Collective: each rank gives what it holds, and each gets all. Raises as `reshard`.
    """
    whole = reshard(group, [holding], _needed)
    return {name.removeprefix(MODEL): piece.tensor for name, piece in whole.pieces.items()}


def _needed(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Box | None:
    return Box.whole(shape) if name.startswith(MODEL) else None


__all__ = ["whole_model"]
