"""Of torch's pipelining: a stage without the checks that only older releases make."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage


class UncheckedStage(PipelineStage):
    """A stage whose last one may return anything, as from torch 2.13 on."""

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Older releases compare what comes with what was announced, which Shoal has agreed on."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Older releases compare what the last stage returns, too: a loss of its own here."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Messages that connect neighbours: torch 2.9 sends them of another dtype and shape than it
        receives them."""
        ops = super()._get_init_p2p_neighbors_ops()
        for op in ops:
            op.tensor = op.tensor.new_zeros(1, dtype=torch.float32)
        return ops
