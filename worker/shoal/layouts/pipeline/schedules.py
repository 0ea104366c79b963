"""Runners of micro-batches through the stages of a pipeline, by torch's own schedules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from shoal import randomness
from shoal.backends.abortable.p2p import AbortableP2P
from shoal.layouts.base import LossFunction
from shoal.layouts.pipeline.pass_buffers import BACKWARD, FORWARD
from shoal.layouts.pipeline.relay import Neighbours
from shoal.layouts.pipeline.shared_messages import MAX_BYTES, StageLanes, bytes_of
from shoal.layouts.pipeline.stages import Stage
from shoal.torch_private import pipelining
from shoal.torch_private.modules import buffer_table
from shoal.torch_private.tensors import pytree
from shoal_proto.errors import InvalidSpec

SCHEDULES: Mapping[str, Callable[..., Any]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """Inputs of a step, known to every stage of a pipeline."""

    inputs: Mapping[str, Any]
    """Inputs of the model, by name; tensors have the samples in their first dimension."""
    targets: Any = None
    loss_function: LossFunction | None = None
    weight: float = 1.0

    @cached_property
    def num_samples(self) -> int:
        """Number of samples. Raises InvalidSpec if there is no tensor with samples."""
        for leaf in pytree.tree_leaves(dict(self.inputs)):
            if isinstance(leaf, Tensor) and leaf.ndim:
                return leaf.shape[0]
        raise InvalidSpec("the inputs hold no samples", expected="a tensor of samples among them")

    def samples(self, tree: Any, start: int, stop: int) -> Any:
        """Return the part of inputs or targets that belongs to these samples."""
        num_samples = self.num_samples

        def part(leaf: Any) -> Any:
            of_samples = isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == num_samples
            return leaf[start:stop] if of_samples else leaf

        return part(tree) if isinstance(tree, Tensor) else pytree.tree_map(part, tree)

    def key(self) -> str:
        """Return a key of the inputs' structure, shapes and dtypes. One schedule serves all inputs
        with the same key."""
        leaves, spec = pytree.tree_flatten(dict(self.inputs))
        kinds = [(str(x.dtype), tuple(x.shape)) if isinstance(x, Tensor) else x for x in leaves]
        return f"{spec} {kinds}"


def num_microbatches(num_samples: int, at_most: int) -> int:
    """Number of equal parts of the samples: the largest divisor up to `at_most`."""
    return max(count for count in range(1, at_most + 1) if num_samples % count == 0)


class PipelineRunner:
    """Runner of one schedule, for batches of one shape. Its construction is collective.

    1F1B needs at least as many micro-batches as stages; with fewer, GPipe computes the same.
    """

    def __init__(
        self, stage: Stage, near: Neighbours, name: str, step_inputs: StepInputs, count: int
    ) -> None:
        self._stage, self._near, self._count = stage, near, count
        self._buffers = stage.pass_buffers
        self._step_inputs = step_inputs
        self._losses: list[Tensor] = []
        given, returned = self._probe()
        on_host = near.device.type == "cpu"
        sent = [] if self.is_last else returned
        self.sent_bytes = bytes_of(sent, count) if on_host else MAX_BYTES
        """Bytes that this stage sends to the next one in a pass; `MAX_BYTES`, too many for shared
        memory, for tensors on a device."""
        self.p2p: AbortableP2P | StageLanes | None = None
        """Transport of messages, once the ranks have agreed on it."""
        kind = SCHEDULES[name] if count >= stage.num_stages else ScheduleGPipe
        torch_stage = _PlacedStage(
            _Part(self),
            stage.index,
            stage.num_stages,
            near.device,
            input_args=tuple(given),
            output_args=tuple(returned),
            group=near.group,
        )
        torch_stage.runner, torch_stage.p2p = self, near.p2p
        self._torch_stage: Any = torch_stage
        # The loss is scaled instead: earlier gradients must not be scaled again.
        self._schedule = pipelining.schedule(
            kind, torch_stage, count, loss_fn=_identity, scale_grads=False
        )

    def forward_backward(self, step_inputs: StepInputs, p2p: AbortableP2P | StageLanes) -> Tensor:
        """Add this stage's gradients, with messages over `p2p`. Returns the mean loss on the last
        stage, 0 on the others. Raises errors of the user's code or of the group unwrapped."""
        self._step_inputs = step_inputs
        self._torch_stage.p2p = p2p
        self._losses.clear()
        self._buffers.begin()
        rows = torch.arange(step_inputs.num_samples)
        target = rows if self.is_last else None
        wrapped: BaseException | None = None
        try:
            pipelining.run(self._schedule, rows=rows, target=target)
        except RuntimeError as error:
            wrapped = error.__cause__
            if wrapped is None:
                raise
        finally:
            self._step_inputs = StepInputs(inputs={})
        if wrapped is not None:
            raise wrapped
        if not self._losses:
            return torch.zeros((), dtype=torch.float64, device=self._near.device)
        return torch.stack([loss.double() for loss in self._losses]).mean()

    def release(self) -> None:
        """Drop the references to the group."""
        self._torch_stage.group = self._torch_stage.p2p = self.p2p = None

    @property
    def is_last(self) -> bool:
        return self._stage.index == self._stage.num_stages - 1

    def compute(self, activations: Sequence[Tensor], start: int, stop: int) -> Any:
        step_inputs = self._step_inputs
        inputs = {
            name: step_inputs.samples(value, start, stop)
            for name, value in step_inputs.inputs.items()
        }
        with randomness.part(start, stop):
            outputs = self._stage.run(inputs, activations)
        if self.is_last:
            return outputs
        for output in outputs:
            if not isinstance(output, Tensor):
                raise _not_a_tensor(self._stage.index, output)
        return tuple(output.contiguous() for output in outputs)

    def micro_batch(self, pass_kind: str) -> AbstractContextManager[None]:
        """Return a context for a forward or backward of one micro-batch."""
        return self._buffers.of_micro_batch(pass_kind) if self._count > 1 else nullcontext()

    def rows_of(self, microbatch: int) -> tuple[int, int]:
        size = self._step_inputs.num_samples // self._count
        return microbatch * size, (microbatch + 1) * size

    def loss_of(self, outputs: Any, start: int, stop: int) -> Tensor:
        """Compute the part of the loss with which this micro-batch's backward begins."""
        step_inputs = self._step_inputs
        assert step_inputs.loss_function is not None
        loss = step_inputs.loss_function(
            outputs, step_inputs.samples(step_inputs.targets, start, stop)
        )
        self._losses.append(loss.detach().clone())
        return loss * (step_inputs.weight / self._count)

    def _probe(self) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Return tensors of the shapes that the stage receives and sends, found by a forward pass
        with its side effects undone."""
        stage, near = self._stage, self._near
        given: list[Tensor] = []
        if stage.index:
            given = near.receive(source=stage.index - 1, values=False)
        start, stop = self.rows_of(0)

        def run_one() -> Any:
            return self.compute(given, start, stop)

        def run_two() -> Any:
            return self.compute([_twice(each, stop) for each in given], start, 2 * stop)

        with _side_effects_undone(stage.model, near.device):
            outputs = self._buffers.probe(run_one, run_two) if self._count > 1 else run_one()
        if self.is_last:
            return given, [torch.zeros(1, device=near.device)]
        near.send(outputs, to=stage.index + 1, values=False)
        return given, [_like(output) for output in outputs]


class _PlacedStage(pipelining.UncheckedStage):
    """Stage of torch's pipelining with abortable messages. For activation checkpointing, a backward
    draws its own forward's random numbers again."""

    runner: PipelineRunner
    p2p: AbortableP2P | StageLanes

    def get_fwd_recv_ops(self, *args: Any, **kwargs: Any) -> list[dist.P2POp]:
        return self._abortable(super().get_fwd_recv_ops(*args, **kwargs))

    def get_fwd_send_ops(self, *args: Any, **kwargs: Any) -> list[dist.P2POp]:
        return self._abortable(super().get_fwd_send_ops(*args, **kwargs))

    def get_bwd_recv_ops(self, *args: Any, **kwargs: Any) -> list[dist.P2POp]:
        return self._abortable(super().get_bwd_recv_ops(*args, **kwargs))

    def get_bwd_send_ops(self, *args: Any, **kwargs: Any) -> list[dist.P2POp]:
        return self._abortable(super().get_bwd_send_ops(*args, **kwargs))

    def _abortable(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        # NCCL runs a batch as one, but torch batches only for its own groups.
        if not self.p2p.takes_batches:
            for op in ops:
                op.group = cast("dist.ProcessGroup", self.p2p)
        return ops

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        rows = self.runner.rows_of(bwd_chunk_id)
        with self.runner.micro_batch(BACKWARD), randomness.part(*rows):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


class _Part(nn.Module):
    """Stage module for torch's schedule. The last stage returns its loss: the model's outputs may
    have any type."""

    def __init__(self, runner: PipelineRunner) -> None:
        super().__init__()
        self.__dict__["_runner"] = runner

    def forward(self, *activations: Tensor, rows: Tensor) -> Any:
        runner: PipelineRunner = self.__dict__["_runner"]
        start, stop = int(rows[0]), int(rows[-1]) + 1
        with runner.micro_batch(FORWARD):
            outputs = runner.compute(activations, start, stop)
        return runner.loss_of(outputs, start, stop) if runner.is_last else outputs


def _identity(loss: Tensor, rows: Tensor) -> Tensor:
    return loss


def _twice(tensor: Tensor, num_samples: int) -> Tensor:
    of_samples = tensor.ndim and tensor.shape[0] == num_samples
    return torch.cat([tensor, tensor]) if of_samples else tensor


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, requires_grad=tensor.requires_grad)


@contextmanager
def _side_effects_undone(model: nn.Module, device: torch.device) -> Iterator[None]:
    tables = [(table, dict(table)) for part in model.modules() if (table := buffer_table(part))]
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
    # A layer may have replaced a buffer, as `self.count = self.count + 1` does.
    for table, kept in tables:
        table.update(kept)
    with torch.no_grad():
        for buffer, content in before:
            buffer.copy_(content)


def _not_a_tensor(stage: int, value: Any) -> InvalidSpec:
    return InvalidSpec(
        f"stage {stage} sends the next stage something that is not a tensor",
        seen=type(value).__name__,
        expected="layers that return tensors where the model is cut",
        fix="Let each layer return one tensor, or name other layers in split_at.",
    )
