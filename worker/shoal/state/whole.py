"""The whole model of what ranks hold."""

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.gates import finish
from shoal.state.exchange import reshard
from shoal.state.pieces import MODEL, Box, Holding

log = structlog.get_logger(__name__)


def whole_model(group: dist.ProcessGroup, holding: Holding) -> dict[str, Tensor]:
    """Every parameter and persistent buffer by its name in the user's model, on the host.

    Collective: each rank gives what it holds, and each gets all. Raises as `reshard`.
    """
    whole = reshard(group, [holding], _needed)
    try:
        # So that no rank leaves while another still waits for its pieces.
        finish(dist.all_reduce(torch.zeros(1), group=group, async_op=True), group)
    except RuntimeError as error:
        # Somebody has left behind it: then all have everything, this rank too.
        log.info("left_behind_whole_model", reason=str(error)[:300])
    return {name.removeprefix(MODEL): piece.tensor for name, piece in whole.pieces.items()}


def _needed(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Box | None:
    return Box.whole(shape) if name.startswith(MODEL) else None


__all__ = ["whole_model"]
