"""Optimizer steps on a shard, by the kernels that `torch.optim` uses with `fused=True`.

The kernels get one view a block, not the flat tensor: they round the last elements of a tensor in
another way than the rest, and each block ends where its parameter ends or at a multiple of the
vector width. So the result equals that of `torch.optim.X(..., fused=True)` to the last bit, and
that of torch's default on CPU (not fused) to within rounding; SGD on 16-bit types equals the
default to the last bit. It also lets a block sit out a step.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from shoal_proto.errors import InvalidSpec, UnsupportedOptimizer
from shoal_proto.v1.parameters_pb2 import HyperParameters, OptimizerSpec


class ShardOptimizer(Protocol):
    """Holds the optimizer's state of one shard, beside the values that it updates."""

    def step(self, blocks: Sequence[int], gradients: Sequence[Tensor], lr: float) -> None:
        """Update the named blocks in place. `gradients` has one tensor a named block."""
        ...

    def state(self) -> Mapping[str, Tensor]:
        """The state by torch's names; flat like the values, but for one `step` a block."""
        ...


class Sgd:
    def __init__(self, hyper: HyperParameters, blocks: Sequence[Tensor]) -> None:
        self._hyper = hyper
        self._blocks = blocks
        self._momentum: Tensor | None = None
        self._buffers: Sequence[Tensor] = ()
        self._started = [False] * len(blocks)
        if hyper.momentum != 0.0:
            self._momentum, self._buffers = _beside(blocks)

    def step(self, blocks: Sequence[int], gradients: Sequence[Tensor], lr: float) -> None:
        if self._momentum is None:
            self._run(blocks, gradients, lr, is_first_step=False)
            return
        # The kernel takes "first step" for all its tensors at once; blocks start one by one.
        for is_first_step in (True, False):
            chosen = [i for i, b in enumerate(blocks) if self._started[b] is not is_first_step]
            if chosen:
                of_chosen = [blocks[i] for i in chosen]
                self._run(of_chosen, [gradients[i] for i in chosen], lr, is_first_step)
        for b in blocks:
            self._started[b] = True

    def _run(
        self,
        blocks: Sequence[int],
        gradients: Sequence[Tensor],
        lr: float,
        is_first_step: bool,
    ) -> None:
        values = [self._blocks[b] for b in blocks]
        buffers = [self._buffers[b] for b in blocks] if self._buffers else []
        if values[0].dtype.itemsize < 4:
            self._run_unfused(values, gradients, buffers, lr, is_first_step)
            return
        torch._fused_sgd_(
            values,
            list(gradients),
            buffers,
            weight_decay=self._hyper.weight_decay,
            momentum=self._hyper.momentum,
            lr=lr,
            dampening=self._hyper.dampening,
            nesterov=self._hyper.nesterov,
            maximize=self._hyper.maximize,
            is_first_step=is_first_step,
        )

    def _run_unfused(
        self,
        values: list[Tensor],
        gradients: Sequence[Tensor],
        buffers: list[Tensor],
        lr: float,
        is_first_step: bool,
    ) -> None:
        """For 16-bit types: torch's fused kernel leaves most of such a tensor as it was (seen with
        2.13 on CPU; only the last elements, beyond whole vectors, are updated)."""
        slots: list[Tensor | None] = [None] * len(values)
        if buffers and not is_first_step:
            slots = list(buffers)
        sgd(
            values,
            list(gradients),
            slots,
            foreach=False,
            fused=False,
            weight_decay=self._hyper.weight_decay,
            momentum=self._hyper.momentum,
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
        started = torch.tensor(self._started, dtype=torch.float32)
        return {"momentum_buffer": self._momentum, "step": started}


class Adam:
    """Adam, or AdamW with `decoupled_weight_decay`."""

    def __init__(
        self, hyper: HyperParameters, blocks: Sequence[Tensor], *, decoupled_weight_decay: bool
    ) -> None:
        self._hyper = hyper
        self._blocks = blocks
        self._kernel = torch._fused_adamw_ if decoupled_weight_decay else torch._fused_adam_
        self._average, self._averages = _beside(blocks)
        self._square, self._squares = _beside(blocks)
        self._maximum: Tensor | None = None
        self._maxima: Sequence[Tensor] = ()
        if hyper.amsgrad:
            self._maximum, self._maxima = _beside(blocks)
        # torch.optim counts steps in float32 tensors, one a parameter.
        self._step = torch.zeros(len(blocks), dtype=torch.float32)
        self._steps = self._step.unbind()

    def step(self, blocks: Sequence[int], gradients: Sequence[Tensor], lr: float) -> None:
        steps = [self._steps[b] for b in blocks]
        torch._foreach_add_(steps, 1)
        self._kernel(
            [self._blocks[b] for b in blocks],
            list(gradients),
            [self._averages[b] for b in blocks],
            [self._squares[b] for b in blocks],
            [self._maxima[b] for b in blocks] if self._maxima else [],
            steps,
            lr=lr,
            beta1=self._hyper.beta1,
            beta2=self._hyper.beta2,
            weight_decay=self._hyper.weight_decay,
            eps=self._hyper.eps,
            amsgrad=self._hyper.amsgrad,
            maximize=self._hyper.maximize,
        )

    def state(self) -> Mapping[str, Tensor]:
        tensors = {"exp_avg": self._average, "exp_avg_sq": self._square, "step": self._step}
        if self._maximum is not None:
            tensors["max_exp_avg_sq"] = self._maximum
        return tensors


def new_optimizer(spec: OptimizerSpec, group: int, blocks: Sequence[Tensor]) -> ShardOptimizer:
    """The optimizer of a shard in parameter group `group`; `check_spec` has passed."""
    hyper = spec.groups[group]
    if spec.kind == "sgd":
        return Sgd(hyper, blocks)
    return Adam(hyper, blocks, decoupled_weight_decay=spec.kind == "adamw")


def check_spec(spec: OptimizerSpec, num_groups: int) -> None:
    """Raise for what no kernel can run: the same rules as those of `torch.optim`."""
    if spec.kind not in ("sgd", "adam", "adamw"):
        raise UnsupportedOptimizer(
            "no such optimizer on the parameter server",
            seen=repr(spec.kind),
            expected="sgd, adam or adamw",
        )
    if len(spec.groups) < num_groups:
        raise InvalidSpec(
            "each parameter group needs its hyper-parameters",
            seen=f"{len(spec.groups)} groups",
            expected=f"at least {num_groups}",
        )
    for index, hyper in enumerate(spec.groups):
        for name, value, low, high in _ranges(spec.kind, hyper):
            if not low <= value < high:
                raise InvalidSpec(
                    f"{name} of parameter group {index} is out of range",
                    seen=f"{value:g}",
                    expected=f"{low:g} <= {name} < {high:g}",
                )
        if hyper.nesterov and (hyper.momentum == 0.0 or hyper.dampening != 0.0):
            raise InvalidSpec(
                f"nesterov of parameter group {index} contradicts its other settings",
                seen=f"momentum {hyper.momentum:g} and dampening {hyper.dampening:g}",
                expected="a momentum above 0 and no dampening",
            )


def _ranges(kind: str, hyper: HyperParameters) -> Sequence[tuple[str, float, float, float]]:
    shared = (
        ("lr", hyper.lr, 0.0, math.inf),
        ("weight_decay", hyper.weight_decay, 0.0, math.inf),
    )
    if kind == "sgd":
        return (
            *shared,
            ("momentum", hyper.momentum, 0.0, math.inf),
            ("dampening", hyper.dampening, -math.inf, math.inf),
        )
    return (
        *shared,
        ("beta1", hyper.beta1, 0.0, 1.0),
        ("beta2", hyper.beta2, 0.0, 1.0),
        ("eps", hyper.eps, 0.0, math.inf),
    )


def _beside(blocks: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """Zeros laid out like the blocks: the flat tensor, and one view a block."""
    sizes = [block.numel() for block in blocks]
    flat = torch.zeros(sum(sizes), dtype=blocks[0].dtype)
    return flat, torch.split(flat, sizes)
