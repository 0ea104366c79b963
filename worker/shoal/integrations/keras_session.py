"""`fit` of a Keras model within a session: elastic, and exact when members join or leave.

    model.compile(optimizer="adam", loss="mse")
    with shoal.join() as session:
        session.distribute(model, model.optimizer, strategy="zero2")
        batches = SessionBatches(model, (x, y), global_batch_size=96, epochs=20)
        model.fit(batches, epochs=batches.epochs)

Each member runs `fit`, and its logs cover its own samples. If a member is lost, steps are trained
again within Keras's current batch, so Keras counts each step of the job once."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import keras
import torch
from torch import nn
from torch.utils.data import DataLoader

from shoal.data.batches import Dataset
from shoal.data.samples import Collate
from shoal.integrations.job_batches import JobBatches
from shoal.integrations.keras import (
    KerasModule,
    refuse_masks,
    refuse_other_means,
    refuse_unbuilt,
)
from shoal.integrations.keras_steps import KerasSteps
from shoal.strategies import find_strategy
from shoal.strategies.base import Strategy
from shoal_proto.errors import InvalidSpec

if TYPE_CHECKING:
    from shoal.session.session import Session

IN_PLACE = frozenset({"ddp", "local-sgd", "diloco"})
"""Strategies that train the Keras model's own weights, not copies."""
_MARK = "shoal_fitting"


class SessionBatches(DataLoader[Any]):
    """Batches for `fit` in a session: this member's part of each step, up to the job's last.

    `model`: a model that the session has distributed; other arguments are those of
    `session.batches`. Pass `epochs=batches.epochs` to `fit`, which runs fewer epochs on a member
    that joined late. Raises InvalidSpec for another model, and what `session.batches` raises.
    """

    def __init__(
        self,
        model: Any,
        dataset: Dataset,
        *,
        global_batch_size: int,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        collate: Collate | None = None,
    ) -> None:
        super().__init__(dataset, batch_size=None)  # type: ignore[arg-type]
        self._fitting = _fitting_of(model)
        self._fitting.batches = self
        self._job = JobBatches(
            self._fitting.session,
            dataset,
            global_batch_size=global_batch_size,
            epochs=epochs,
            seed=seed,
            shuffle=shuffle,
            collate=collate,
        )
        self._present: tuple[Any, ...] | None = None
        self.is_stand_in = False
        """See `Batch.is_stand_in`, of the last batch."""
        self.epochs = epochs
        self.ended = False
        """True once all members have committed the job's last step."""

    def __len__(self) -> int:
        """See `JobBatches.steps_per_epoch`."""
        return self._job.steps_per_epoch

    def __iter__(self) -> Iterator[tuple[Any, ...]]:  # type: ignore[override]
        """Yield batches to the end of the job's epoch, first a batch on which Keras did not train,
        if there is one."""
        while (pair := self._present or self.take()) is not None:
            yield pair
            if self._job.epoch_is_done:
                return

    def take(self) -> tuple[Any, ...] | None:
        """Return this member's part of the next step in Keras's form; None after the last, once the
        Keras model has the trained weights."""
        batch = self._job.take()
        if batch is None:
            self._present = None
            self._fitting.end(first=not self.ended)
            self.ended = True
        else:
            self.is_stand_in = batch.is_stand_in
            self._present = (
                (batch.inputs,) if batch.targets is None else (batch.inputs, batch.targets)
            )
        return self._present

    def attempt(self) -> None:
        """Mark the last batch as trained on."""
        self._present = None

    @property
    def last_is_done(self) -> bool:
        """See `JobBatches.last_is_done`."""
        return self._job.last_is_done


class FittedModule(KerasModule):
    """A Keras model with its loss."""

    def forward(self, *data: Any, **named: Any) -> Any:
        """Return (loss, outputs) for inputs, targets and sample weights."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        model = self.keras_model
        trained, kept = model.trainable_variables, model.non_trainable_variables
        values = [*self._values(trained), *(value.clone() for value in self._values(kept))]
        mapping = zip([*trained, *kept], values, strict=True)
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            options = {"training": self.training} if model._call_has_training_arg else {}
            outputs = model(x, **options)
            refuse_masks(outputs)
            loss = model._compute_loss(
                x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=self.training
            )
        with torch.no_grad():
            for variable, value in zip(kept, self._values(kept), strict=True):
                value.copy_(scope.get_current_value(variable))
            for variable in model.metrics_variables:
                updated = scope.get_current_value(variable)
                if updated is not None:
                    variable.assign(updated)
        return loss, outputs


class KerasFit:
    """A Keras model's training in a session."""

    def __init__(self, session: "Session", module: FittedModule, steps: KerasSteps) -> None:
        self.session = session
        self._module, self._steps = module, steps
        self._model = module.keras_model
        self.trained: nn.Module = module
        self.batches: SessionBatches | None = None
        self.is_in_fit = False
        self._forgotten = False
        self._epoch_is_empty = True

    def train_step(self, data: Any) -> Any:
        """Train the job's next step, and repeat failed or rolled-back steps. Returns Keras's
        logs."""
        batches = self._present_batches()
        if not self._shared and not self._forgotten:
            self._forgotten = True
            self._module.forget_weights()
        target = self.session.step_number + 1
        while True:
            batches.attempt()
            with self.session.step():
                loss, outputs = self.trained(*data)
                self.session.backward(loss)
                if self._steps.max_norm:
                    self.session.clip_grad_norm(self._steps.max_norm)
            if self.session.step_number >= target and not batches.last_is_done:
                break
            repeated = batches.take()
            if repeated is None:
                break
            data = repeated
        if self.session.step_number >= target:
            self._epoch_is_empty = False
        return self._log(data, loss, outputs)

    def _log(self, data: Any, loss: Any, outputs: Any) -> Any:
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with torch.no_grad():
            # Callbacks may require a value: an epoch without samples has that of its stand-ins.
            if self._present_batches().is_stand_in and float(model._loss_tracker.count):
                return model.get_metrics_result()
            count = next(part for part in keras.tree.flatten(x) if part is not None).shape[0]
            model._loss_tracker.update_state(loss.detach(), sample_weight=count)
            return model.compute_metrics(x, y, outputs, sample_weight=sample_weight)

    def end(self, *, first: bool) -> None:
        """End `fit`; at the first call, give the trained weights back to the Keras model."""
        # Keras resets this after a look at the first batch.
        self._model.stop_training = True
        if first:
            self._module.give_back(self.session.state_dict())

    def end_batch(self, run_callbacks: Callable[..., None], number: int, logs: Any = None) -> None:
        """End Keras's batch."""
        run_callbacks(number, logs)
        self._stop_together()

    def end_epoch(self, run_callbacks: Callable[..., None], number: int, logs: Any = None) -> None:
        """End Keras's epoch, without callbacks if the job trained no step in it.

        Members agree on a stop at an epoch's end only when they begin the next step, which Keras
        counts to the next epoch.
        """
        if not self._epoch_is_empty:
            run_callbacks(number, logs)
        self._epoch_is_empty = True
        self._stop_together()

    def _stop_together(self) -> None:
        """End the job on all members if a callback of this one has set `stop_training`. `fit` goes
        on to the agreed end."""
        if self._model.stop_training and not self._present_batches().ended:
            self.session.stop("a Keras callback set stop_training")
            self._model.stop_training = False

    def _present_batches(self) -> SessionBatches:
        if self.batches is None:
            raise InvalidSpec(
                "fit got batches that are not a SessionBatches",
                expected="model.fit(SessionBatches(model, dataset, ...), epochs=...)",
            )
        return self.batches

    @property
    def _shared(self) -> bool:
        return self.session.strategy.name in IN_PLACE

    def validating(self) -> AbstractContextManager[None]:
        """Return a context in which other members wait for this member, if `fit` trains on."""
        if self.is_in_fit and not self._present_batches().ended:
            return self.session.pause_for_library("validation")
        return nullcontext()

    def check_shown(self) -> None:
        """Raise InvalidSpec unless the Keras model has the trained weights."""
        ended = self.batches is not None and self.batches.ended
        if not ended and not self._shared:
            raise InvalidSpec(
                "the Keras model gets the trained weights only when the job is done",
                seen=f"an evaluation within fit under strategy {self.session.strategy.name}",
                expected=", ".join(sorted(IN_PLACE)),
                fix="Evaluate after fit, or leave out validation_data.",
            )


def distribute(session: "Session", model: Any, strategy: str | Strategy, **options: Any) -> Any:
    """Make a compiled Keras model's `fit` train with the session; see the module.

    `options` are those of `Session.distribute`. Raises InvalidSpec for a model that is not built
    and compiled, has constraints or its own `train_step`, or has a loss that is not a mean over
    samples; `fit` raises it for outputs with a mask. Raises InvalidSpec also under a
    strategy whose members do not step together, or that needs both passes in one call, and for
    `sync_batchnorm`. Raises what `KerasSteps` raises.
    """
    chosen = find_strategy(strategy)
    _refuse(model, chosen)
    if options.get("sync_batchnorm"):
        raise InvalidSpec(
            "the BatchNormalization of Keras does not normalise over members",
            seen="sync_batchnorm=True",
            expected="sync_batchnorm=False, or a torch model",
        )
    module = FittedModule(model)
    steps = KerasSteps(model.optimizer, [(v, v.value) for v in model.trainable_variables])
    fitting = KerasFit(session, module, steps)
    fitting.trained, _ = session.distribute(module, steps, chosen, **options)
    model.__dict__[_MARK] = fitting
    _watch_fit()
    bodies = {"train_step": _train_step, "test_step": _test_step, "evaluate": _evaluate}
    for name, body in bodies.items():
        model.__dict__.setdefault(f"shoal_plain_{name}", getattr(model, name))
        model.__dict__[name] = types.MethodType(body, model)
    # Keras builds these again from the new steps.
    model.train_function = model.test_function = None
    return model


def _watch_fit() -> None:
    """Make Keras's `fit` share its callbacks' stops, for models in a session.

    A model's own `fit` may add callbacks before it calls Keras's. Only the first call of this
    function has an effect.
    """
    plain = keras.Model.fit
    if hasattr(plain, _MARK):
        return
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def fit(model: Any, *arguments: Any, **options: Any) -> Any:
        fitting = model.__dict__.get(_MARK)
        if fitting is None:
            return plain(model, *arguments, **options)
        bound = signature.bind(model, *arguments, **options)
        given = bound.arguments
        callbacks = given.get("callbacks")
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = _callback_list(model, fitting.batches, given)
        for name, end in (
            ("on_train_batch_end", fitting.end_batch),
            ("on_epoch_end", fitting.end_epoch),
        ):
            # Not getattr: the script's list may have the methods that an earlier fit has set.
            run_callbacks = types.MethodType(getattr(type(callbacks), name), callbacks)
            setattr(callbacks, name, partial(end, run_callbacks))
        given["callbacks"] = callbacks
        fitting.is_in_fit = True
        try:
            return plain(*bound.args, **bound.kwargs)
        finally:
            fitting.is_in_fit = False

    setattr(fit, _MARK, True)
    keras.Model.fit = fit


def _callback_list(
    model: Any,
    batches: SessionBatches | None,
    options: Mapping[str, Any],
) -> Any:
    """Return a list of callbacks as Keras's `fit` makes it of its options."""
    verbose = options.get("verbose", "auto")
    return keras.callbacks.CallbackList(
        # Keras runs a callback that is in no list in another thread.
        keras.tree.flatten(options.get("callbacks") or []),
        add_history=True,
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=options.get("epochs", 1),
        steps=options.get("steps_per_epoch") or (None if batches is None else len(batches)),
        model=model,
    )


def _train_step(model: Any, data: Any) -> Any:
    return model.__dict__[_MARK].train_step(data)


def _test_step(model: Any, data: Any) -> Any:
    model.__dict__[_MARK].check_shown()
    return model.__dict__["shoal_plain_test_step"](data)


def _evaluate(model: Any, *arguments: Any, **options: Any) -> Any:
    with model.__dict__[_MARK].validating():
        return model.__dict__["shoal_plain_evaluate"](*arguments, **options)


def _fitting_of(model: Any) -> KerasFit:
    fitting = model.__dict__.get(_MARK)
    if not isinstance(fitting, KerasFit):
        raise InvalidSpec(
            "the Keras model is in no session",
            seen=type(model).__name__,
            expected="session.distribute(model, model.optimizer) before its batches",
        )
    return fitting


def _refuse(model: Any, strategy: Strategy) -> None:
    refuse_unbuilt(model)
    refuse_other_means(model)
    if not strategy.synchronous or strategy.name in ("pipeline", "hybrid"):
        raise InvalidSpec(
            "fit needs members that step together, with a forward pass and then a backward pass",
            seen=f"strategy {strategy.name}",
            expected="ddp, zero1, zero2, zero3, fsdp, hsdp, tensor, fsdp-tensor, local-sgd or"
            " diloco",
        )
    if type(model).train_step is not keras.Model.train_step:
        raise InvalidSpec(
            "the model's own train_step cannot run in a session's step",
            seen=f"{type(model).__name__}.train_step",
            expected="keras.Model.train_step; compute_loss may be overridden",
            fix="Train a KerasModule in a loop of your own.",
        )
    bound = [v.path for v in model.trainable_variables if v.constraint is not None]
    if bound:
        raise InvalidSpec(
            "constraints need whole weights, and a member may have only parts of them",
            seen=", ".join(bound[:5]),
            expected="weights without constraints",
        )
