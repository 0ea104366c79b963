"""Pipeline layout: each rank holds a stage of the model; micro-batches pass through all stages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.backends.abortable.communicators import connect_neighbours
from shoal.backends.abortable.p2p import AbortableP2P
from shoal.backends.shared_memory.messages import SharedMessages, bits_of, number_of
from shoal.layouts.base import Layout, LossFunction, World, materialise
from shoal.layouts.non_finite_check import NonFiniteCheck
from shoal.layouts.pass_gradients import PassGradients
from shoal.layouts.pipeline.outline import Outline
from shoal.layouts.pipeline.pass_buffers import PassBuffers
from shoal.layouts.pipeline.relay import Neighbours
from shoal.layouts.pipeline.schedules import PipelineRunner, StepInputs, num_microbatches
from shoal.layouts.pipeline.shared_messages import SharedLanes, StageLanes, lanes_bytes
from shoal.layouts.pipeline.stages import Stage
from shoal.model.module_proxy import proxy_of
from shoal_proto.errors import InvalidSpec

MAX_SHAPES = 8


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """Schedule of the micro-batches of a pass."""

    schedule: str = "1f1b"
    microbatches: int = 4
    """Largest number of parts of a batch: the largest divisor of its size up to this number is
    used."""


class PipelineLayout(Layout):
    """Layout of this rank's stage, in a pipeline over all ranks or over the ranks of `group`."""

    elementwise = False
    shares_loss = True
    non_finite_check: NonFiniteCheck

    def __init__(
        self,
        model: nn.Module,
        world: World,
        cut: tuple[Outline, Sequence[int]],
        schedule: ScheduleSpec,
        *,
        group: dist.ProcessGroup | None = None,
        prepare: Callable[[nn.Module], None] | None = None,
    ) -> None:
        """`cut`: an outline of the model and the stage of each of its segments. `prepare` may split
        the stage's parameters, on meta, over further ranks."""
        self.world = world
        self._near = Neighbours(world.group if group is None else group, world.device)
        connect_neighbours(self._near.group, world.group, world.device)
        self.stage = Stage(model, *cut, self._near.rank)
        if prepare is not None:
            prepare(self.stage.model)
        materialise(self.stage.model, world.device)
        world.exchanges.is_compared = True
        self.stage.pass_buffers = PassBuffers(self.stage.model, self._report_refusal)
        self._schedule = schedule
        self._runners: dict[str, PipelineRunner] = {}
        self._words = SharedMessages(self._near.group, 1)
        self._lanes: SharedLanes | None = None
        self._num_passes = 0
        self._parameters = self.stage.parameters
        self._has_passed = False
        self.non_finite_check = NonFiniteCheck(world.group, world.device)
        self.faults_are_own = all(len(stages) == 1 for stages in self.stage.holders.values())
        self._gradients = PassGradients(self._tied().values())
        self.module = _Whole(self)
        self._shown = proxy_of(self.stage.model, lambda: self.module)

    @property
    def plain(self) -> nn.Module:
        """Layers of this stage under the user's names; a call runs the whole pipeline."""
        return self._shown

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self._parameters

    @property
    def held(self) -> Mapping[str, Tensor]:
        return {**self._parameters, **self.stage.buffers}

    def is_counted_here(self, name: str) -> bool:
        return self.stage.holders[name][0] == self.stage.index

    def watch(self, ours: Callable[[], bool]) -> None:
        """Do nothing: every pass with gradients goes through `forward_backward`."""

    # --- a step ---

    def begin(self) -> None:
        self._has_passed = False
        self.non_finite_check.begin()
        self._gradients.begin()

    def forget_gradients(self) -> None:
        self._gradients.begin()

    def backward(self, loss: Tensor, weight: float) -> None:
        raise _needs_forward_backward()

    def forward_backward(
        self, inputs: Any, targets: Any, loss_function: LossFunction, weight: float
    ) -> Tensor:
        """See the base class. Returns the last stage's loss on all ranks of the pipeline."""
        completes = self.completes and not self.faults_are_own
        with self._gradients.of_pass(self._complete, completes=completes):
            return self._pass(inputs, targets, loss_function, weight)

    def _pass(
        self, inputs: Any, targets: Any, loss_function: LossFunction, weight: float
    ) -> Tensor:
        step_inputs = StepInputs(
            inputs=self.stage.bind((inputs,), {}),
            targets=targets,
            loss_function=loss_function,
            weight=weight,
        )
        try:
            runner = self._runner_for(step_inputs)
            loss = runner.forward_backward(step_inputs, self._transport_of(runner))
        except BaseException:
            # The schedule still holds the state of the failed pass.
            self._forget_runners()
            if self._lanes is not None:
                self._lanes.memory.cut("a pass has failed")
            raise
        loss = self._broadcast_loss(loss, runner)
        self._has_passed = True
        return loss

    def _broadcast_loss(self, loss: Tensor, runner: PipelineRunner) -> Tensor:
        """Broadcast the last stage's loss. In shared memory this is also the barrier at the end of
        a pass."""
        words, self._num_passes = self._words, self._num_passes + 1
        if self._num_passes > 1 and words.may_share:
            self._share(runner)
        if not words.is_shared:
            self._near.p2p.broadcast(loss, self._near.size - 1)
            return loss
        words.send_values([bits_of(float(loss))])
        return torch.tensor(number_of(words.receive_values()[-1][0]), dtype=torch.float64)

    def _share(self, runner: PipelineRunner) -> None:
        num_bytes = lanes_bytes(self._sent_bytes(runner))
        self._words.enable_shared_memory(num_bytes)
        memory = self._words.memory
        if memory is not None and num_bytes:
            self._lanes = SharedLanes(memory, self._words.beside)

    def _sent_bytes(self, runner: PipelineRunner) -> list[int]:
        self._words.send_values([runner.sent_bytes])
        return [row[0] for row in self._words.receive_values()]

    def _transport_of(self, runner: PipelineRunner) -> AbortableP2P | StageLanes:
        """Choose the transport of the pass that begins. Collective in a runner's first pass after
        shared memory was set up."""
        if self._lanes is None:
            return self._near.p2p
        if runner.p2p is None:
            runner.p2p = self._lanes.lanes(self._sent_bytes(runner)) or self._near.p2p
        if isinstance(runner.p2p, StageLanes):
            runner.p2p.begin()
        return runner.p2p

    @property
    def num_moved(self) -> int:
        memory = self._words.memory
        return memory.num_moved if memory is not None else 0

    def _runner_for(self, step_inputs: StepInputs) -> PipelineRunner:
        device = self.world.device.type
        mode = (
            self.stage.model.training,
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        )
        key = f"{step_inputs.key()} {mode}"
        runner = self._runners.pop(key, None)
        if runner is None:
            count = num_microbatches(step_inputs.num_samples, self._schedule.microbatches)
            runner = PipelineRunner(
                self.stage, self._near, self._schedule.schedule, step_inputs, count
            )
        # Least recently used first: the same order on every rank.
        self._runners[key] = runner
        if len(self._runners) > MAX_SHAPES:
            self._runners.pop(next(iter(self._runners))).release()
        return runner

    def _report_refusal(self, refusal: InvalidSpec) -> None:
        self.world.exchanges.report_refusal(refusal)

    def _tied(self) -> dict[str, nn.Parameter]:
        shared = (name for name, stages in self.stage.holders.items() if len(stages) > 1)
        held = {n: self._parameters[n] for n in shared if n in self._parameters}
        return {name: each for name, each in held.items() if each.requires_grad}

    def _complete(self) -> None:
        self.world.exchanges.note_missing_gradients()
        self.non_finite_check.check_after_pass(self._parameters)
        for name, parameter in self._tied().items():
            _sum_among(parameter, self.stage.holders[name], self._near)

    def reduce(self) -> None:
        self._gradients.finish(self._complete)

    def synchronised(self) -> bool:
        return self._has_passed

    def release(self) -> None:
        # Without this, reference cycles would keep the group until Python's next collection of
        # cycles.
        self._forget_runners()
        self._words.close()
        self._lanes = None
        self._near.release()
        for name in ("world", "non_finite_check"):
            vars(self).pop(name, None)

    def cut(self, reason: str) -> None:
        self._words.cut(reason)

    def _forget_runners(self) -> None:
        for runner in self._runners.values():
            runner.release()
        self._runners.clear()

    # --- evaluation ---

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the model's outputs on every rank of the pipeline. Collective."""
        near, stage = self._near, self.stage
        inputs = stage.bind(args, kwargs)
        given = near.receive(source=stage.index - 1, values=True) if stage.index else []
        outputs = stage.run(inputs, given)
        if stage.index < near.size - 1:
            near.send(outputs, to=stage.index + 1, values=True)
        return near.broadcast(outputs, source=near.size - 1)


class _Whole(nn.Module):
    def __init__(self, layout: PipelineLayout) -> None:
        super().__init__()
        self.stage = layout.stage.model
        self.__dict__["_layout"] = layout

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            raise _needs_forward_backward()
        layout: PipelineLayout = self.__dict__["_layout"]
        return layout.evaluate(*args, **kwargs)


def _needs_forward_backward() -> InvalidSpec:
    return InvalidSpec(
        "a pipeline computes the forward and the backward pass in one call",
        seen="a call of the model with gradients, or session.backward(loss)",
        expected="loss = session.forward_backward(batch, loss_function)",
        fix="In a step, call session.forward_backward. To evaluate, call the model within"
        " torch.no_grad() on all ranks.",
    )


def _sum_among(parameter: nn.Parameter, stages: Sequence[int], near: Neighbours) -> None:
    """Sum the gradient over these stages, this one included; None if no stage has a gradient."""
    own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    local = own.to_local() if isinstance(own, DTensor) else own
    # The last element is a flag: this stage has a gradient.
    packed = torch.zeros(local.numel() + 1, dtype=local.dtype, device=local.device)
    packed[:-1].copy_(local.reshape(-1))
    packed[-1] = parameter.grad is not None
    parts = {stage: packed if stage == near.rank else torch.empty_like(packed) for stage in stages}
    others = [(stage, part) for stage, part in parts.items() if stage != near.rank]
    near.p2p.exchange(
        [(packed, stage) for stage, _ in others], [(part, stage) for stage, part in others]
    )
    # Sum in the order of the stages, so that all ranks get the same bits.
    total = torch.stack(list(parts.values())).sum(dim=0)
    if not total[-1]:
        parameter.grad = None
        return
    local.copy_(total[:-1].view_as(local))
    parameter.grad = own
