"""2D parallel: layers are split within groups of members, and sharded by rows over the groups."""

import json
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.layouts.base import Layout, World
from shoal.layouts.hybrid.split_sharded import SplitShardedLayout, tensor_degree
from shoal.layouts.tensor.derivation import MIN_SPLIT_BYTES, derive
from shoal.layouts.tensor.plan import TensorPlan
from shoal.layouts.tensor.sequence_blocks import check_has_blocks
from shoal.planning.figures import Plan, PlanInput
from shoal.strategies.layout.fsdp import FSDP
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import as_index


class FSDPTensor(FSDP):
    """Strategy "fsdp-tensor": layers are split over groups of `tensor` members, as with "tensor".

    Each member's part is sharded by rows over the groups, as with "fsdp". Members of a group have
    consecutive ranks, and work on the same samples. If `tensor` does not divide the number of
    members, groups are smaller: with tensor=4, 9 members form three groups of 3. `plan`,
    `min_split_bytes`, `sequence`: see `TensorParallel`. `options`: see `FSDP`, without
    `cpu_offload` and `elementwise_optimizer`.
    """

    name = "fsdp-tensor"
    trains_several = False
    syncs_batchnorm = False

    def __init__(
        self,
        *,
        tensor: int = 2,
        plan: Mapping[str, str] | None = None,
        min_split_bytes: int = MIN_SPLIT_BYTES,
        sequence: bool = False,
        **options: Any,
    ) -> None:
        """Raises InvalidSpec for options out of range or not supported."""
        tensor = as_index("tensor", tensor, least=2)
        min_split_bytes = as_index("min_split_bytes", min_split_bytes, least=0)
        if options.get("elementwise_optimizer"):
            raise InvalidSpec(
                "strategy 'fsdp-tensor' has no option to say that an optimizer is elementwise",
                seen="elementwise_optimizer=True",
                expected="one of torch's own optimizers that treats each element separately",
                fix="Use 'fsdp' or 'tensor', which have this option.",
            )
        if options.get("cpu_offload"):
            raise InvalidSpec(
                "strategy 'fsdp-tensor' does not keep its parts on the host",
                seen="cpu_offload=True",
                expected="'fsdp', 'zero2', 'zero3' or 'hsdp', which do",
            )
        super().__init__(**options)
        self._tensor = tensor
        self._overrides = dict(plan or {})
        self._min_split_bytes = min_split_bytes
        self._sequence = sequence

    def plan(self, model: nn.Module, world_size: int) -> TensorPlan:
        """Return the split of layers for a world size. Raises what `derive` raises."""
        degree = tensor_degree(world_size, self._tensor)
        return derive(
            model,
            degree,
            self._overrides,
            min_split_bytes=self._min_split_bytes,
            sequence=self._sequence,
            # torch's fully_shard cannot reduce empty parts.
            all_have_parts=True,
        )

    def check(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().check(model, optimizer)
        if self._sequence:
            check_has_blocks(self.plan(model, 2))

    def try_lay_out(self, model: nn.Module, world_size: int) -> None:
        # Without overrides every module that does not fit a size stays whole.
        if self._overrides:
            self.plan(model, world_size)

    def lay_out(self, model: nn.Module, world: World) -> Layout:
        return SplitShardedLayout(model, world, self._options, self.plan(model, world.world_size))

    def figures(self, subject: PlanInput) -> Plan:
        """Raise InvalidSpec: this strategy has no figures yet."""
        raise InvalidSpec(
            "the costs of strategy 'fsdp-tensor' cannot be computed beforehand",
            seen="shoal.plan(..., 'fsdp-tensor')",
            expected="'fsdp' or 'tensor'",
            fix="shoal.FSDPTensor(...).plan(model, world_size) shows how layers are split.",
        )

    def options(self) -> Mapping[str, str]:
        chosen = {
            "tensor": self._tensor,
            "plan": self._overrides,
            "min_split_bytes": self._min_split_bytes,
            **({"sequence": True} if self._sequence else {}),
        }
        return {**super().options(), "tensor": json.dumps(chosen, sort_keys=True)}
