"""Base of the strategies whose members step together, over a new group in each generation."""

import time
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack

import structlog
import torch.distributed as dist
from torch import Tensor, nn

from shoal.backends.abortable.gather import barrier, gather
from shoal.backends.process_group.interface import NO_BACKEND, Backend, Group, ended_in_bring_up
from shoal.checkpoint.interface import CheckpointStore, WrittenCheckpoint
from shoal.checkpoint.samples import TrainedSamples
from shoal.data.order import Order, SamplePosition
from shoal.membership.generation import Context, Generation
from shoal.membership.stores import GenerationStores, LoneStores
from shoal.state.registered.comparison import UNTRAINED, compare
from shoal.state.registered.objects import RegisteredState
from shoal.step_context import BatchNormMembers
from shoal.strategies.base import Strategy
from shoal.strategies.synchronous.generation_checkpoints import GenerationCheckpoints
from shoal.strategies.synchronous.generation_group import GenerationGroup
from shoal.strategies.synchronous.hang_watch import HangWatch, HangWatchConfig, TrainerStage
from shoal.strategies.synchronous.script_points import ScriptPoints
from shoal.strategies.synchronous.script_position import ScriptPosition
from shoal.strategies.synchronous.step_transaction import StepTransaction
from shoal_proto.errors import GenerationBroken, InvalidSpec, ShoalError

log = structlog.get_logger(__name__)

STORE_S = 2.0


class SynchronousStrategy(Strategy):
    """Base class: forms the group of each generation, cuts and releases it."""

    synchronous = True
    cuts_batches = True

    def __init__(self) -> None:
        self._backend: Backend = NO_BACKEND
        self._stores: GenerationStores = LoneStores()
        self._generation_group = GenerationGroup()
        self._process_group: dist.ProcessGroup | None = None
        self.position = ScriptPosition()
        self._checkpoints = GenerationCheckpoints(self.position)
        self._transaction = StepTransaction(self.position, self._sign, passes_meet=self.passes_meet)
        self._has_state = False
        self._reduces = True
        self._watch: HangWatch | None = None
        self._points: ScriptPoints | None = None

    # --- for subclasses ---

    @abstractmethod
    def _bring_up(self, generation: Generation, group: dist.ProcessGroup) -> None:
        """Build the training over the group, with the state that the generation starts from.

        The last collective returns only if all members have reached it.
        """

    @abstractmethod
    def _release_training(self) -> None:
        """Drop all references to the group. Quick, raises nothing, may be called twice."""

    def _write_checkpoint(self) -> None:
        """Write a checkpoint of the state after the latest step, if one is due."""

    # --- generations ---

    def use_backend(self, backend: Backend) -> None:
        self._backend = backend

    def attach(self, context: Context) -> None:
        super().attach(context)
        self._stores = context.stores
        if self.writes_checkpoints:
            self.position.leaves = context.no_generation_follows
        if self._backend.is_watched:
            self._watch = HangWatch(
                HangWatchConfig(
                    limit_s=context.limits.collective_s,
                    leaderless_s=context.limits.bring_up_s,
                    is_away=context.is_away,
                    num_moved=self.num_moved,
                    held_until_s=context.held_until_s,
                    report_status=context.report_status,
                    hung=self.cut,
                    device_stalled_since_s=self._backend.stalled_since_s,
                    report_wait=self._report_wait,
                )
            )
            self._watch.start()

    def num_moved(self) -> int:
        """Number of transfers between members outside the group's collectives. Thread-safe."""
        return 0

    def _report_wait(self, waited_s: float, stood_s: float) -> None:
        points = self._points
        if points is not None and points.check(self.position.point(self.step), waited_s, stood_s):
            self.cut(self._generation_group.number)

    def hang_report(self, generation: int) -> str:
        return self._watch.hang_report(generation) if self._watch is not None else ""

    def refusal_in(self, generation: int) -> InvalidSpec | None:
        return self._points.refusal(generation) if self._points is not None else None

    def note_coordinator_wait(self, *, begins: bool) -> None:
        if self._watch is not None:
            self._watch.note_coordinator_wait(begins=begins)

    def note_loading(self, *, begins: bool) -> None:
        if self._watch is not None:
            self._watch.note_loading(begins=begins)

    def _sign(self) -> None:
        if self._watch is not None:
            self._watch.note_progress()

    def _set_stage(
        self, stage: TrainerStage, number: int = 0, group: dist.ProcessGroup | None = None
    ) -> None:
        if self._watch is not None:
            self._watch.stage(stage, number, group)

    def enter(self, generation: Generation) -> None:
        started_s = time.perf_counter()
        self._drop_changes_after_failure()
        group = self._new_group(generation)
        members = [entry.member_id for entry in generation.entries]
        self._set_stage(TrainerStage.BRINGING_UP, generation.number)
        try:
            process_group = self._generation_group.open(group)
            opened_s = time.perf_counter()
            self._set_stage(TrainerStage.BRINGING_UP, generation.number, process_group)
            self._checkpoints.enters()
            self.position.exchange_positions(process_group, self.step, has_state=self._has_state)
            if self._registered:
                self._compare_registered(process_group, members)
            self._bring_up(generation, process_group)
            # Copies to a device may have been aborted meanwhile: then the state is incomplete.
            self._generation_group.check()
        except RuntimeError as error:
            if self._generation_group.has_cut(generation.number):
                raise ended_in_bring_up(generation.number, str(error)) from None
            raise
        self._registered.keep()
        self._process_group = process_group
        self._points = self._new_points(generation, members)
        self._set_stage(TrainerStage.TRAINING, generation.number, process_group)
        self._has_state = True
        self._checkpoints.entered(self.step)
        self._transaction.enter(process_group, members, shares_samples=self.shares_samples)
        log.debug(
            "generation_entered",
            generation=generation.number,
            rank=generation.rank,
            world_size=generation.world_size,
            step=self.step,
            connect_s=round(opened_s - started_s, 4),
            state_s=round(time.perf_counter() - opened_s, 4),
        )

    def batchnorm_members(self, *, has_samples: bool) -> BatchNormMembers | None:
        """Return the members that BatchNorm normalises over; None: only this one."""
        if not self.syncs_batchnorm or self._process_group is None:
            return None
        return BatchNormMembers(self._process_group, has_samples)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of the present generation. Raises GenerationBroken if there is none."""
        if self._process_group is None:
            raise GenerationBroken("there is no running generation")
        return self._process_group

    def _new_points(self, generation: Generation, members: Sequence[str]) -> ScriptPoints | None:
        if self._watch is None or not self._stores.is_shared or len(members) == 1:
            return None
        store = self._stores.open(generation.token, STORE_S)
        return ScriptPoints(
            *(store, generation.number, generation.rank, members),
            exchanges=self.position.exchanges,
            limit_s=self.context.limits.collective_s,
        )

    def _new_group(self, generation: Generation) -> Group:
        return self._generation_group.connect(self._backend, generation, self.context)

    def cut(self, generation: int) -> None:
        self._generation_group.cut(generation)
        if self._generation_group.has_cut(self._generation_group.number):
            self._transaction.cut(f"generation {generation} is over")

    def hand_over(self, *, leaving: Collection[str] = ()) -> None:
        group = self._process_group
        if group is not None:
            # The time depends on the size of the state: watched like a bring-up.
            self._set_stage(TrainerStage.BRINGING_UP, self._generation_group.number, group)
            members = enumerate(self._transaction.votes.members)
            self._hand_over([rank for rank, each in members if each in leaving])
            self._set_stage(TrainerStage.TRAINING, self._generation_group.number, group)

    def _hand_over(self, leaving: Collection[int]) -> None:
        """See `Strategy.hand_over`. `leaving`: ranks."""

    def abandon(self) -> None:
        self._set_stage(TrainerStage.AWAY)
        with ExitStack() as releases:
            # Release the group after any error: otherwise it blocks all later ones.
            releases.callback(self._generation_group.release)
            releases.callback(self._release_training)
            releases.callback(self._transaction.leave)
            releases.callback(self._transaction.roll_back)
            self._reduces = True
        self._process_group = None

    # --- what the script registered ---

    @property
    def _registered(self) -> RegisteredState:
        return self._transaction.registered

    def carry(self, registered: RegisteredState) -> None:
        super().carry(registered)
        self._transaction.registered = registered

    def unsettled_gradients(self) -> str:
        if self._transaction.votes.is_settled:
            return ""
        if self._registered.scaler is not None:
            return "gradients that the registered GradScaler has scaled"
        if self._transaction.has_own_weights:
            return "sums of losses with weights of their own"
        return ""

    def _drop_changes_after_failure(self) -> None:
        """Undo, or note to refuse, what the script changed after a step that has to be repeated."""
        self._registered.restore()
        self._transaction.hyperparameters.compare_with_failed()

    def between_steps(self) -> None:
        self._drop_changes_after_failure()
        self._registered.keep()
        self._raise_refusals()
        if self._checkpoints.owed_step:
            self._check_registered()
            self._checkpoints.owed_step = 0
            self._write_checkpoint()

    def _raise_refusals(self) -> None:
        """Raise a member's refusal of its part of the state on all members, if that is due."""

    def _check_registered(self) -> None:
        if self._registered and self._process_group is not None:
            self._compare_registered(self._process_group, self._transaction.votes.members)

    def _compare_registered(self, group: dist.ProcessGroup, members: Sequence[str]) -> None:
        # Without a state of the job, members still have their own weights and averages of them.
        content = self._registered.comparable(with_tensors=self._has_state)
        compare(group, members, self.step if self._has_state else UNTRAINED, content)

    # --- checkpoints ---

    def keep_checkpoints(self, checkpoints: CheckpointStore) -> None:
        self._checkpoints.set_store(checkpoints)

    def trains_on(self, samples: Mapping[str, str], order: Order) -> None:
        trained = TrainedSamples(samples, order, moves=self.changes_batch_size)
        self._checkpoints.set_samples(trained)

    @property
    def origin(self) -> SamplePosition:
        """The position in the samples at which batches got their present size."""
        return self._checkpoints.samples.origin

    def _checkpoint(self) -> None:
        """Write a checkpoint if one is due; later, if the script may still change the step's
        state, or a member refuse its part of it.
        """
        if self._registered or self._checkpoints.samples.are_known or self.state_is_spread:
            self._checkpoints.owed_step = self.step if self._checkpoints.is_due(self.step) else 0
        else:
            self._write_checkpoint()

    def checkpoint_steps(self) -> Sequence[int]:
        return self._checkpoints.steps()

    @property
    def checkpoint_due(self) -> bool:
        return self._checkpoints.is_due(self.step)

    @property
    def written_checkpoint(self) -> WrittenCheckpoint | None:
        return self._checkpoints.written

    @property
    def writes_checkpoints(self) -> bool:
        return self._checkpoints.is_enabled

    def leaves_with_checkpoint(self) -> bool:
        if self.position.checkpoint_at != self.step or not self.position.leaves():
            return False
        self._checkpoints.conclude()
        if not self._checkpoints.failure and not self._checkpoints.is_written(self.step):
            raise GenerationBroken(f"the checkpoint of the last step, {self.step}, was abandoned")
        return True

    @property
    def checkpoint_failure(self) -> ShoalError | None:
        return self._checkpoints.failure

    # --- steps ---

    def _open_step(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        self._transaction.begin(model, parameters)
        if not self._reduces:
            self._reduces = True
            self._reduce_in_backward(True)

    def choose(self, optimizers: frozenset[str]) -> None:
        """Choose the optimizers for the next pass, update or clipping.

        Raises InvalidSpec if they train only a part of a model.
        """
        self._transaction.models(optimizers)
        self._transaction.chosen = optimizers

    def update(self) -> None:
        """Let the chosen optimizers step now; undone if the session's step fails.

        Raises InvalidSpec if there is only one optimizer.
        """
        raise InvalidSpec(
            "an update within a step, of the session's only optimizer",
            expected="session.step() alone, which steps the optimizer when its block ends",
        )

    def begin_part(self, index: int, num_parts: int) -> None:
        if self._transaction.training is not None:
            raise InvalidSpec(
                "batch.parts with several optimizers",
                expected="one session.backward for each loss, of the whole batch",
            )
        reduces = self._transaction.begin_part(index, num_parts)
        if reduces != self._reduces:
            self._reduces = reduces
            self._reduce_in_backward(reduces)

    def _reduce_in_backward(self, reduces: bool) -> None:
        """See `Layout.reduce_in_backward`."""

    def _settle(self) -> None:
        """See `StepTransaction.settle`. Raises on all members unless all take the step."""
        factor = self._transaction.settle()
        if factor != 1.0:
            self._scale_gradients(factor)

    def _scale_gradients(self, factor: float) -> None:
        """Multiply the gradients that this member's optimizer uses by `factor`."""

    def withdraw_step(self) -> None:
        """See `StepTransaction.withdraw`."""
        self._transaction.withdraw()

    def repeat_step(self) -> None:
        """See `StepTransaction.repeat`."""
        self._transaction.repeat()

    def finish(self) -> None:
        group = self.group
        self.position.set_wait_point("the end of its batches")
        if self.position.stop_at is not None:
            reasons = [each.decode() for each in gather(self.position.reason.encode(), group)]
            self.position.reason = next((reason for reason in reasons if reason), "")
        self._registered.restore()
        if self.state_is_spread:
            self.position.inspection.raise_on_all(group)
        self._check_registered()
        self.between_steps()
        # Before any member leaves, each must have written its part of the checkpoint and have
        # handed over copies.
        self._checkpoints.conclude()
        self.hand_over()
        barrier(group)

    def has_leftovers(self) -> bool:
        try:
            self._generation_group.check()
        except GenerationBroken:
            return True
        except RuntimeError as error:
            # The device itself has failed.
            log.debug("device_failed", reason=str(error)[:300])
        return False

    def is_failure(self, error: BaseException) -> bool:
        return self._backend.is_failure(error)

    # --- state ---

    @property
    def step(self) -> int:
        return self._transaction.step

    @property
    def has_state(self) -> bool:
        return self._has_state

    def close(self) -> None:
        with ExitStack() as releases:
            releases.callback(self._checkpoints.finish_write)
            releases.callback(self._stores.close)
            if self._generation_group.is_connected:
                releases.callback(self.abandon)
            if self._watch is not None:
                releases.callback(self._watch.close)
