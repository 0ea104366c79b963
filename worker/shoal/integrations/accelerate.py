"""Hugging Face accelerate within a session: elastic, and exact when members join or leave.

    accelerator = SessionAccelerator(session, epochs=EPOCHS)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for epoch in range(EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model(inputs), targets))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

The loop is accelerate's own. The global batch is the batch size of the script's DataLoader times
`gradient_accumulation_steps`, and each member takes its share. If a member is lost, the code within
`accumulate` runs again on the samples of that step."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from shoal.checkpoint.background import Checkpoints
from shoal.data.batches import Batch
from shoal.integrations.job_batches import JobBatches, WholeCollate
from shoal.session.session import Session
from shoal.session.step import Step
from shoal.strategies.base import Strategy
from shoal_proto.errors import InvalidSpec

MAX_NAMES = 4
"""Longest list of parameters in a message."""


class SessionAccelerator(Accelerator):
    """An Accelerator for one member; see the module.

    `prepare` takes the model, the optimizer, the training DataLoader and any schedulers in one
    call. Raises InvalidSpec for float16, several processes of accelerate, a backward pass outside
    of `accumulate`, clipping other than by 2-norm or of a part of the model, `save_state`,
    `load_state`, `no_sync`, and calls that gather values.
    """

    def __init__(
        self,
        session: Session,
        *arguments: Any,
        epochs: int = 1,
        strategy: str | Strategy = "ddp",
        checkpoints: Checkpoints | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        """Pass `arguments` and `options` on to `accelerate.Accelerator`. The other arguments are
        those of `Session.distribute` and `Session.batches`."""
        super().__init__(*arguments, **options)
        if self.mixed_precision == "fp16" or self.num_processes != 1:
            raise InvalidSpec(
                "an accelerator with an option that a session does not support",
                seen=f"mixed_precision={self.mixed_precision!r}, {self.num_processes} processes",
                expected='"bf16" or "no", and one process for each member, under `shoal run`',
            )
        self._session = session
        self._epochs, self._seed = epochs, seed
        self._strategy, self._checkpoints = strategy, checkpoints
        self._steps: AcceleratedSteps | None = None
        self._model = nn.Module()
        """The distributed model; empty before `prepare`."""

    # --- what a script calls ---

    def prepare(self, *given: Any, device_placement: list[bool] | None = None) -> Any:
        """Distribute the given objects, and return them in the same order. Raises InvalidSpec
        unless one model, one optimizer and one DataLoader are given, and in a second call."""
        models = [each for each in given if isinstance(each, nn.Module)]
        optimizers = [each for each in given if isinstance(each, Optimizer)]
        loaders = [each for each in given if isinstance(each, DataLoader)]
        counts = (len(models), len(optimizers), len(loaders))
        if counts != (1, 1, 1) or self._steps is not None:
            raise InvalidSpec(
                "a session prepares one model, optimizer and DataLoader, together",
                seen=f"{counts[0]} models, {counts[1]} optimizers, {counts[2]} DataLoaders"
                + (" in a second call" if self._steps is not None else ""),
                expected="accelerator.prepare(model, optimizer, loader, schedulers...), once",
                fix="A DataLoader for evaluation needs no preparation: session.evaluate(loader,"
                " measure) accepts it unchanged.",
            )
        model = self.prepare_model(models[0], device_placement=None)
        model, optimizer = self._session.distribute(
            model, optimizers[0], self._strategy, checkpoints=self._checkpoints
        )
        self._model = model
        self._steps = AcceleratedSteps(self, self._session, self.gradient_accumulation_steps)
        prepared: dict[int, Any] = {
            id(models[0]): model,
            id(optimizers[0]): PreparedOptimizer(optimizer),
            id(loaders[0]): PreparedLoader(self._steps, loaders[0], self._epochs, self._seed),
        }
        for number, each in enumerate(e for e in given if isinstance(e, LRScheduler)):
            self._session.register(f"accelerate-schedule-{number}", each)
            prepared[id(each)] = PreparedScheduler(each, self._steps)
        result = tuple(prepared.get(id(each), each) for each in given)
        return result if len(result) > 1 else result[0]

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return the context of one part of a step. The last part's end commits the step, or makes
        the loader return its samples again."""
        return self._prepared("accumulate")

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients of `loss`, the mean over this part's samples."""
        self._prepared("backward").check_within("accelerator.backward")
        self._session.backward(loss, **options)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the whole model's gradients to `max_norm` in a step's last part, and return their
        norm. Does nothing in other parts, and returns None. Raises InvalidSpec for a part of the
        trained parameters."""
        if norm_type != 2:
            raise _refused("clip_grad_norm_", f"norm_type={norm_type}", "norm_type=2")
        if not self.sync_gradients:
            return None
        self._check_whole([parameters] if isinstance(parameters, Tensor) else parameters)
        return self._session.clip_grad_norm(max_norm)

    def _check_whole(self, parameters: Iterable[Tensor]) -> None:
        """Refuse some of the trained parameters. Parameters that the script has listed before
        `prepare`, or in an earlier generation, may be other objects."""
        given = {id(each) for each in parameters}
        named = self._model.named_parameters()
        trained = {name: id(each) for name, each in named if each.requires_grad}
        left_out = [name for name, each in trained.items() if each not in given]
        if 0 < len(left_out) < len(trained):
            raise _refused(
                "clip_grad_norm_",
                f"parameters without {', '.join(left_out[:MAX_NAMES])}"
                + (", ..." if len(left_out) > MAX_NAMES else ""),
                "model.parameters(): a session clips the gradients of the whole model",
            )

    @property
    def is_main_process(self) -> bool:
        """True if this member has rank 0, from the first batch on."""
        return self._session.is_first

    @property
    def is_local_main_process(self) -> bool:
        """The same as `is_main_process`: True on one member of the job."""
        return self._session.is_first

    def end_training(self) -> None:
        """Finish the trackers."""
        for tracker in self.trackers:
            tracker.finish()

    def clip_grad_value_(self, *_: Any) -> Any:
        raise _refused("clip_grad_value_", "a value", "clip_grad_norm_")

    def save_state(self, *_: Any, **__: Any) -> Any:
        raise _refused("save_state", "a directory", "SessionAccelerator(checkpoints=...)")

    def load_state(self, *_: Any, **__: Any) -> Any:
        raise _refused("load_state", "a directory", "SessionAccelerator(checkpoints=...)")

    def gather(self, *_: Any) -> Any:
        raise _refused("gather", "a tensor", "session.all_reduce, or session.evaluate")

    def gather_for_metrics(self, *_: Any, **__: Any) -> Any:
        raise _refused("gather_for_metrics", "a tensor", "session.evaluate(loader, measure)")

    def reduce(self, *_: Any, **__: Any) -> Any:
        raise _refused("reduce", "a tensor", "session.all_reduce(value)")

    def no_sync(self, *_: Any) -> Any:
        raise _refused("no_sync", "a model", "gradient_accumulation_steps, with accumulate")

    def _prepared(self, call: str) -> "AcceleratedSteps":
        if self._steps is None:
            raise _refused(call, "no prepared objects", "accelerator.prepare before the call")
        return self._steps


class AcceleratedSteps(AbstractContextManager[None]):
    """Steps of the loop, from the first part of a batch to the last."""

    def __init__(self, accelerator: Accelerator, session: Session, num_parts: int) -> None:
        self._accelerator, self.session, self.num_parts = accelerator, session, num_parts
        self.device = accelerator.device
        self._step: Step | None = None
        self._parts: Iterator[Batch] = iter(())
        self._num_given = 0
        self._is_accumulating = False
        self.committed = False
        """True if the last step was committed; False while a step is open."""

    def begin(self, batch: Batch) -> None:
        """Open the step on a batch."""
        self._step, self.committed = self.session.step(), False
        self._step.__enter__()
        whole = self.num_parts == 1
        self._parts = iter((batch,)) if whole else batch.parts(self.num_parts)
        self._num_given = 0

    def next_part(self) -> Batch | None:
        """Return the next part of the open step; None if no step is open. Raises InvalidSpec if no
        part is left: the script did not train on an earlier batch."""
        if self._step is None:
            return None
        part = next(self._parts, None)
        if part is None:
            raise InvalidSpec(
                "a batch that was not trained on",
                expected="the body of the loop within `with accelerator.accumulate(model):`",
            )
        self._num_given += 1
        self._accelerator.gradient_state._set_sync_gradients(self._num_given == self.num_parts)
        return part

    @property
    def may_count(self) -> bool:
        """True if schedulers may step: in the last part of a step, or between a committed step and
        the next one."""
        return self._num_given == self.num_parts and (self._is_accumulating or self.committed)

    def check_within(self, call: str) -> None:
        if not self._is_accumulating:
            raise _refused(
                call, "a call outside of accumulate", "with accelerator.accumulate(model): ..."
            )

    def __enter__(self) -> None:
        if self._step is None or self._is_accumulating:
            raise _refused("accumulate", "no batch", "a batch of the prepared DataLoader")
        self._is_accumulating = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._is_accumulating = False
        step = self._step
        assert step is not None, "`__enter__` found a step"
        if error is None and self._num_given < self.num_parts:
            return False
        if error is None:
            try:
                next(self._parts, None)
            except BaseException as failure:  # noqa: BLE001 - the step decides if it is raised
                error = failure
        self._step = None
        handled = step.__exit__(type(error) if error else None, error, trace)
        self.committed = step.committed
        if error is not None and not handled and trace is None:
            raise error
        return handled


class PreparedLoader:
    """Loader of this member's shares. Iteration n of the script ends with the job's epoch n, so
    that its number is the epoch also on a member that joins later."""

    def __init__(
        self, steps: AcceleratedSteps, loader: DataLoader[Any], epochs: int, seed: int | None
    ) -> None:
        self._steps, self._epochs = steps, epochs
        self._num_iterations = 0
        self._ahead: Batch | None = None
        if loader.batch_size is None:
            raise InvalidSpec("the DataLoader has no batch_size", expected="batch_size=...")
        self._job = JobBatches(
            steps.session,
            loader,
            global_batch_size=loader.batch_size * steps.num_parts,
            epochs=epochs,
            seed=seed,
            collate=WholeCollate(loader.collate_fn),
        )

    def __len__(self) -> int:
        """Number of parts in an epoch; the loop gets each as a batch."""
        return self._job.steps_per_epoch * self._steps.num_parts

    def __iter__(self) -> Iterator[Any]:
        number = self._num_iterations
        self._num_iterations += 1
        while not self._has_ended(number):
            part = self._steps.next_part()
            if part is not None:
                yield send_to_device(part.inputs["batch"], self._steps.device)
                continue
            batch, self._ahead = self._ahead or self._job.take(), None
            if batch is None:
                return
            # A rollback to an earlier epoch does not end the iteration: the script iterates once
            # per epoch.
            if batch.epoch > number:
                self._ahead = batch
                return
            self._steps.begin(batch)

    def _has_ended(self, number: int) -> bool:
        # A request for the next batch ends the last step, to which the script's changes between two
        # epochs belong. Only after the last epoch does the loader request one: the job is over.
        num_done = self._job.num_epochs_done
        return self._steps.committed and number < num_done < self._epochs


class PreparedOptimizer:
    """Optimizer whose `step` and `zero_grad` do nothing: the session does this work."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:
        """Do nothing: the session steps."""
        if closure is not None:
            raise _refused("optimizer.step", "a closure", "accelerator.backward before the call")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the session zeroes gradients when a step begins."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class PreparedScheduler:
    """Scheduler that steps only in the last part of a step, or after a committed one."""

    def __init__(self, scheduler: LRScheduler, steps: AcceleratedSteps) -> None:
        self.scheduler, self._steps = scheduler, steps

    def step(self, *arguments: Any, **options: Any) -> None:
        if self._steps.may_count:
            self.scheduler.step(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)


def _refused(call: str, seen: str, expected: str) -> InvalidSpec:
    return InvalidSpec(
        f"accelerator.{call} in a session", seen=seen, expected=expected, fix="docs/integrations.md"
    )
