"""A shard in plain torch: `torch.optim` on one tensor per block, one push after the other.

It shares nothing with the server but the kernels, those of `fused=True`.
"""

import copy
import zlib
from collections.abc import Sequence
from functools import partial

import torch
from history.events import Gradients
from torch import Tensor

from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import Shard

DTYPES = {"float32": torch.float32, "float64": torch.float64}
FIRST_VALUES_SEED = 0


def drawn(seed: int, shard: Shard) -> Tensor:
    """Draw a flat tensor of the shard's size and dtype: the same for a seed in any process."""
    generator = torch.Generator().manual_seed((seed << 16) + shard.shard_id)
    size = sum(block.num_elements for block in shard.blocks)
    return torch.randn(size, generator=generator, dtype=DTYPES[shard.dtype])


class Twin:
    """The shard's values and optimizer state."""

    def __init__(self, shard: Shard, optimizer: OptimizerSpec) -> None:
        self.shard = shard
        sizes = [block.num_elements for block in shard.blocks]
        first = drawn(FIRST_VALUES_SEED, shard)
        self._blocks = [part.clone() for part in torch.split(first, sizes)]
        # One optimizer per parameter: torch's fused SGD fails if only some tensors have a momentum.
        self._optimizers = {
            name: _optimizer(optimizer.kind, optimizer.groups[shard.group], blocks)
            for name, blocks in self._by_parameter(self._blocks).items()
        }

    def apply(self, gradients: Gradients) -> None:
        """Take the optimizer's step with a push's gradients for this shard."""
        sizes = [block.num_elements for block in self.shard.blocks]
        parts = self._by_parameter(torch.split(drawn(gradients.seed, self.shard), sizes))
        for name, optimizer in self._optimizers.items():
            if name in gradients.absent:
                continue
            (group,) = optimizer.param_groups
            group["lr"] = gradients.lr[self.shard.group]
            for block, part in zip(group["params"], parts[name], strict=True):
                block.grad = part
            optimizer.step()

    def _by_parameter(self, blocks: Sequence[Tensor]) -> dict[str, list[Tensor]]:
        found: dict[str, list[Tensor]] = {}
        for spec, block in zip(self.shard.blocks, blocks, strict=True):
            found.setdefault(spec.parameter, []).append(block)
        return found

    def checksum(self) -> int:
        """CRC-32 of the values, as a `Seen` has it."""
        return checksum(self._blocks)

    def damage(self) -> None:
        """Flip the lowest bit of the first value."""
        self._blocks[0][:1].view(torch.uint8)[0] ^= 1

    def damage_state(self) -> None:
        """Double one value of the optimizer's state."""
        first = self._blocks[0]
        state = self._optimizers[self.shard.blocks[0].parameter].state[first]
        held = state["momentum_buffer"] if "momentum_buffer" in state else state["exp_avg"]
        held[0] *= 2

    def copy(self) -> "Twin":
        return copy.deepcopy(self)


def checksum(blocks: Sequence[Tensor]) -> int:
    value = 0
    for block in blocks:
        value = zlib.crc32(block.contiguous().numpy().tobytes(), value)
    return value


def _optimizer(
    kind: str, hyper: HyperParameters, blocks: Sequence[Tensor]
) -> torch.optim.Optimizer:
    shared = {"lr": hyper.lr, "weight_decay": hyper.weight_decay, "maximize": hyper.maximize}
    if kind == "sgd":
        return torch.optim.SGD(
            blocks,
            momentum=hyper.momentum,
            dampening=hyper.dampening,
            nesterov=hyper.nesterov,
            fused=True,
            **shared,
        )
    adam = partial(torch.optim.Adam if kind == "adam" else torch.optim.AdamW, **shared)
    return adam(
        blocks,
        betas=(hyper.beta1, hyper.beta2),
        eps=hyper.eps,
        amsgrad=hyper.amsgrad,
        fused=True,
    )


__all__ = ["FIRST_VALUES_SEED", "Twin", "checksum", "drawn"]
