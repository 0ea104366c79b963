"""Local SGD and DiLoCo: members train their own copies, which are averaged at the end of a round.

A round ends every `every_steps` steps, at the job's final step, when a checkpoint is due, and when
the generation stops by agreement. If a member is lost, all members roll back to the end of the last
round.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

import structlog
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shoal.backends.abortable.gather import barrier
from shoal.backends.abortable.waiter import all_reduce
from shoal.compression import find_compression
from shoal.compression.base import Compression
from shoal.layouts.gradients import name_of_fault
from shoal.membership.generation import Generation, receivers_of
from shoal.model.digests import optimizer_digest, schema_digest
from shoal.model.elementwise_optimizers import refuse_further_state, refuse_lbfgs
from shoal.model.gradients import StepGradients, refuse_sparse, watch_parameters
from shoal.model.not_finite import gradient_not_finite
from shoal.model.several import refuse_untrained
from shoal.model.tied_tensors import persistent_buffers, tied
from shoal.model.trained_parameters import refuse_extra_state
from shoal.planning.figures import Plan, PlanInput, uncompressed
from shoal.state.shards import MODEL, StateShard, whole_chunk
from shoal.state.transfer import receive, send
from shoal.strategies.local_sgd.figures import OuterLoopFigures
from shoal.strategies.local_sgd.outer_loop import OuterLoop
from shoal.strategies.outer_step import OuterStep
from shoal.strategies.rollback.buffers import PersistentBuffers
from shoal.strategies.synchronous.hyperparameters import Hyperparameters, Values
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal.weights.pieces import HeldWeights, replicated_weights
from shoal_proto.errors import (
    DtypeMismatch,
    InvalidSpec,
    ShapeMismatch,
)
from shoal_proto.numbers_given import as_index
from shoal_proto.v1 import membership_pb2 as pb

log = structlog.get_logger(__name__)

_PLAIN = OuterStep()


class Round:
    """A member's steps since the last round ended."""

    def __init__(self) -> None:
        self.applied: dict[int, Values] = {}
        self.conflict = ""
        """See `Hyperparameters.conflict`."""
        self.weight = 0.0
        self._weights = 0.0
        self._unacknowledged: list[Callable[[], None]] = []

    def note(self, step: int, hyper: Hyperparameters) -> None:
        """Note that this step is about to be taken, with the present hyperparameters."""
        self.conflict = self.conflict or hyper.conflict(step)
        hyper.apply(step)
        self.applied[step] = hyper.current_values()

    def stepped(self, acknowledged: Callable[[], None]) -> None:
        """Note that a step was taken; `acknowledged` is called when its round ends."""
        self._weights += self.weight
        self._unacknowledged.append(acknowledged)

    def mean_weight(self, num_steps: int) -> float:
        """Return the mean weight of this round's steps; it averages to one over the members."""
        return self._weights / num_steps

    def end(self) -> None:
        """End the round: acknowledge its steps."""
        self.applied.clear()
        self._weights = 0.0
        while self._unacknowledged:
            self._unacknowledged.pop(0)()

    def give_up(self) -> None:
        """Discard the round, whose steps are rolled back."""
        self.applied.clear()
        self.conflict = ""
        self._weights = 0.0
        self._unacknowledged.clear()


class LocalSGD(SynchronousStrategy):
    """Strategy "local-sgd": every `every_steps` steps the members' parameters are averaged.

    Stich 2019, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767. A member's
    weight is its share of the round's batches. The model's running statistics are averaged too.
    Each member keeps its own optimizer state; a joining member starts with a copy of another
    member's.

    A committed step may be rolled back until its round ends, so `session.step_number` may decrease
    after a loss. A learning rate has to depend on this number, not on a counter of the script.
    `compression`: as for `shoal.DDP`.
    """

    name = "local-sgd"
    passes_meet = False
    cuts_batches = False

    def __init__(
        self, *, every_steps: int = 16, compression: str | Compression | None = None
    ) -> None:
        super().__init__()
        every_steps = as_index("every_steps", every_steps)
        if every_steps < 1:
            raise InvalidSpec(
                "every_steps is out of range", seen=f"{every_steps}", expected="at least 1"
            )
        self._every_steps = every_steps
        self._outer = _PLAIN
        self._compression = None if compression is None else find_compression(compression)
        self._round = Round()
        self._is_ending_round = False
        self._rank = 0
        self._watching: list[RemovableHandle] = []
        self._unfit: ShapeMismatch | DtypeMismatch | None = None
        """Error of the rollback that the model did not fit."""

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        refuse_lbfgs(self.name, optimizer)
        refuse_further_state(self.name, optimizer)
        refuse_extra_state(model)
        refuse_sparse(self.name, model)
        refuse_untrained(self.name, model)
        compressor = self._compression.compressor() if self._compression else None
        self._outer_loop = OuterLoop(model, optimizer, self._outer, compressor)
        self._fields = {
            "schema": schema_digest(model),
            "optimizer": optimizer_digest(optimizer),
            "backend": self._backend.name,
            "compression": str(self._compression or "none"),
            "rounds": f"{self._every_steps} steps, {self._outer}",
        }
        self._model, self._optimizer = model, optimizer
        self._lasting = PersistentBuffers(model)
        self._transaction.train(model, optimizer)
        self._gradients = StepGradients(model.parameters(), optimizer)
        self._watching = watch_parameters(model.parameters(), self._transaction.expects_gradient)
        return model, optimizer

    def figures(self, subject: PlanInput) -> Plan:
        """See `shoal.planning.figures.PlannableStrategy`; changes count as uncompressed."""
        figures = OuterLoopFigures(
            subject, self._every_steps, keeps_velocity=bool(self._outer.momentum)
        )
        return figures.plan(self.name, uncompressed(self._compression))

    def fields(self) -> Mapping[str, str]:
        return self._fields

    # --- generations ---

    def _bring_up(self, generation: Generation, group: dist.ProcessGroup) -> None:
        source, _ = receivers_of(generation)
        keeps = generation.me.state == pb.STATE_ACTION_KEEP and self._outer_loop.has_agreed
        steps = torch.full((generation.world_size,), -1, dtype=torch.int64)
        steps[generation.rank] = self.step if keeps or generation.rank == source else -1
        self._outer_loop.waiter.attach(group)
        all_reduce(steps, group, dist.ReduceOp.MAX)
        newest = int(steps.max())
        if int(steps[source]) != newest:
            # The last round ended on some members only, which the coordinator does not know.
            source = int(steps.argmax())
        receivers = [rank for rank, step in enumerate(steps.tolist()) if step != newest]
        if generation.rank == source:
            if not self._outer_loop.has_agreed:
                self._outer_loop.agree(self.step)
            if receivers:
                send(self._outer_loop.outgoing(), receivers, group)
        elif generation.rank in receivers:
            given = receive(source, receivers, group)
            self._outer_loop.take(given)
            self._transaction.step = given.step
        self._checkpoints.select_writers(generation.world_size)
        kept = self._checkpoints.newest(generation, group) if self.step == 0 else None
        if kept is not None:
            state_shard = self._checkpoints.read(kept, whole_chunk, self._optimizer)
            self._outer_loop.adopt(state_shard)
            self._transaction.step = state_shard.step
        self._rank = generation.rank
        self._outer_loop.regroup()
        barrier(group)

    def _release_training(self) -> None:
        self._gradients.forget()

    def _hand_over(self, leaving: Collection[int]) -> None:
        if self._process_group is not None:
            self._end_round(self._process_group)

    def close(self) -> None:
        try:
            super().close()
        finally:
            for each in self._watching:
                each.remove()

    def abandon(self) -> None:
        in_step = self._transaction.in_step
        super().abandon()
        self._round.give_up()
        if self._outer_loop.has_agreed and (in_step or self.step != self._outer_loop.agreed.step):
            self._roll_back_round()
        self._is_ending_round = False

    def _roll_back_round(self) -> None:
        try:
            if self._is_ending_round:
                # The round may have ended on another member, whose weights this member then
                # takes in the next generation.
                self._outer_loop.save_optimizer_state(self.step)
            self._outer_loop.roll_back()
        except (ShapeMismatch, DtypeMismatch) as error:
            # The script has changed the model's dtype or shape, or made a buffer: the next step
            # refuses that.
            self._unfit = error
            log.debug("round_not_rolled_back", reason=str(error)[:300])
        self._transaction.step = self._outer_loop.agreed.step

    # --- steps ---

    def begin_step(self) -> None:
        self._refuse_late_buffers()
        if self._unfit is not None:
            raise self._unfit
        self._gradients.forget()
        self._transaction.begin_alone()
        self._round.weight = 0.0

    def backward(self, loss: Tensor, weight: float) -> None:
        self._round.weight = weight
        with self._transaction.weighted_backward():
            # A member without a share has a stand-in sample, which must not change its parameters.
            if weight:
                loss.backward()  # type: ignore[no-untyped-call]

    def repeat_step(self) -> None:
        # The step is its round's first one: its batch is from before this generation.
        super().repeat_step()
        self._roll_back_round()

    @property
    def local_model(self) -> nn.Module:
        return self._model

    @property
    def module(self) -> nn.Module:
        return self._model

    def end_step(self, acknowledged: Callable[[], None]) -> None:
        group = self.group
        self._transaction.check_weighted()
        self._refuse_late_buffers()
        fault = name_of_fault(dict(self._model.named_parameters()))
        if fault:
            raise gradient_not_finite(fault, self.step)
        self._round.note(self.step, self._transaction.hyperparameters)
        with self._transaction.committing(self._optimizer):
            self._optimizer.step()
        self.position.inspection.check(
            self._optimizer, lambda: self._outer_loop.state.collect(self.step)
        )
        self._round.stepped(acknowledged)
        if self._checkpoints.is_due(self.step) or self.step % self._every_steps == 0:
            self._end_round(group)
        self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        # A checkpoint has the optimizer state of rank 0. On resume each member gets a copy of it.
        self._checkpoints.write(self.step, self._outer_loop.state_shard, lambda _: self._rank == 0)

    def _refuse_late_buffers(self) -> None:
        PersistentBuffers(self._model).refuse_others_than(self._lasting)

    def _end_round(self, group: dist.ProcessGroup) -> None:
        num_steps = self.step - self._outer_loop.agreed.step
        if not num_steps:
            return
        self._is_ending_round = True
        self._transaction.settle_round(self._round.applied, self._round.conflict)
        with self._generation_group.judging():
            self._outer_loop.synchronise(
                self.step,
                self._round.mean_weight(num_steps),
                group,
                self._generation_group.check,
            )
        self._is_ending_round = False
        self._round.end()

    def finish(self) -> None:
        if self._process_group is not None:
            self._end_round(self._process_group)
        super().finish()

    # --- state ---

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the model as of the end of the last round, on the host."""
        further = tied(self._model)
        agreed = self._outer_loop.agreed.shards
        names = list(self._model.state_dict(keep_vars=True))
        first = {name: further.get(name, name) for name in names}
        copies = {
            name: agreed[MODEL + name].tensor.to("cpu", copy=True) for name in {*first.values()}
        }
        return {name: copies[first[name]] for name in names}

    def weights(self) -> HeldWeights:
        """Return the weights as of the end of the last round."""
        world_size, agreed = self.group.size(), self._outer_loop.agreed
        return replicated_weights(
            _tensors_of(agreed, dict(self._model.named_parameters())),
            _tensors_of(agreed, persistent_buffers(self._model)),
            step=agreed.step,
            rank=self._rank,
            world_size=world_size,
            tied=tied(self._model),
        )

    def metrics(self) -> Mapping[str, float]:
        """Return the bytes that this member sent for its rounds, and the compression ratio."""
        return self._outer_loop.traffic.metrics()


def _tensors_of(state_shard: StateShard, names: Iterable[str]) -> dict[str, Tensor]:
    return {name: state_shard.shards[MODEL + name].tensor for name in names}


class DiLoCo(LocalSGD):
    """Strategy "diloco": as "local-sgd", with an outer step on the mean change of a round.

    Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models",
    arXiv:2311.08105: AdamW within the rounds, SGD with Nesterov's momentum between them, and rounds
    of hundreds of steps.
    """

    name = "diloco"

    def __init__(
        self,
        *,
        every_steps: int = 100,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        compression: str | Compression | None = None,
    ) -> None:
        super().__init__(every_steps=every_steps, compression=compression)
        self._outer = OuterStep(lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)
