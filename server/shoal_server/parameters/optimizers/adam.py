"""Adam and AdamW as in `torch.optim`."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shoal_proto.v1.optimizer_pb2 import HyperParameters
from shoal_server.parameters.optimizers.tensors import StepCounts, allocate_like, copy_state


class Adam:
    def __init__(
        self, hyper: HyperParameters, blocks: Sequence[Tensor], *, decoupled_weight_decay: bool
    ) -> None:
        self._hyper = hyper
        self._blocks = blocks
        self._kernel = torch._fused_adamw_ if decoupled_weight_decay else torch._fused_adam_
        self._average, self._averages = allocate_like(blocks)
        self._square, self._squares = allocate_like(blocks)
        self._maximum: Tensor | None = None
        self._maxima: Sequence[Tensor] = ()
        if hyper.amsgrad:
            self._maximum, self._maxima = allocate_like(blocks)
        self._counts = StepCounts(len(blocks))

    def step(
        self,
        blocks: Sequence[int],
        gradients: Sequence[Tensor],
        lr: float,
        momentum: float | None = None,
    ) -> None:
        counts = self._counts.advance(blocks)
        self._kernel(
            [self._blocks[b] for b in blocks],
            list(gradients),
            [self._averages[b] for b in blocks],
            [self._squares[b] for b in blocks],
            [self._maxima[b] for b in blocks] if self._maxima else [],
            counts,
            lr=lr,
            beta1=self._hyper.beta1,
            beta2=self._hyper.beta2,
            weight_decay=self._hyper.weight_decay,
            eps=self._hyper.eps,
            amsgrad=self._hyper.amsgrad,
            maximize=self._hyper.maximize,
        )

    def state(self) -> Mapping[str, Tensor]:
        tensors = {"exp_avg": self._average, "exp_avg_sq": self._square, "step": self._counts.all}
        if self._maximum is not None:
            tensors["max_exp_avg_sq"] = self._maximum
        return tensors

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        copy_state(self.state(), state)
