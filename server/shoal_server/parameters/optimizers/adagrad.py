"""Adagrad as in `torch.optim.Adagrad`."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shoal_proto.v1.optimizer_pb2 import HyperParameters
from shoal_server.parameters.optimizers.tensors import StepCounts, allocate_like, copy_state


class Adagrad:
    def __init__(self, hyper: HyperParameters, blocks: Sequence[Tensor]) -> None:
        self._hyper = hyper
        self._blocks = blocks
        self._sum, self._sums = allocate_like(blocks, hyper.initial_accumulator_value)
        self._counts = StepCounts(len(blocks))

    def step(
        self,
        blocks: Sequence[int],
        gradients: Sequence[Tensor],
        lr: float,
        momentum: float | None = None,
    ) -> None:
        counts = self._counts.advance(blocks)
        torch._fused_adagrad_(
            [self._blocks[b] for b in blocks],
            list(gradients),
            [self._sums[b] for b in blocks],
            counts,
            lr=lr,
            lr_decay=self._hyper.lr_decay,
            weight_decay=self._hyper.weight_decay,
            eps=self._hyper.eps,
            maximize=self._hyper.maximize,
        )

    def state(self) -> Mapping[str, Tensor]:
        return {"sum": self._sum, "step": self._counts.all}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        copy_state(self.state(), state)
