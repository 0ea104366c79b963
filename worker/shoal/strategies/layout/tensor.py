"""Tensor parallel: members hold parts of the model's modules and work on the same samples."""

import json
from collections.abc import Mapping

import structlog
from torch import nn
from torch.optim import Optimizer

from shoal.layouts.base import Layout, World
from shoal.layouts.tensor.derivation import MIN_SPLIT_BYTES, derive
from shoal.layouts.tensor.layout import SelfSplittingModule, TensorLayout
from shoal.layouts.tensor.plan import TensorPlan
from shoal.layouts.tensor.sequence_blocks import check_has_blocks
from shoal.model.elementwise_optimizers import refuse_unless_elementwise
from shoal.planning.figures import Plan, PlanInput
from shoal.planning.tensor import tensor_figures
from shoal.strategies.layout.sharded import ShardedStrategy
from shoal_proto.errors import InvalidSpec, UnsupportedOptimizer
from shoal_proto.numbers_given import as_index

log = structlog.get_logger(__name__)


class TensorParallel(ShardedStrategy):
    """Strategy "tensor", on torch's DTensor and parallelize_module.

    The plan is derived anew for each world size. `plan`: overrides, from patterns of module names
    to "column", "row", "vocab", "heads" or "whole". `min_split_bytes`: a module, or a pair of
    modules, with smaller weights stays whole, unless `plan` names it or it is tied to a larger
    module. `sequence=True`: between split layers of a block each member computes only its positions
    of the sequence. `elementwise_optimizer=True` states that an optimizer that is not torch's own
    treats each element of a parameter separately.
    """

    name = "tensor"
    shares_samples = True
    cuts_batches = False

    def __init__(
        self,
        plan: Mapping[str, str] | None = None,
        *,
        min_split_bytes: int = MIN_SPLIT_BYTES,
        sequence: bool = False,
        elementwise_optimizer: bool = False,
        copies: int = 1,
        copy_every_steps: int | None = None,
    ) -> None:
        super().__init__(copies=copies, copy_every_steps=copy_every_steps)
        min_split_bytes = as_index("min_split_bytes", min_split_bytes, least=0)
        self._elementwise_optimizer = elementwise_optimizer
        self._overrides = dict(plan or {})
        self._min_split_bytes = min_split_bytes
        self._sequence = sequence

    def plan(self, model: nn.Module, degree: int) -> TensorPlan:
        """Return the split of the model over `degree` members. Raises what `derive` raises."""
        return derive(
            model,
            degree,
            self._overrides,
            min_split_bytes=self._min_split_bytes,
            sequence=self._sequence,
        )

    def figures(self, subject: PlanInput) -> Plan:
        """See `shoal.planning.figures.PlannableStrategy`.

        Raises InvalidSpec for a `SelfSplittingModule`.
        """
        if isinstance(subject.model, SelfSplittingModule):
            raise InvalidSpec(
                "this model splits its layers itself, so their costs cannot be computed beforehand",
                seen=type(subject.model).__name__,
                expected="a model of torch's own layers",
            )
        if subject.optimizer is not None:
            self.check(subject.model, subject.optimizer)
        return tensor_figures(subject, self.plan(subject.model, subject.world_size))

    def try_lay_out(self, model: nn.Module, world_size: int) -> None:
        # Without overrides every module that does not fit a size stays whole.
        if self._overrides:
            self.plan(model, world_size)

    def lay_out(self, model: nn.Module, world: World) -> Layout:
        plan = self.plan(model, world.world_size)
        whole = not plan.splits and not isinstance(model, SelfSplittingModule)
        if world.world_size > 1 and whole:
            log.warning(
                "tensor_plan_empty",
                degree=plan.degree,
                bytes_per_rank=plan.whole_bytes,
                hint="every member holds and computes everything; print the plan to see why",
            )
        return TensorLayout(model, world, plan)

    def check(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.plan(model, 1)
        if self._sequence:
            check_has_blocks(self.plan(model, 2))
        refuse_unless_elementwise(self.name, optimizer, self._elementwise_optimizer)
        for group in optimizer.param_groups:
            for option in ("foreach", "fused"):
                if group.get(option):
                    raise UnsupportedOptimizer(
                        f"strategy 'tensor' cannot run an optimizer with {option}=True",
                        seen=f"{type(optimizer).__name__}({option}=True)",
                        expected="None or False",
                        fix="Leave it out: torch's grouped kernels cannot update split and whole"
                        " parameters together.",
                    )

    @property
    def unscales(self) -> bool:
        return True

    def options(self) -> Mapping[str, str]:
        chosen = {"plan": self._overrides, "min_split_bytes": self._min_split_bytes}
        if self._sequence:
            chosen["sequence"] = True
        return {"tensor": json.dumps(chosen, sort_keys=True)}
