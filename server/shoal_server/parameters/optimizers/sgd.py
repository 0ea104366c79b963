"""SGD as in `torch.optim.SGD`."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from shoal_proto.v1.optimizer_pb2 import HyperParameters
from shoal_server.parameters.optimizers.tensors import allocate_like, copy_state, in_runs


class Sgd:
    def __init__(self, hyper: HyperParameters, blocks: Sequence[Tensor]) -> None:
        self._hyper = hyper
        self._blocks = blocks
        self._momentum: Tensor | None = None
        self._buffers: Sequence[Tensor] = ()
        self._steps = [0] * len(blocks)
        self._runs = in_runs(blocks)
        self._run_sizes = [run.numel() for run in self._runs]
        self._run_buffers: Sequence[Tensor] = ()
        if hyper.momentum != 0.0:
            self._momentum, self._buffers = allocate_like(blocks)
            self._run_buffers = torch.split(self._momentum, self._run_sizes)

    def step(
        self,
        blocks: Sequence[int],
        gradients: Sequence[Tensor],
        lr: float,
        momentum: float | None = None,
    ) -> None:
        rates = self._rates(lr, momentum)
        values = [self._blocks[b] for b in blocks]
        if self._momentum is None:
            self._run(values, gradients, (), rates, is_first_step=False)
            return
        # The kernel's `is_first_step` holds for all its tensors, but blocks start separately.
        for is_first_step in (True, False):
            chosen = [i for i, b in enumerate(blocks) if (self._steps[b] == 0) is is_first_step]
            if chosen:
                self._run(
                    [values[i] for i in chosen],
                    [gradients[i] for i in chosen],
                    [self._buffers[blocks[i]] for i in chosen],
                    rates,
                    is_first_step,
                )
        for b in blocks:
            self._steps[b] += 1

    def step_whole(self, gradient: Tensor, lr: float, momentum: float | None = None) -> bool:
        if self._momentum is not None and len(set(self._steps)) > 1:
            return False
        gradients = gradient.split_with_sizes(self._run_sizes)
        is_first_step = self._momentum is not None and self._steps[0] == 0
        rates = self._rates(lr, momentum)
        self._run(self._runs, gradients, self._run_buffers, rates, is_first_step)
        if self._momentum is not None:
            self._steps = [count + 1 for count in self._steps]
        return True

    def _rates(self, lr: float, momentum: float | None) -> tuple[float, float]:
        if self._momentum is None:
            return lr, 0.0
        return lr, self._hyper.momentum if momentum is None else momentum

    def _run(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Tensor],
        buffers: Sequence[Tensor],
        rates: tuple[float, float],
        is_first_step: bool,
    ) -> None:
        lr, momentum = rates
        if values[0].dtype.itemsize < 4:
            self._run_unfused(values, gradients, buffers, rates, is_first_step)
            return
        torch._fused_sgd_(
            list(values),
            list(gradients),
            list(buffers),
            weight_decay=self._hyper.weight_decay,
            momentum=momentum,
            lr=lr,
            dampening=self._hyper.dampening,
            nesterov=self._hyper.nesterov,
            maximize=self._hyper.maximize,
            is_first_step=is_first_step,
        )

    def _run_unfused(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Tensor],
        buffers: Sequence[Tensor],
        rates: tuple[float, float],
        is_first_step: bool,
    ) -> None:
        """Step on 16-bit types. torch's fused kernel leaves all but the last elements of such a
        tensor unchanged (seen with 2.13 on CPU)."""
        lr, momentum = rates
        slots: list[Tensor | None] = [None] * len(values)
        if buffers and not is_first_step:
            slots = list(buffers)
        sgd(
            list(values),
            list(gradients),
            slots,
            foreach=False,
            fused=False,
            weight_decay=self._hyper.weight_decay,
            momentum=momentum,
            lr=lr,
            dampening=self._hyper.dampening,
            nesterov=self._hyper.nesterov,
            maximize=self._hyper.maximize,
        )
        for buffer, slot in zip(buffers, slots, strict=False):
            if slot is not None and slot is not buffer:
                buffer.copy_(slot)

    def state(self) -> Mapping[str, Tensor]:
        if self._momentum is None:
            return {}
        steps = torch.tensor(self._steps, dtype=torch.float32)
        return {"momentum_buffer": self._momentum, "step": steps}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        current = self.state()
        copy_state(current, state)
        if "step" in current:
            self._steps = [int(count) for count in current["step"].tolist()]
