"""Fully sharded data parallel, on torch's fully_shard: every member holds a part of each tensor."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.layouts.base import Layout, World
from shoal.layouts.sharded.grouping import group_modules
from shoal.layouts.sharded.layout import ShardedLayout, ShardedOptions
from shoal.model.elementwise_optimizers import refuse_unless_elementwise
from shoal.model.several import models_of
from shoal.planning.figures import Plan, PlanInput
from shoal.planning.sharded import ShardedFigures
from shoal.strategies.layout.sharded import ShardedStrategy
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import as_index

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


class FSDP(ShardedStrategy):
    """Strategy "fsdp": a layer's parameters are gathered for its pass, then freed again.

    `min_group_bytes`: minimum size of the groups in which layers are gathered, by default chosen
    for the model; with 0 each module is gathered alone. `param_dtype` ("bf16", "fp16"): the dtype
    that layers compute in, while the optimizer keeps the parameters' own. `reduce_dtype` ("fp32",
    ...): the dtype in which gradients are summed; by default `param_dtype`, from torch 2.15 on the
    parameters' own. `elementwise_optimizer=True` states that an optimizer that is not torch's
    updates each element from that element's gradient and state alone. `cpu_offload=True`:
    parameters, gradients and optimizer state are in host memory. `copies` and `copy_every_steps`:
    see `ShardedStrategy`.

    All members must run the same modules in the same order in each step.
    """

    name = "fsdp"
    trains_several = True
    syncs_batchnorm = True
    free_after_forward = True
    shard: int | None = None

    def __init__(
        self,
        *,
        min_group_bytes: int | None = None,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        elementwise_optimizer: bool = False,
        cpu_offload: bool = False,
        copies: int = 1,
        copy_every_steps: int | None = None,
    ) -> None:
        super().__init__(copies=copies, copy_every_steps=copy_every_steps)
        self._elementwise_optimizer = elementwise_optimizer
        self._options = ShardedOptions(
            free_after_forward=self.free_after_forward,
            min_group_bytes=min_group_bytes,
            param_dtype=_dtype("param_dtype", param_dtype),
            reduce_dtype=_dtype("reduce_dtype", reduce_dtype),
            cpu_offload=cpu_offload,
            shard=self.shard,
        )

    def check(self, model: nn.Module, optimizer: Optimizer) -> None:
        refuse_unless_elementwise(self.name, optimizer, self._elementwise_optimizer)
        for each in models_of(model).values():
            self._check_parameters(each)

    def _check_parameters(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if not parameter.ndim:
                raise InvalidSpec(
                    f"{self.name} cannot cut the parameter {name}",
                    seen="a scalar",
                    expected="at least one dimension",
                    fix="Make it a tensor of one element: torch.zeros(1).",
                )
            if not parameter.numel():
                raise InvalidSpec(
                    f"{self.name} cannot cut the parameter {name}",
                    seen=f"no elements: {tuple(parameter.shape)}",
                    expected="at least one element",
                    fix="Leave it out of the model, or use strategy 'ddp' or 'zero1'.",
                )
        group_modules(model, self._options.min_group_bytes)

    def lay_out(self, model: nn.Module, world: World) -> Layout:
        return ShardedLayout(model, world, self._options)

    def figures(self, subject: PlanInput) -> Plan:
        """See `shoal.planning.figures.PlannableStrategy`."""
        if subject.optimizer is not None:
            self.check(subject.model, subject.optimizer)
        self._check_parameters(subject.model)
        return ShardedFigures(subject, self._options).plan(self.name)

    @property
    def unscales(self) -> bool:
        # A GradScaler needs gradients on the GPU, but with offload they are on the host.
        return not self._options.cpu_offload

    def options(self) -> Mapping[str, str]:
        options = self._options
        return {
            "min_group_bytes": str(options.min_group_bytes),
            "param_dtype": str(options.param_dtype),
            "reduce_dtype": "as stored" if options.reduces_as_stored else str(options.reduce_dtype),
            **({"shard": str(options.shard)} if options.shard else {}),
            **({"cpu_offload": "true"} if options.cpu_offload else {}),
        }


class Zero3(FSDP):
    """Strategy "zero3": another name of "fsdp"."""

    name = "zero3"


class Zero2(FSDP):
    """Strategy "zero2": gathered parameters stay in memory until their gradients are reduced.

    Each step needs one all-gather per group less than with "fsdp", but the whole parameters are in
    memory. Options as for `FSDP`.
    """

    name = "zero2"
    free_after_forward = False


class HSDP(FSDP):
    """Strategy "hsdp": groups of `shard` members each hold a copy of the model, sharded as with
    "fsdp".

    Members of a group have consecutive ranks: they are on one host if `shard` is the number of
    members on a host. Each member sends only its part of the gradients to other groups. If `shard`
    does not divide the number of members, groups are larger: with shard=4, 10 members form two
    groups of 5. Options as for `FSDP`.
    """

    name = "hsdp"

    def __init__(self, *, shard: int = 8, **options: Any) -> None:
        """`options`: see `FSDP`. Raises InvalidSpec if `shard` is below 2."""
        shard = as_index("shard", shard)
        if shard < 2:
            raise InvalidSpec(
                "shard is out of range",
                seen=str(shard),
                expected="2 or more",
                fix="For a whole copy on each member use strategy 'ddp'.",
            )
        self.shard = shard
        super().__init__(**options)


def _dtype(option: str, name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    if name not in DTYPES:
        raise InvalidSpec(
            f"{option} is unknown",
            seen=repr(name),
            expected=f"None or one of {', '.join(map(repr, DTYPES))}",
        )
    return DTYPES[name]
