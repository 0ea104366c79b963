"""The whole model of what ranks hold."""

from collections.abc import Mapping, Sequence
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.abortable.waiter import wait_abortable
from shoal.model.tied_tensors import under_all_names
from shoal.state.resharding import reshard
from shoal.state.shards import MODEL, Chunk, StateShard

log = structlog.get_logger(__name__)


def whole_model(
    group: dist.ProcessGroup,
    state_shard: StateShard,
    without_elements: Mapping[str, Tensor],
    order: Sequence[str],
) -> dict[str, Tensor]:
    """Every parameter and persistent buffer by its names in the user's model, on the host.

    Collective: each rank gives what it holds, and each gets all; tied tensors are one under several
    names. `without_elements`: what no rank tells of, as it holds nothing. `order`: the names as the
    model's own state_dict has them, so that both can be gone through together. Raises as `reshard`.
    """
    whole = reshard(group, [state_shard], _needed)
    try:
        # So that no rank leaves while another still waits for its shards.
        wait_abortable(dist.all_reduce(torch.zeros(1), group=group, async_op=True), group)
    except RuntimeError as error:
        # Somebody has left behind it: then all have everything, this rank too.
        log.info("left_behind_whole_model", reason=str(error)[:300])
    further: Any = state_shard.values["tied"]
    tensors = {name.removeprefix(MODEL): shard.tensor for name, shard in whole.shards.items()}
    copies = {name: tensor.to("cpu", copy=True) for name, tensor in without_elements.items()}
    found = under_all_names(tensors | copies, further)
    return {name: found[name] for name in dict.fromkeys((*order, *found)) if name in found}


def _needed(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Chunk | None:
    return Chunk.whole(shape) if name.startswith(MODEL) else None
