"""Pipeline parallel: each member has a stage; micro-batches pass through all stages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.layouts.base import Layout, World
from shoal.layouts.hybrid.layout import HybridPlan
from shoal.layouts.hybrid.mesh import MeshShape
from shoal.layouts.pipeline.layer_profiler import LayerProfiler
from shoal.layouts.pipeline.layout import PipelineLayout, ScheduleSpec
from shoal.layouts.pipeline.outline import Outline
from shoal.layouts.pipeline.schedules import SCHEDULES
from shoal.layouts.pipeline.stage_splitter import StageSplitter
from shoal.layouts.tensor.derivation import derive
from shoal.model.elementwise_optimizers import refuse_unless_per_parameter
from shoal.planning.figures import Plan, PlanInput
from shoal.planning.mesh import MeshFigures
from shoal.strategies.layout.sharded import ShardedStrategy
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import as_index


class StageSplit:
    """Options for the cut into stages; one object for all generations."""

    def __init__(
        self, *, balance: str = "bytes", split_at: Sequence[str] | None = None, example: Any = None
    ) -> None:
        if balance not in ("bytes", "time"):
            raise InvalidSpec(
                "balance is unknown", seen=repr(balance), expected="'bytes' or 'time'"
            )
        if balance == "time" and example is None:
            raise InvalidSpec(
                "stages cannot be balanced by time without inputs to measure them with",
                seen="no example",
                expected="the inputs of a micro-batch",
                fix="Give example=, for instance the first inputs of the dataset, stacked.",
            )
        self._balance, self._split_at = balance, split_at
        self._profiler = LayerProfiler(example) if balance == "time" else None
        self.splitter = StageSplitter(split_at)

    def cut(self, model: nn.Module, world: World, num_stages: int) -> tuple[Outline, Sequence[int]]:
        """Return an outline and the stage of each segment. Collective if balanced by time."""
        outline = self.splitter.outline(model, num_stages)
        costs = None if self._profiler is None else self._profiler.costs(model, outline, world)
        return outline, self.splitter.stage_of(outline, num_stages, costs)

    def by_bytes(self, model: nn.Module, num_stages: int) -> tuple[Outline, Sequence[int]]:
        """Return an outline and the stage of each segment, before any measurement."""
        outline = self.splitter.outline(model, num_stages)
        return outline, self.splitter.stage_of(outline, num_stages)

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions of a plan of the stages."""
        if self._profiler is None:
            return ()
        return (
            "the stages shown are balanced by bytes; in a run they are balanced by measured time",
        )

    def options(self) -> dict[str, Any]:
        return {"balance": self._balance, "split_at": self._split_at and list(self._split_at)}


def schedule_spec(schedule: str, microbatches: int) -> ScheduleSpec:
    """Return the schedule. Raises InvalidSpec if it is unknown or has less than one micro-batch."""
    if schedule not in SCHEDULES:
        raise InvalidSpec(
            "schedule is unknown",
            seen=repr(schedule),
            expected=f"one of {', '.join(map(repr, SCHEDULES))}",
        )
    microbatches = as_index("microbatches", microbatches)
    if microbatches < 1:
        raise InvalidSpec(
            "microbatches is out of range", seen=str(microbatches), expected="at least 1"
        )
    return ScheduleSpec(schedule=schedule, microbatches=microbatches)


class Pipeline(ShardedStrategy):
    """Strategy "pipeline": one stage per member, on torch.distributed.pipelining.

    A step calls `session.forward_backward(batch, loss_function)`. To evaluate, all members call the
    model within torch.no_grad(), each with the same inputs, and all get the outputs.

    `schedule`: "1f1b", or "gpipe", which keeps the activations of the whole batch. `microbatches`:
    number of equal parts of a batch; if it does not divide the batch, the next smaller number
    that does. `balance`: stages have nearly the same "bytes" of parameters, or the same "time",
    measured by the first member on `example`, inputs as large as a micro-batch. `split_at`: names
    of the only layers before which the model may be cut. `per_parameter_optimizer`: see `Zero1`.
    `copies` and `copy_every_steps`: see `ShardedStrategy`.
    """

    name = "pipeline"
    compiles = False
    shares_samples = True

    def __init__(
        self,
        *,
        schedule: str = "1f1b",
        microbatches: int = 4,
        balance: str = "bytes",
        split_at: Sequence[str] | None = None,
        example: Any = None,
        per_parameter_optimizer: bool = False,
        copies: int = 1,
        copy_every_steps: int | None = None,
    ) -> None:
        super().__init__(copies=copies, copy_every_steps=copy_every_steps)
        self._schedule = schedule_spec(schedule, microbatches)
        self._split = StageSplit(balance=balance, split_at=split_at, example=example)
        self._per_parameter_optimizer = per_parameter_optimizer

    def check(self, model: nn.Module, optimizer: Optimizer) -> None:
        refuse_unless_per_parameter(self.name, optimizer, vouched=self._per_parameter_optimizer)

    def try_lay_out(self, model: nn.Module, world_size: int) -> None:
        self._split.splitter.outline(model, world_size)

    def lay_out(self, model: nn.Module, world: World) -> Layout:
        cut = self._split.cut(model, world, world.world_size)
        return PipelineLayout(model, world, cut, self._schedule)

    def figures(self, subject: PlanInput) -> Plan:
        """See `shoal.planning.figures.PlannableStrategy`."""
        if subject.optimizer is not None:
            self.check(subject.model, subject.optimizer)
        plan = HybridPlan(
            mesh=MeshShape(pipeline=subject.world_size, data=1, tensor=1),
            cut=self._split.by_bytes(subject.model, subject.world_size),
            tensor=derive(subject.model, 1),
            schedule=self._schedule,
        )
        figures = MeshFigures(subject, plan, tells_faults_ahead=True)
        return figures.plan(self.name, self._split.notes)

    def gradients_lack(self) -> str:
        return super().gradients_lack() or "gradients of the layers that this member has"

    def gathers_lack(self) -> str:
        return "stages, of which the last computes the loss of one micro-batch after another"

    def options(self) -> Mapping[str, str]:
        chosen = {
            "schedule": self._schedule.schedule,
            "microbatches": self._schedule.microbatches,
            **self._split.options(),
        }
        return {"pipeline": json.dumps(chosen, sort_keys=True)}
