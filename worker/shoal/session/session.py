"""Session: a training script's interface to its membership in a job."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from shoal.backends.network.own_gpu import LocalRank, own_gpu_used
from shoal.backends.process_group.interface import LONGEST_S
from shoal.checkpoint.background import Checkpoints
from shoal.data.batch_options import BatchOptions, LoadingOptions
from shoal.data.batches import Batch, Dataset
from shoal.data.samples import Collate
from shoal.layouts.base import LossFunction
from shoal.membership.draining import DrainSignal
from shoal.membership.generation import Generation
from shoal.membership.join_config import JoinConfig
from shoal.membership.validators import Validator, ValidatorSet, validators_of
from shoal.model.frameworks import adapter_of, is_trained_by_fit
from shoal.session.batch_sources import (
    Batches,
    BatchSource,
    LeasedBatches,
    SynchronousBatches,
    second_loop,
)
from shoal.session.distribution import (
    Chosen,
    DistributeKeywords,
    DistributeOptions,
    Distribution,
    Models,
    Optimizers,
)
from shoal.session.elastic_controller import ElasticController
from shoal.session.evaluation import Evaluation, Measure
from shoal.session.leaving import SessionEnd
from shoal.session.publishing import SessionSeries
from shoal.session.shared_calls import Reduction, SharedCalls, Value, present, stop
from shoal.session.step import Step, Steps
from shoal.session.step_reports import StepReports, check_entered
from shoal.state.registered.objects import Stateful
from shoal.strategies import find_strategy
from shoal.strategies.base import Strategy
from shoal.tracking.scalars import Scalar
from shoal.tracking.tracker import Tracker
from shoal.weights.series import SeriesOptions
from shoal_proto.errors import InvalidSpec, RefusedError
from shoal_proto.numbers_given import as_number

S = TypeVar("S", bound=Stateful)
M = TypeVar("M", bound=nn.Module)
Given = TypeVar("Given", bound=Optimizers)


PAUSE_S = 1800.0


class ScriptPause:
    """Pause of a session's script, in which the other members wait. One at a time."""

    def __init__(self, controller: ElasticController) -> None:
        self._controller = controller
        self.is_on = False
        self._is_for_library = False

    def hold_unless_paused(self, reason: str, limit_s: float) -> AbstractContextManager[None]:
        """Pause as `hold` does, unless the script is in a pause already."""
        return nullcontext() if self.is_on else self.hold(reason, limit_s)

    @contextmanager
    def hold_for_library(self, reason: str) -> Iterator[None]:
        """Pause unless the script is in a pause already; pauses of the script within this one
        change nothing."""
        if self.is_on:
            yield
            return
        with self.hold(reason, LONGEST_S):
            self._is_for_library = True
            try:
                yield
            finally:
                self._is_for_library = False

    @contextmanager
    def hold(self, reason: str, limit_s: float) -> Iterator[None]:
        """See `Session.pause`."""
        if not reason.strip():
            raise InvalidSpec("a pause needs a reason", expected='session.pause("validation")')
        limit_s = as_number("limit_s", limit_s)
        if not 0 < limit_s <= LONGEST_S:
            raise InvalidSpec(
                "limit_s is out of range",
                seen=f"{limit_s:g}",
                expected=f"above 0, and at most {LONGEST_S:g} s",
            )
        if self._is_for_library:
            yield
            return
        if self.is_on:
            raise InvalidSpec("pauses do not nest", seen=f"pause({reason!r}) within a pause")
        self._controller.pause(reason, limit_s)
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False
            self._controller.resume()


class Session:
    """Session made by `shoal.join`: a member of the job while its `with` block runs.

    If the block ends normally after the last batch, after `stop` or without `batches`, the job is
    complete. Otherwise only this member leaves, and the others continue.

    While the block runs, SIGTERM asks for a drain (see `drain`), unless the script handles it.
    Another session may follow in the same process.
    """

    def __init__(
        self,
        config: JoinConfig,
        validators: Iterable[Validator] = (),
        trackers: Iterable[Tracker] = (),
    ) -> None:
        self._config = config
        self._validators = tuple(validators)
        self._controller = ElasticController(
            config.member(), check_peers=config.check_peers, trackers=tuple(trackers)
        )
        self._trained = Distribution(self._controller)
        self._reports: StepReports | None = None
        self._source: BatchSource | None = None
        self._steps = Steps(self._controller, self._trained)
        self._leaving = SessionEnd(
            self._controller, self._trained, lambda: self._source, self.leave
        )
        self._pause = ScriptPause(self._controller)
        self._signal = DrainSignal(self.drain)
        self._process = os.getpid()
        self._held = ExitStack()
        self._series: dict[str, SessionSeries] = {}

    @property
    def _local_rank(self) -> LocalRank:
        config = self._config
        return LocalRank(rank=config.local_rank, world_size=config.local_world_size)

    def __enter__(self) -> Self:
        with ExitStack() as held:
            held.enter_context(own_gpu_used(self._local_rank))
            held.callback(self._steps.release)
            with self._signal.handler_installed():
                self._attend()
            # No effect if `_leaving.end` has left already.
            held.callback(self.leave, reason="left by an error")
            held.push(self._leaving.end)
            held.callback(self._signal.restore)
            self._reports = StepReports(self._controller)
            self._held = held.pop_all()
        return self

    def _attend(self) -> None:
        try:
            self._controller.attend()
        except RefusedError as refusal:
            # The coordinator's answer says all; the frames in between would hide it.
            raise refusal.with_traceback(None) from None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() != self._process:
            # A fork of the script's is not a member of the job.
            return
        self._held.__exit__(kind, error, trace)

    def leave(self, *, reason: str, completed: bool = False) -> None:
        """End the membership; `completed` ends the job for all members. Later calls do nothing."""
        reports, self._reports = self._reports, None
        # Each callback runs, from last to first, even if another one raises.
        with ExitStack() as releases:
            # After a failure other members wait for this member to leave: reports come later.
            if reports is not None and not completed:
                releases.callback(reports.close, completed=False)
            releases.callback(self._controller.leave, completed=completed, reason=reason)
            if reports is not None and completed:
                releases.callback(reports.close, completed=True)
            if self._source is not None:
                releases.callback(self._source.close)
            releases.callback(self._trained.release)

    def drain(self, reason: str) -> None:
        """Ask to leave in good order, as SIGTERM does. Any thread may call this, also within a
        signal handler.

        Returns at once. The members agree on a step at which this member's batches end with
        `shoal.Drained`, a SystemExit with code 143.
        """
        self._leaving.drain(reason)

    # --- calls of the training script ---

    @overload
    def distribute(
        self, model: M, optimizer: Given, strategy: Chosen = ..., **how: Unpack[DistributeKeywords]
    ) -> tuple[M, Given]: ...
    @overload
    def distribute(
        self,
        model: Mapping[str, M],
        optimizer: Given,
        strategy: Chosen = ...,
        **how: Unpack[DistributeKeywords],
    ) -> tuple[dict[str, M], Given]: ...
    @overload
    def distribute(
        self,
        model: Sequence[M],
        optimizer: Given,
        strategy: Chosen = ...,
        **how: Unpack[DistributeKeywords],
    ) -> tuple[list[M], Given]: ...
    def distribute(
        self,
        model: Models,
        optimizer: Optimizers,
        strategy: Chosen = "ddp",
        *,
        checkpoints: Checkpoints | None = None,
        keyed_dropout: bool = True,
        sync_batchnorm: bool = False,
    ) -> tuple[Any, Any]:
        """Return the model and optimizer to train with; they stay valid when members change.

        With `checkpoints`, the state is written to storage every `checkpoints.every_steps` steps,
        and a job in which no member has state resumes from the newest checkpoint. With
        `keyed_dropout`, the masks of Dropout modules under a synchronous strategy depend on seed,
        step and sample, not on the number of members. With `sync_batchnorm`, BatchNorm uses the
        statistics of all members' samples, as torch's SyncBatchNorm modules always do.

        Several models or optimizers are given by name or in lists, and returned in the same form:
        see docs/models.md.

        A compiled Keras model, given with its own optimizer, is trained by `fit`: see
        `shoal.integrations.keras_session`. A model on the meta device is filled by its modules'
        `reset_parameters`.

        Raises UnknownStrategy, InvalidSpec for a second call or one outside the block, or the
        strategy's refusal of the model or optimizer.
        """
        check_entered(self._reports, "session.distribute")
        if self._trained.fields:
            raise InvalidSpec(
                "a session distributes once",
                expected="one distribute(), of several models in a list or by name",
            )
        if isinstance(model, nn.Module) and is_trained_by_fit(model, optimizer):
            rest = {"checkpoints": checkpoints, "keyed_dropout": keyed_dropout}
            rest["sync_batchnorm"] = sync_batchnorm
            return adapter_of(model).distribute_in_session(self, model, strategy, **rest), optimizer
        options = DistributeOptions(
            local_rank=self._local_rank,
            backend=self._config.backend,
            validators=ValidatorSet(validators_of(self._validators), self.member_id),
            checkpoints=checkpoints,
            keyed_dropout=keyed_dropout,
            sync_batchnorm=sync_batchnorm,
            in_step=lambda: self._steps.in_step,
        )
        return self._trained.distribute(model, optimizer, find_strategy(strategy), options)

    def register(self, name: str, stateful: S) -> S:
        """Make the state of a script's object part of the trained state; returns the object, which
        has `state_dict()` and `load_state_dict(state)`, such as a learning rate scheduler. All
        members must register the same objects, before the first batch.

            schedule = session.register("schedule", CosineAnnealingLR(optimizer, 10_000))

        The state is committed with each step, including changes made before the next batch is asked
        for; it is rolled back, sent to members that join, and part of checkpoints. It must be the
        same on all members: RegisteredStateDiffers names a difference.

        `scheduler.step()` and `AveragedModel.update_parameters()` of registered objects, called
        within `session.step()`, run once the optimizer has stepped, if the step is committed.

        Raises InvalidSpec after the first batch, step or read of `rank`, or if the state has values
        that cannot be sent to another member: see docs/loop.md.
        """
        self._trained.register(name, stateful)
        return stateful

    def batches(
        self,
        dataset: Dataset | DataLoader[Any],
        *,
        global_batch_size: int | None = None,
        epochs: int = 1,
        seed: int | None = None,
        shuffle: bool | None = None,
        collate: Collate | None = None,
        **loading: Unpack[LoadingOptions],
    ) -> Batches:
        """Iterate over this member's share of every batch, from the job's present step to its last.

        Train on each share within `session.step()`. A failed step's batch is handed out again,
        divided among the remaining members. Under asynchronous strategies, each member gets whole
        batches of `global_batch_size`.

        Samples are shuffled by default, with seed 0. `loading`: num_workers and other arguments of
        torch's DataLoader. A DataLoader may be given instead of a data set: its settings are the
        defaults, and its batch_size is the global one. Raises InvalidSpec before `distribute`, for
        a second call, and for settings that are missing or out of range. See docs/data.md.
        """
        strategy = self._controller.strategy
        if self._source is not None:
            raise second_loop("session.batches was called twice")
        self._trained.check_model()
        options = BatchOptions.of(
            global_batch_size=global_batch_size,
            epochs=epochs,
            seed=seed,
            shuffle=shuffle,
            collate=collate,
            options=loading,
        )
        loader = options.loader(dataset, together=strategy.synchronous)
        loader.set_wait_callback(self._leaving.check_drain)
        samples = self._trained.note_samples(dataset, lambda: loader.order)
        strategy.trains_on({**samples, "order": loader.order.name}, loader.order)
        kind = SynchronousBatches if strategy.synchronous else LeasedBatches
        self._source = kind(self._controller, self._trained.fields, loader)
        if self._reports is not None:
            self._reports.trains_on(self._source)
        return Batches(self._source)

    def step(self) -> Step:
        """Return one optimizer step, a context: it zeroes gradients at its start; at its end it
        applies them and commits the step.

        The step is rolled back without an error, and `committed` stays False:

        - if a peer is lost in the block, or was lost in a call such as `evaluate` since the batch
          was handed out;
        - if a script has called `stop` before the step;
        - if servers have refused the step's gradients as stale.

        After any other error in the block the member leaves, and the error, or an InvalidSpec that
        explains it, is raised.
        """
        return self._steps.new(
            source=self._source, reports=self._reports, leave=self._leaving.leave_on_error
        )

    def backward(
        self,
        loss: Tensor,
        *,
        weight: float | Tensor | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
    ) -> None:
        """Compute gradients of `loss`, the mean over the samples of the batch, or of a part within
        a loop over `batch.parts`.

        With `weight`, the loss is a mean over `weight` items other than samples, such as tokens,
        and the step's gradients are those of the mean over all such items of the global batch. Give
        a weight for every pass of a step on every member, or for none.

        With several optimizers, `optimizer` is one of them or a list: the loss trains their
        parameters, and gradients of all other parameters stay unchanged. `weight` is refused then.

        Raises InvalidSpec outside a step, for a loss that is not one number with a gradient, and,
        in a member's first 10 steps, for a loss that is recognised as a sum, or as a mean over
        something else.
        """
        self._steps.backward(loss, weight, optimizer)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the rows of all members' shares of the batch, in the order of a single process,
        for losses over pairs of samples. Gradients flow back to the members that computed the rows.

            features = session.gather(model(batch.inputs))
            session.backward(contrastive(features))

        `tensor` has a row for each sample of the share. All members must compute the same loss from
        all rows, or each a mean over its own rows, which begin at `batch.first`, compared with all
        rows. All members must make the same calls in a step, in the same order. See
        docs/contrastive.md.

        Raises InvalidSpec outside a step, in a loop over several `batch.parts`, under strategies
        that gather no rows, and on all members if their tensors do not fit together.
        """
        return self._steps.gather(tensor)

    def update(self, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        """Step one or some of several optimizers now, before the end of the step: later passes of
        the step use the changed weights.

        All members must call it at the same point. If the step fails, the update is undone: a copy
        of the changed tensors is kept until the step ends. Raises InvalidSpec outside a step, and
        if `distribute` got one model and one optimizer, not in lists or by name.
        """
        self._steps.update(optimizer)

    def pause(self, reason: str, *, limit_s: float = PAUSE_S) -> AbstractContextManager[None]:
        """Let the other members wait while this member runs the `with` block, between two steps or
        before the first batch:

            if session.rank == 0:
                with session.pause("validation"):
                    evaluate(model)

        Meanwhile no member is expelled as hung, no collective times out, and members that join or
        leave wait; lost members are detected. After `limit_s` seconds, this member counts as hung:
        the others continue without it, and its next step raises DeadlineExceeded. Several members
        may pause at a time. `shoal why` shows `reason`. Entering the block raises InvalidSpec
        within another pause, without a reason, and unless `limit_s` is above 0 and at most a day.
        """
        check_entered(self._reports, "session.pause")
        return self._pause.hold(reason, limit_s)

    def pause_for_library(self, reason: str) -> AbstractContextManager[None]:
        """Pause for at most a day while another library works, such as Lightning's validation. The
        script may pause around it and within it."""
        return self._pause.hold_for_library(reason)

    def forward_backward(self, batch: Batch, loss_function: LossFunction) -> Tensor:
        """Run the forward and backward pass of a batch in one call: as

            loss = loss_function(model(batch.inputs), batch.targets)
            session.backward(loss)

        but also for strategies with a pipeline, which interleave the two passes. Returns the mean
        loss, detached, over the samples of this member's share or of the part; 0 without samples.
        Raises InvalidSpec outside a step, and with several optimizers.
        """
        return self._steps.forward_backward(batch, loss_function)

    def evaluate(
        self,
        data: Dataset | DataLoader[Any],
        measure: Measure,
        *,
        batch_size: int | None = None,
        collate: Collate | None = None,
        limit_s: float = PAUSE_S,
    ) -> dict[str, Any]:
        """Return sums over all samples of a data set; each member measures its share:

            def measure(batch):
                outputs = model(batch.inputs)
                return {"correct": (outputs.argmax(1) == batch.targets).sum()}

            accuracy = session.evaluate(test_set, measure, batch_size=64)["correct"] / len(test_set)

        All members must call it after the same step. If a member is lost meanwhile, the others
        begin again, with the model of `step_number` at that time. Each member may take `limit_s`
        seconds for its share, as in a `pause`. `batch_size` is per member; a DataLoader gives its
        data set and the default batch size and collate function. Raises what `all_reduce` raises,
        and InvalidSpec without a batch size, or if `measure` does not return sums by name.
        """
        self._steps.check_closed("session.evaluate")
        evaluation = Evaluation(data, measure, batch_size=batch_size, collate=collate)
        return evaluation.run(
            SharedCalls(self._controller, self._trained.fields),
            self._controller.strategy,
            lambda: self._pause.hold_unless_paused("evaluation", limit_s),
        )

    def all_reduce(self, value: Value, op: Reduction = "sum") -> Any:
        """Return the "sum", "mean", "max" or "min" of all members' values: a number, a tensor, or
        several by name. All members must call it after the same step.

        Raises InvalidSpec within a step, before the first batch or step, under asynchronous
        strategies, and on all members if their calls or values differ; StateLost if the script has
        left its loop over the batches, and the members no longer hold the state of the loop's last
        step.
        """
        self._steps.check_closed("session.all_reduce")
        return SharedCalls(self._controller, self._trained.fields).all_reduce(value, op)

    def series(
        self,
        name: str,
        *,
        keep: int = 2,
        copies: int = 2,
        dtype: torch.dtype | None = None,
        tables: bool = False,
    ) -> SessionSeries:
        """Return a series of versions of the model, `JOB/name`, for readers outside of the job,
        such as rollout engines. See docs/weights.md.

            policy = session.series("policy", dtype=torch.bfloat16)
            for batch in session.batches(...):
                with session.step() as step:
                    ...
                if step.committed:
                    policy.publish()

        The newest `keep` versions are kept, each on `copies` parameter servers. Floating point
        values are published in `dtype`, if given. With `tables`, under a strategy that trains
        embedding tables, a version has the tables' rows too, from the same cut. A further call with
        the same name returns the same series. Raises InvalidSpec outside the block, for options out
        of range or other than those of the first call, for `dtype` with `tables`, and in a session
        without a cluster.
        """
        check_entered(self._reports, "session.series")
        options = SeriesOptions(keep=keep, copies=copies, dtype=dtype, tables=tables)
        found = self._series.get(name)
        if found is None:
            fields, check_closed = self._trained.fields, self._steps.check_closed
            found = SessionSeries(self._controller, fields, name, options, check_closed)
            self._held.push(found.end)
            self._series[name] = found
        if found.options != options:
            raise InvalidSpec(
                f"series {name} was created with other options",
                seen=str(options),
                expected=str(found.options),
            )
        return found

    def log(self, values: Mapping[str, Scalar]) -> None:
        """Log numbers by name, `{"loss": loss}`, to the status page, the metrics and the
        `trackers`: once for each step, even if members are lost or join.

        Of the values given within a step, the last of each name is logged, once the step is
        committed. Values given between two steps belong to the step before, unless it has a value
        of that name. All members must call it; one member's values are shown. Within a step, a
        batch or part without samples logs nothing: see `Batch.is_stand_in`. Raises InvalidSpec
        before `distribute`, for a value that is not one number, and for an invalid name.
        """
        in_step, step = self._steps.in_step, self._controller.strategy.step
        counts = not self._steps.in_stand_in
        self._controller.job_log.log(values, step=step, in_step=in_step, counts=counts)

    def stop(self, reason: str) -> None:
        """Finish the job on all members before its samples end: early stopping.

        One member may call it, or several. The job's last step is the one of the call, or, between
        two steps, the last committed one; under local SGD, the last of the round. The batches then
        end on all members. Continue with the loop, or leave it on all members. `reason` is shown,
        up to 200 characters. Raises InvalidSpec without `batches`, and under asynchronous
        strategies.
        """
        stop(self._controller, reason, has_batches=bool(self._source), in_step=self._steps.in_step)

    def clip_grad_norm(
        self, max_norm: float, *, optimizer: Optimizer | Sequence[Optimizer] | None = None
    ) -> Tensor:
        """Scale gradients to a common 2-norm of at most `max_norm`; return the norm before that.

        All members must call it in the step, after the last backward pass. The norm covers the
        gradients of the whole model; with several optimizers, those of the parameters of
        `optimizer`. Raises InvalidSpec outside a step, and if there are several optimizers and
        `optimizer` is not given.
        """
        return self._steps.clip_grad_norm(max_norm, optimizer)

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the whole model's tensors on the host, by the keys of the undistributed model.

        Under strategies that shard parameters, all members must call it after the same step, within
        the `with` block. If a member is lost meanwhile, the others begin again, with the model of
        `step_number` at that time. Raises what `all_reduce` raises under these strategies.
        """
        strategy = self._controller.strategy
        if not strategy.state_is_spread:
            return strategy.state_dict()
        self._steps.check_closed("session.state_dict")
        calls = SharedCalls(self._controller, self._trained.fields)
        return calls.run("session.state_dict", lambda _, __: strategy.state_dict())

    # --- membership and progress ---

    @property
    def job(self) -> str:
        return self._config.job

    @property
    def member_id(self) -> str:
        return self._controller.member.member_id

    @property
    def strategy(self) -> Strategy:
        """Strategy of `distribute`. Raises InvalidSpec before that call."""
        return self._controller.strategy

    @property
    def generation(self) -> int:
        """Number of the present generation; 0 before the first."""
        return self._controller.generation.number if self._controller.generation else 0

    @property
    def rank(self) -> int:
        """Rank of this member in the present generation. If there is none yet, waits until the
        first generation is formed. Raises InvalidSpec, instead of waiting, if `session.batches` was
        not called and no step has begun."""
        return self._present().rank

    @property
    def is_first(self) -> bool:
        """True if this member has rank 0: for work that is done once, such as logging. If that
        member is lost, another gets rank 0. Waits as `rank` does."""
        return self._present().rank == 0

    @property
    def world_size(self) -> int:
        """Number of members in the present generation. Waits as `rank` does."""
        return self._present().world_size

    @property
    def step_number(self) -> int:
        """Number of committed steps; under asynchronous strategies this member's own. Raises
        InvalidSpec before `distribute`."""
        return self._controller.strategy.step

    def _present(self) -> Generation:
        return present(self._controller, self._trained.fields, has_batches=bool(self._source))
