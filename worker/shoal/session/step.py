"""Steps of a session: their start, commit or failure, and the script's calls within a step."""

import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shoal import randomness
from shoal.backends.abortable.waiter import waiting
from shoal.data.batches import Batch
from shoal.layouts.base import LossFunction
from shoal.layouts.gathered_rows import UNKNOWN, RowGathers, Share
from shoal.membership.draining import Drained
from shoal.session.batch_sources import BatchSource
from shoal.session.distribution import Distribution
from shoal.session.elastic_controller import ElasticController
from shoal.session.micro_batches import MicroBatches, scaled
from shoal.session.step_guard import StepGuard
from shoal.session.step_reports import StepReports, StepTimes
from shoal.step_context import (
    NO_STEP,
    BatchNormMembers,
    PresentSamples,
    StepContext,
    current,
    set_current,
)
from shoal.strategies.base import Strategy
from shoal.strategies.synchronous.script_position import StaleBatch, StepStopped
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal.strategies.torch_errors import StepState, refusal_of
from shoal.torch_private.amp import scale_of
from shoal.torch_private.watching import before_calls
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import as_number

ForOptimizers = Optimizer | Sequence[Optimizer] | None
"""Optimizers that a call is for, if there are several."""


class Step:
    """Attempt at an optimizer step; see `Session.step`."""

    def __init__(
        self,
        controller: ElasticController,
        fields: dict[str, str],
        *,
        guard: StepGuard,
        source: BatchSource | None,
        reports: StepReports | None,
        leave: Callable[[BaseException], None],
    ) -> None:
        """`fields`: the proposal's fields. `leave(error)` ends the membership, with the error as
        the reason."""
        self._controller = controller
        self._fields = fields
        self.guard = guard
        self._source = source
        self._reports = reports
        self._leave = leave
        self._started_s = 0.0
        self._waited_s = 0.0
        self.is_open = False
        self.committed = False
        """True if the step was committed: set when its block ends."""
        self.loss: Tensor | None = None
        """Mean of this member's losses so far; None before the first, NaN without samples."""
        self._weight = 0.0
        self._num_updates = 0
        self._rows: RowGathers | None = None
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        self._started_s, self._waited_s = time.perf_counter(), waiting.seconds
        if self._source is None:
            self._controller.ensure_generation(self._fields)
        else:
            self._source.attempted()
        self.guard.check()
        self._controller.job_log.begins()
        if self._reports is not None:
            self._reports.step_begins()
        strategy = self._controller.strategy
        strategy.begin_step()
        with ExitStack() as opened:
            opened.callback(self._close)
            self._open(strategy)
            self._opened = opened.pop_all()
        return self

    def _open(self, strategy: Strategy) -> None:
        self.is_open = True
        self.guard.open()
        batch = self.batch
        self.micro_batches = MicroBatches(strategy, batch, int(self._fields.get("global_batch", 1)))
        gathers = self._is_uneven and strategy.synchronous and not strategy.gathers_lack()
        set_current(
            StepContext(
                samples=self._samples(batch) if strategy.synchronous else None,
                batchnorm=self._batchnorm(strategy, batch),
                check_gather=self._check_own_gather if gathers else None,
                sizes=self._controller.details.shares,
                parts=self.micro_batches,
                guard=self.guard,
            )
        )
        if batch is not None and batch.is_stand_in:
            self.micro_batches.begin_stand_in()

    def _close(self) -> None:
        self.is_open = False
        set_current(NO_STEP)
        if self._rows is not None:
            self._rows.close()

    def release(self) -> None:
        """End the step because the session ends. May be called twice."""
        self._opened.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._opened.close()
        if error is None:
            try:
                self._commit()
            except BaseException as failure:
                if not self._recovers(failure):
                    raise
            else:
                self.committed = True
            return True
        self.guard.modes.restore()
        return self._recovers(error)

    @property
    def batch(self) -> Batch | None:
        """Batch of the step; None if the session hands out no batches."""
        return self._source.batch if self._source is not None else None

    @property
    def _is_uneven(self) -> bool:
        batch = self.batch
        return batch is not None and batch.weight != 1.0

    def check_batch(self) -> None:
        """See `BatchSource.check_batch`."""
        if self._source is not None:
            self._source.check_batch()

    def note_loss(self, loss: Tensor, weight: float) -> None:
        """Add the mean loss of a pass, with its weight (0 without samples), to the step's mean
        loss."""
        self._weight += weight
        loss = loss.detach()
        if not weight:
            self.loss = torch.full_like(loss, math.nan) if self.loss is None else self.loss
        elif self._weight == weight:
            self.loss = loss
        elif self.loss is not None:
            self.loss = self.loss + (loss - self.loss) * (weight / self._weight)

    def gather(self, tensor: Tensor) -> Tensor:
        """See `Session.gather`."""
        self.micro_batches.check_whole()
        found = self._gathers().gather(tensor)
        self.micro_batches.num_gathered = len(found)
        return found

    def _check_own_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        self._gathers().check_own(outputs, tensor)

    def _gathers(self) -> RowGathers:
        """Return the step's row exchange. Raises InvalidSpec if the strategy cannot gather rows."""
        if self._rows is None:
            strategy, generation = self._controller.strategy, self._controller.generation
            lack = strategy.gathers_lack()
            if lack or not isinstance(strategy, SynchronousStrategy) or generation is None:
                raise InvalidSpec(
                    f"session.gather under {strategy.name}",
                    seen=lack,
                    expected="a strategy whose members compute each step together, from whole"
                    " samples: ddp, zero1, zero2, zero3, fsdp, hsdp, tensor, fsdp-tensor, or"
                    " hybrid with one stage",
                )
            batch = self.batch
            self._rows = RowGathers(
                strategy.group,
                [entry.member_id for entry in generation.entries],
                Share(
                    index=strategy.data_share(generation)[0],
                    num_samples=UNKNOWN if batch is None else len(batch.indices),
                ),
                strategy.step,
                strategy.position.waits,
            )
        return self._rows

    def _samples(self, batch: Batch | None) -> PresentSamples | None:
        """Seed torch for this member's share of the batch; return the share's samples. A stand-in
        repeats sample 0."""
        if batch is None:
            return None
        seed, first = int(self._fields["seed"]), 0 if batch.is_stand_in else batch.first
        randomness.seed_torch(seed, batch.step, first)
        count = max(batch.num_samples, 1)
        return PresentSamples(seed=seed, step=batch.step, first=first, count=count)

    @contextmanager
    def drawing_alike(self, *, restores: bool) -> Iterator[None]:
        """Return a context for an optimizer's update. If every member makes the same update, torch
        draws the same numbers for it on all members. `restores`: the generators continue after it
        as if nothing was drawn."""
        strategy = self._controller.strategy
        if not strategy.updates_alike:
            yield
            return
        states = randomness.generator_states() if restores else ()
        self._num_updates += 1
        seed = int(self._fields.get("seed", 0))
        randomness.seed_torch(seed, strategy.step, -self._num_updates)
        try:
            yield
        finally:
            if states:
                randomness.restore_generators(states)

    def _batchnorm(self, strategy: Strategy, batch: Batch | None) -> BatchNormMembers | None:
        if "sync_batchnorm" not in self._fields or not isinstance(strategy, SynchronousStrategy):
            return None
        return strategy.batchnorm_members(has_samples=batch is None or bool(batch.indices))

    def _commit(self) -> None:
        controller, source = self._controller, self._source
        self.check_batch()
        self.micro_batches.check_complete()
        self.guard.check_gradients()
        # What the script draws after the step is the same on all members, too.
        with self.drawing_alike(restores=source is None), self.guard.committing():
            controller.strategy.end_step(source.acknowledged() if source is not None else _nothing)
        if source is not None:
            source.trained()
        controller.membership.progress(controller.strategy.step)
        controller.job_log.committed(controller.strategy.step)
        if self._reports is not None:
            batch = self.batch
            num_samples = batch.num_samples if batch is not None else 0
            times = StepTimes(
                step_s=time.perf_counter() - self._started_s,
                exchange_s=waiting.seconds - self._waited_s,
                loading_s=None if source is None else source.loading_s,
            )
            loss = self.loss if self._weight else None
            self._reports.step_done(controller.strategy, loss, times, num_samples)

    def _recovers(self, error: BaseException) -> bool:
        """Return True if the step is rolled back and the script goes on. After other errors the
        member leaves: raises the session's error for this case, if there is one, else returns
        False."""
        strategy = self._controller.strategy
        if strategy.redoes(error):
            return True
        if isinstance(error, StepStopped) and isinstance(strategy, SynchronousStrategy):
            strategy.withdraw_step()
            return True
        if isinstance(error, StaleBatch) and isinstance(strategy, SynchronousStrategy):
            strategy.repeat_step()
            return True
        if self._controller.is_break(error):
            # The frames hold the wrapped model, and so the group that must be freed.
            traceback.clear_frames(error.__traceback__)
            try:
                self._controller.recover(error)
            except BaseException as refusal:
                self._leave(refusal)
                raise
            return True
        refused = refusal_of(error, self._state())
        # Leave at once, so that other members need not detect the failure.
        self._leave(refused or error)
        if refused is not None:
            raise refused from error
        return False

    def _state(self) -> StepState:
        strategy, batch = self._controller.strategy, self.batch
        return StepState(
            strategy=strategy.name,
            step=strategy.step,
            num_samples=None if batch is None else len(batch.indices),
            syncs_batchnorm=strategy.syncs_batchnorm,
        )


def _check_script_gather(
    tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False
) -> None:
    """Check the script's own `torch.distributed.all_gather`, if the members' shares differ in size:
    Gloo would abort or hang. `torch.distributed.nn.all_gather` makes this call too."""
    # Shoal's own calls name a group.
    if group is None and (check := current().check_gather) is not None:
        check(tensor_list, tensor)


class Steps:
    """The script's calls within a step; `Session` documents each."""

    def __init__(self, controller: ElasticController, trained: Distribution) -> None:
        self._controller = controller
        self._trained = trained
        self._newest: Step | None = None
        self._generators: Sequence[Tensor] = ()
        """States of torch's generators before the first step: each step seeds the generators."""
        before_calls(dist, "all_gather", _check_script_gather)

    def release(self) -> None:
        """Close an open step, and restore torch's generators to their first states, when the
        session ends. May be called twice."""
        if self._newest is not None:
            self._newest.release()
        states, self._generators = self._generators, ()
        if states:
            randomness.restore_generators(states)

    def new(
        self,
        *,
        source: BatchSource | None,
        reports: StepReports | None,
        leave: Callable[[BaseException], None],
    ) -> Step:
        if self.in_step:
            raise InvalidSpec("steps do not nest", seen="session.step() within session.step()")
        if source is not None and not self._generators and self._controller.strategy.synchronous:
            self._generators = randomness.generator_states()
        self._newest = Step(
            self._controller,
            self._trained.fields,
            guard=self._trained.guard,
            source=source,
            reports=reports,
            leave=leave,
        )
        return self._newest

    @property
    def in_step(self) -> bool:
        return self._newest is not None and self._newest.is_open

    @property
    def in_stand_in(self) -> bool:
        """True within a step, for a batch or part that repeats a sample."""
        step = self._newest
        return step is not None and step.is_open and step.micro_batches.is_in_stand_in

    def check_closed(self, call: str) -> None:
        """Raise InvalidSpec within a step, for a call that belongs between two steps."""
        if self.in_step:
            raise InvalidSpec(
                f"{call} within a step", expected="the call after the with session.step() block"
            )

    def _open(self, call: str) -> Step:
        if self._newest is None or not self._newest.is_open:
            raise InvalidSpec(f"{call} outside a step", expected="with session.step(): ...")
        self._newest.check_batch()
        return self._newest

    def backward(
        self, loss: Tensor, weight: float | Tensor | None, optimizer: ForOptimizers
    ) -> None:
        step = self._open("backward")
        _check_loss(loss)
        self._trained.choose(optimizer, "session.backward", weight=weight)
        fraction = step.micro_batches.begin_pass(by_weight=weight is not None)
        counted = step.micro_batches.counted(fraction if weight is None else weight)
        scaler = self._trained.registered.scaler
        step.note_loss(loss if scaler is None else loss.detach() / scale_of(scaler), counted)
        step.guard.check_loss_graph(loss)
        if weight is None:
            step.micro_batches.check_samples()
        if step.guard.is_early:
            step.micro_batches.check_mean(loss, by_weight=weight is not None)
        with step.guard.computing():
            step.micro_batches.backward(loss, fraction, None if weight is None else counted)

    def gather(self, tensor: Tensor) -> Tensor:
        return self._open("session.gather").gather(tensor)

    def update(self, optimizer: ForOptimizers) -> None:
        step = self._open("session.update")
        strategy = self._trained.choose(optimizer, "session.update")
        if strategy is None:
            raise InvalidSpec(
                "session.update of the session's only optimizer",
                expected="session.step() alone, which steps the optimizer when its block ends",
            )
        with step.drawing_alike(restores=True), step.guard.committing():
            strategy.update()

    def forward_backward(self, batch: Batch, loss_function: LossFunction) -> Tensor:
        step = self._open("a pass")
        if self._trained.training is not None:
            raise InvalidSpec(
                "session.forward_backward with several optimizers",
                expected="session.backward(loss, optimizer=...), which says what the loss trains",
            )
        fraction = step.micro_batches.begin_pass()
        step.micro_batches.check_samples()
        if step.guard.is_early:
            loss_function = step.micro_batches.checked(loss_function, step.guard.check_loss_graph)
        whole = batch if fraction == 1.0 or step.batch is None else step.batch
        with step.guard.computing():
            loss = self._controller.strategy.forward_backward(
                batch.inputs, batch.targets, scaled(loss_function, fraction), whole.weight
            )
        loss = loss / fraction if fraction not in (0.0, 1.0) else loss
        counted = step.micro_batches.counted(fraction)
        step.note_loss(loss, counted)
        return loss if counted else torch.zeros_like(loss)

    def clip_grad_norm(self, max_norm: float, optimizer: ForOptimizers) -> Tensor:
        step = self._open("clipping")
        max_norm = as_number("max_norm", max_norm)
        self._trained.choose(optimizer, "session.clip_grad_norm")
        with step.guard.clipping(max_norm):
            return self._controller.strategy.clip_grad_norm(max_norm)


def _check_loss(loss: object) -> None:
    seen = ""
    if not isinstance(loss, Tensor):
        seen = type(loss).__name__
    elif loss.numel() != 1:
        seen = f"a tensor of shape {tuple(loss.shape)}"
    elif not loss.requires_grad:
        seen = "a number that does not require gradients"
    if seen:
        raise InvalidSpec(
            "session.backward of a value that is not a loss",
            seen=seen,
            expected="one number, computed from the outputs of the distributed model",
            fix="Reduce the loss to its mean over the samples, and compute it without"
            " torch.no_grad() and .detach().",
        )


def reason_of(error: BaseException) -> str:
    """Return the reason for which a member leaves after this error, as other members see it."""
    if isinstance(error, Drained):
        return f"drained: {error.reason}"
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def reason_of_end(strategy: Strategy | None) -> str:
    """Return the reason that is shown for a finished job."""
    done = "all batches were trained on"
    if isinstance(strategy, SynchronousStrategy) and strategy.position.stop_at is not None:
        done = f"stopped by the script: {strategy.position.reason}"
    return done + (f", but {strategy.warning}" if strategy and strategy.warning else "")


def _nothing() -> None:
    """Do nothing: a step outside of `batches` has no samples to account for."""
