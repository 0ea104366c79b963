"""Optimizer steps on the rows of one push. If torch has the optimizer, the operations and their
order are those of `torch.optim` on sparse gradients.

Suffixes of tensors: r rows, c columns.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal_proto.errors import InternalError
from shoal_proto.v1.tables_pb2 import RowOptimizer


@dataclass(frozen=True, kw_only=True)
class StateColumn:
    is_per_element: bool
    """True: one number for each column of a row; False: one for each row."""
    fill: float = 0.0


State = Mapping[str, Tensor]


class RowRule(Protocol):
    def columns(self) -> Mapping[str, StateColumn]:
        """Return the state's columns, with torch's names if torch has them."""
        ...

    def step(self, values_rc: Tensor, gradient_rc: Tensor, state: State, lr: float) -> None:
        """Update values and state in place. The gradient may be overwritten."""
        ...


class RowSgd:
    def __init__(self, spec: RowOptimizer) -> None:
        self._momentum = spec.momentum
        self._nesterov = spec.nesterov

    def columns(self) -> Mapping[str, StateColumn]:
        return {"momentum_buffer": StateColumn(is_per_element=True)} if self._momentum else {}

    def step(self, values_rc: Tensor, gradient_rc: Tensor, state: State, lr: float) -> None:
        direction_rc = gradient_rc
        if self._momentum:
            buffer_rc = state["momentum_buffer"]
            buffer_rc.mul_(self._momentum).add_(gradient_rc)
            direction_rc = buffer_rc
            if self._nesterov:
                direction_rc = gradient_rc.add(buffer_rc, alpha=self._momentum)
        values_rc.add_(direction_rc, alpha=-lr)


class RowAdagradRule:
    def __init__(self, spec: RowOptimizer) -> None:
        self._eps = spec.eps
        self._initial = spec.initial_accumulator

    def columns(self) -> Mapping[str, StateColumn]:
        return {"sum": StateColumn(is_per_element=True, fill=self._initial)}

    def step(self, values_rc: Tensor, gradient_rc: Tensor, state: State, lr: float) -> None:
        total_rc = state["sum"].add_(gradient_rc.pow(2))
        values_rc.add_(gradient_rc.div_(total_rc.sqrt().add_(self._eps)), alpha=-lr)


class RowwiseAdagrad:
    """Adagrad with one accumulator per row, as in FBGEMM."""

    def __init__(self, spec: RowOptimizer) -> None:
        self._eps = spec.eps
        self._initial = spec.initial_accumulator

    def columns(self) -> Mapping[str, StateColumn]:
        return {"sum": StateColumn(is_per_element=False, fill=self._initial)}

    def step(self, values_rc: Tensor, gradient_rc: Tensor, state: State, lr: float) -> None:
        total_r = state["sum"].add_(gradient_rc.pow(2).mean(dim=1))
        values_rc.add_(gradient_rc.div_(total_r.sqrt().add_(self._eps)[:, None]), alpha=-lr)


class RowAdamRule:
    """Lazy Adam: a row without a gradient keeps its averages.

    The bias correction uses the number of steps of each row (`counts_rows`) or of the whole table
    (`table_step`, as in `torch.optim.SparseAdam`).
    """

    def __init__(self, spec: RowOptimizer, *, counts_rows: bool) -> None:
        self._beta1, self._beta2, self._eps = spec.beta1, spec.beta2, spec.eps
        self._counts_rows = counts_rows
        self.table_step = 0

    def columns(self) -> Mapping[str, StateColumn]:
        columns = {
            "exp_avg": StateColumn(is_per_element=True),
            "exp_avg_sq": StateColumn(is_per_element=True),
        }
        if self._counts_rows:
            columns["step"] = StateColumn(is_per_element=False)
        return columns

    def step(self, values_rc: Tensor, gradient_rc: Tensor, state: State, lr: float) -> None:
        average_rc, square_rc = state["exp_avg"], state["exp_avg_sq"]
        # Adding the difference rounds as SparseAdam does.
        average_rc.add_(gradient_rc.sub(average_rc).mul_(1 - self._beta1))
        square_rc.add_(gradient_rc.pow(2).sub_(square_rc).mul_(1 - self._beta2))
        denominator_rc = square_rc.sqrt().add_(self._eps)
        direction_rc = average_rc.div(denominator_rc)
        if not self._counts_rows:
            values_rc.add_(direction_rc.mul_(-self._step_size(self.table_step, lr)))
            return
        steps_r = state["step"].add_(1)
        # Computed with Python floats: torch's power of a vector rounds differently at the vector's
        # end.
        distinct, inverse = torch.unique(steps_r, return_inverse=True)
        sizes = [-self._step_size(round(steps), lr) for steps in distinct.tolist()]
        size_r = torch.tensor(sizes, dtype=values_rc.dtype)[inverse]
        values_rc.add_(direction_rc.mul_(size_r[:, None]))

    def _step_size(self, step: int, lr: float) -> float:
        return lr * math.sqrt(1 - self._beta2**step) / (1 - self._beta1**step)


def new_rule(spec: RowOptimizer) -> RowRule:
    """Make the rule of a table."""
    if spec.kind == "sgd":
        return RowSgd(spec)
    if spec.kind == "adagrad":
        return RowAdagradRule(spec)
    if spec.kind == "rowwise_adagrad":
        return RowwiseAdagrad(spec)
    if spec.kind in ("adam", "sparse_adam"):
        return RowAdamRule(spec, counts_rows=spec.kind == "adam")
    raise InternalError(
        "a row optimizer that no table has", seen=spec.kind, expected="as checked by Place"
    )
