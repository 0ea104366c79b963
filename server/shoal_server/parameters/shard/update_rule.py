"""The update rule of one shard: the job's optimizer, schedule and staleness policy."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from shoal_proto.pieces import Buffer
from shoal_proto.v1.optimizer_pb2 import OptimizerSpec
from shoal_proto.v1.replication_pb2 import PushRecord
from shoal_server.parameters.optimizers import new_optimizer
from shoal_server.parameters.optimizers.base import WholeStepOptimizer
from shoal_server.parameters.optimizers.schedules import RunningSchedule
from shoal_server.parameters.optimizers.staleness import Staleness
from shoal_server.parameters.optimizers.tensors import StatefulRule
from shoal_server.parameters.shard.gradients import BlockSplitter


class UpdateRule:
    """Updates the blocks of a shard in place. Hold the shard's lock for each call."""

    def __init__(
        self, spec: OptimizerSpec, group: int, blocks: Sequence[Tensor], cutter: BlockSplitter
    ) -> None:
        """`spec` has passed `check_spec`."""
        hyper = spec.groups[group]
        self._optimizer = new_optimizer(spec, group, blocks)
        self._schedule = RunningSchedule(spec.schedule, hyper.lr)
        self._staleness = Staleness(spec.staleness, spec.kind, hyper, blocks)
        self._cutter = cutter
        self._whole = self._optimizer if isinstance(self._optimizer, WholeStepOptimizer) else None
        self._all_blocks = list(range(len(blocks)))
        self._parts: Mapping[str, StatefulRule] = {
            "optimizer/": self._optimizer,
            "schedule/": self._schedule,
            "staleness/": self._staleness,
        }

    @property
    def needs_base(self) -> bool:
        """True if a push must carry the values that its gradient was computed on."""
        return self._staleness.needs_base

    def check(self, blocks: Sequence[int], data: Buffer, staleness: int, shard_id: int) -> None:
        """Raise StalePush, ShapeMismatch or NonFiniteGradient to refuse the push."""
        self._staleness.admit(staleness, shard_id)
        self._cutter.check_finite(self._spans(blocks), data)

    def lr(self, asked: float | None, staleness: int) -> float:
        """Return the learning rate for a push. `asked`: None for the schedule's."""
        return self._staleness.scale(self._schedule.lr if asked is None else asked, staleness)

    def apply(self, record: PushRecord, data: Buffer) -> None:
        """Update the blocks that the record names. The result depends only on earlier updates and
        the record. Raises ShapeMismatch, without a change."""
        blocks = record.blocks
        if not self._step_whole(record, data):
            parts = self._cutter.cut(self._spans(blocks), data)
            self._step_by_block(record, parts)
        # A new shard has version 1.
        self._schedule.advance(record.version - 1)

    def _step_whole(self, record: PushRecord, data: Buffer) -> bool:
        """Update all blocks at once. False, without a change, if that is not possible."""
        if self._whole is None or self.needs_base or not record.blocks:
            return False
        if list(record.blocks) != self._all_blocks:
            return False
        gradient = self._cutter.flat(self._all_blocks, data)
        momentum = self._staleness.momentum(record.staleness)
        return self._whole.step_whole(gradient, record.lr, momentum)

    def _step_by_block(self, record: PushRecord, parts: Sequence[Tensor]) -> None:
        blocks = record.blocks
        if blocks:
            gradients, bases = parts[: len(blocks)], parts[len(blocks) :]
            gradients = self._staleness.correct(blocks, gradients, bases, record.staleness)
            momentum = self._staleness.momentum(record.staleness)
            self._optimizer.step(blocks, gradients, record.lr, momentum)

    def _spans(self, blocks: Sequence[int]) -> Sequence[int]:
        return (*blocks, *blocks) if self.needs_base else blocks

    def state(self) -> Mapping[str, Tensor]:
        """Return the tensors kept from push to push, not copied."""
        return {
            prefix + name: tensor
            for prefix, part in self._parts.items()
            for name, tensor in part.state().items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state that `state` returned. Raises InternalError if it does not fit; then part of
        it may have been copied."""
        for prefix, part in self._parts.items():
            part.load_state(
                {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
            )
