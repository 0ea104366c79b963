"""Lightning's Trainer within a session: elastic, and exact when members join or leave.

Under `torchrun --rdzv-backend=shoal` the loss of a worker restarts all workers. With this module
the other workers keep running, and repeat one step:

    class Digits(LightningModule):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.layers.parameters())
            self.layers, optimizer = session.distribute(self.layers, optimizer, strategy="ddp")
            return optimizer

    with shoal.join() as session:
        elastic = SessionStrategy(session)
        trainer = Trainer(strategy=elastic, max_epochs=20, enable_checkpointing=False)
        trainer.fit(Digits(), elastic.batches(dataset, global_batch_size=96))

Every member counts the job's epochs and steps. Ranks, logged values and the progress bar are the
member's own."""

import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Unpack

import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, default_collate
from torchmetrics import Metric

from shoal.data.batch_options import LoadingOptions
from shoal.data.batches import Dataset
from shoal.data.samples import Collate
from shoal.integrations.agreed_stopping import AgreedCheckpoints, AgreedStopping, link_on_rank_0
from shoal.integrations.job_batches import JobBatches, WholeCollate
from shoal.integrations.lightning_batches import LightningBatches
from shoal.integrations.trainer_limits import refuse_parts_of_epochs
from shoal.integrations.trainer_loops import AgreedEnd, PausedValidation
from shoal.session.session import Session
from shoal.strategies import FORWARD_ALONE
from shoal_proto.errors import InvalidSpec

OWN_REPLICAS = frozenset({"local-sgd", "diloco"})
"""Strategies with a copy of the model per member between outer steps."""

OF_ONE_MEMBER = tuple(
    getattr(callbacks, name)
    for name in (
        "BaseFinetuning",
        "BatchSizeFinder",
        "LearningRateFinder",
        "ModelPruning",
        "StochasticWeightAveraging",
        "WeightAveraging",
    )
    if hasattr(callbacks, name)  # the oldest release lacks the last one
)
"""Callbacks that keep weights or trials, which a member that joins would lack."""


class SessionStrategy(SingleDeviceStrategy):
    """A Lightning strategy for one member; see the module.

    Schedulers step with the job, `accumulate_grad_batches` is the number of parts of each batch,
    and `precision="bf16-mixed"` is autocast. `fit` raises InvalidSpec for features that a session
    cannot keep exact, among them manual optimization, checkpoints of more than weights, schedulers
    that follow a metric, and batches that are not from `batches`.
    """

    strategy_name = "shoal_session"

    def __init__(self, session: Session, device: str = "cpu") -> None:
        super().__init__(device=device)
        self._session = session
        self._batches: LightningBatches | None = None
        self._replacement: Any = None
        self._on_sigterm: Any = None
        self._num_parts = 1
        self._schedules: list[LRSchedulerConfig] = []

    def batches(
        self,
        dataset: Dataset | DataLoader[Any],
        *,
        global_batch_size: int | None = None,
        epochs: int | None = None,
        seed: int | None = None,
        shuffle: bool | None = None,
        collate: Collate | None = None,
        **loading: Unpack[LoadingOptions],
    ) -> LightningBatches:
        """Return the batches of `session.batches` in a DataLoader's form, for `trainer.fit`.

        Without `epochs`, the Trainer's `max_epochs` or `max_steps` define the end; if it has no
        limit, `fit` raises InvalidSpec. Raises InvalidSpec for arguments that `session.batches`
        would refuse.
        """

        def job(epochs: int, collate: Collate | None) -> JobBatches:
            return JobBatches(
                self._session,
                dataset,
                global_batch_size=global_batch_size,
                epochs=epochs,
                seed=seed,
                shuffle=shuffle,
                collate=collate,
                **loading,
            )

        own = dataset.collate_fn if isinstance(dataset, DataLoader) else None
        given = collate or loading.get("collate_fn") or own or default_collate
        self._batches = LightningBatches(job, epochs, collate, WholeCollate(given))
        return self._batches

    # --- what Lightning calls ---

    def setup_environment(self) -> None:
        trainer = self._trainer()
        if trainer.state.fn == "fit":
            _refuse_callbacks(trainer)  # before they copy the module
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        super().setup_environment()

    def on_train_start(self) -> None:
        # Lightning's handler ends the process; the session's drains the member.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)
        super().on_train_start()
        trainer, batches = self._trainer(), self._present_batches()
        if trainer.train_dataloader is not batches:
            raise _other_batches()
        batches.begin(trainer)

    def on_train_end(self) -> None:
        """End the job if a callback stopped the Trainer early."""
        super().on_train_end()
        batches, trainer = self._present_batches(), self._trainer()
        if batches.is_over:
            return
        self._session.stop("Lightning stopped the training")
        # Other members may not know of the stop yet: begin a further step, which is not committed.
        batch = batches.take()
        if batch is not None:
            batch = self.batch_to_device(batch)
            trainer._logger_connector.on_batch_start(batch)
            loop = trainer.fit_loop.epoch_loop
            given = loop._build_kwargs(OrderedDict(), batch, loop.batch_idx)
            loop.automatic_optimization.run(self.optimizers[0], loop.batch_idx, given)
        batches.end()

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == "fit":
            _refuse(trainer, trainer.lightning_module)
            refuse_parts_of_epochs(trainer)
            # Not earlier: the Trainer's plug-in shows the requested precision.
            mixed = isinstance(trainer.precision_plugin, MixedPrecision)
            dtype = torch.bfloat16 if mixed else None
            self.precision_plugin = _SessionPrecision(
                self._session, self._take_parts, (self.root_device.type, dtype)
            )
            # Lightning counts each batch as a step; the session trains parts.
            self._num_parts, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, 1
            if self._batches is None:
                trainer.fit_loop.setup_data()  # train_dataloader() may call `batches`
            # Before the script makes its schedules, as it asks the Trainer for their length.
            trainer.fit_loop.max_epochs = self._present_batches().decide(trainer)
        super().setup(trainer)
        if trainer.state.fn == "fit":
            self._refuse_distributed(trainer)
            if self._session.strategy.name not in {"ddp", *OWN_REPLICAS}:
                trainer.num_sanity_val_steps = 0  # no weights before the first batch
            self._take_schedules()
            agreed = self._take_stopping(trainer)
            self._take_checkpoints(trainer)
            AgreedEnd(self._session, trainer, self._present_batches(), agreed)
            if trainer.enable_validation:
                PausedValidation(self._session, trainer)
            _turn_off_gathering(self.lightning_module)

    def _take_stopping(self, trainer: Trainer) -> list[AgreedStopping]:
        """Make members agree on the end of the job."""
        found = [AgreedStopping(each, self._session) for each in trainer.early_stopping_callbacks]
        for number, each in enumerate(found):
            self._session.register(f"lightning-early-stopping-{number}", each)
        return found

    def _take_checkpoints(self, trainer: Trainer) -> None:
        """Make members agree on checkpoints, except those that follow a member's own clock. Under
        strategies of `OWN_REPLICAS` no checkpoint follows a metric; there only rank 0 checks if a
        file exists, as another member may find the file that rank 0 has just written."""
        if self._session.strategy.name in OWN_REPLICAS:
            for each in trainer.checkpoint_callbacks:
                if isinstance(each, ModelCheckpoint):
                    vars(each)["file_exists"] = partial(self._exists_on_rank_0, each.file_exists)
                    link_on_rank_0(each, self._session)
            return
        for number, each in enumerate(trainer.checkpoint_callbacks):
            if isinstance(each, ModelCheckpoint) and each._train_time_interval is None:
                kept = AgreedCheckpoints(each, self._session)
                self._session.register(f"lightning-checkpoints-{number}", kept)

    def _exists_on_rank_0(self, exists: Callable[..., bool], path: Any, trainer: Any) -> bool:
        return self._session.is_first and exists(path, trainer)

    def _refuse_distributed(self, trainer: Trainer) -> None:
        strategy = self._session.strategy
        if not strategy.synchronous:
            raise InvalidSpec(
                "members at their own pace have no epochs in common",
                seen=f"strategy {strategy.name}",
                expected="a synchronous strategy",
            )
        for config in self.lr_scheduler_configs:
            if config.reduce_on_plateau:
                raise InvalidSpec(
                    "a scheduler that follows a metric, which differs between members",
                    seen=type(config.scheduler).__name__,
                    expected="a scheduler that counts steps or epochs",
                )
        if strategy.name in OWN_REPLICAS:
            _refuse_monitors(trainer, strategy.name)
        checkpoints = trainer.checkpoint_callbacks
        if checkpoints and strategy.name not in FORWARD_ALONE:
            raise InvalidSpec(
                "Lightning's checkpoints hold one member's weights, which are not the whole model",
                seen=f"{type(checkpoints[0]).__name__} under strategy {strategy.name}",
                expected=", ".join(sorted(FORWARD_ALONE)),
                fix="Pass checkpoints=shoal.Checkpoints(...) to session.distribute.",
            )
        if trainer.enable_validation and strategy.name not in FORWARD_ALONE:
            raise InvalidSpec(
                "each member validates by itself in fit, but a forward pass needs all members",
                seen=f"strategy {strategy.name}",
                expected=", ".join(sorted(FORWARD_ALONE)),
                fix="Validate with the whole model, from session.state_dict(), after fit.",
            )

    def _take_schedules(self) -> None:
        """Take over Lightning's schedulers, which would count this member's own steps."""
        for number, config in enumerate(self.lr_scheduler_configs):
            self._session.register(f"lightning-schedule-{number}", config.scheduler)
        self._schedules, self.lr_scheduler_configs = self.lr_scheduler_configs, []

    def _step_schedules(self) -> None:
        batches, module = self._present_batches(), self.lightning_module
        assert module is not None, "Lightning connects it before it trains"
        for config in self._schedules:
            count = self._session.step_number
            if config.interval == "epoch":
                if not batches.epoch_is_done:
                    continue
                count = batches.num_epochs_done
            if count % config.frequency == 0:
                module.lr_scheduler_step(config.scheduler, None)

    def _take_parts(self, closure: Callable[[], Any]) -> Any:
        batches = self._present_batches()
        if self._num_parts == 1:
            with self._logging(is_stand_in=batches.is_stand_in):
                return closure()
        if not isinstance(closure, Closure):
            raise InvalidSpec(
                "accumulate_grad_batches does not work with a module that overrides optimizer_step"
                " and passes a closure of its own",
                seen=type(closure).__name__,
                expected="the optimizer_step inherited from LightningModule",
            )
        # The session zeroes gradients when the step begins.
        closure._zero_grad_fn = None
        result = None
        for part, is_stand_in in batches.parts(self._num_parts):
            self._replacement = self.batch_to_device(part)
            with self._logging(is_stand_in=is_stand_in):
                of_part = closure()
            if result is None or not is_stand_in:
                result = of_part
        return result

    @contextmanager
    def _logging(self, *, is_stand_in: bool) -> Iterator[None]:
        """Return a context in which values that the module logs for a stand-in are dropped.

        They are kept if there is no other value in this epoch: callbacks may require one.
        """
        loop = self._trainer().fit_loop.epoch_loop
        kept = loop._results
        if not is_stand_in or next(iter(kept.valid_items()), None) is None:
            yield
            return
        loop._results = _ResultCollection(training=True)
        loop._results.batch, loop._results.batch_size = kept.batch, kept.batch_size
        try:
            yield
        finally:
            loop._results = kept

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write the checkpoint on rank 0, while the other members wait."""
        if self._session.is_first:
            # A member that has raised leaves: other members must not wait for it.
            has_raised = sys.exception() is not None
            pause = self._session.pause_for_library("saving a checkpoint")
            with nullcontext() if has_raised else pause:
                super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self._session.is_first:
            super().remove_checkpoint(filepath)

    def training_step(self, batch: Any, *positional: Any, **options: Any) -> Any:
        if self._replacement is None:
            return super().training_step(batch, *positional, **options)
        if positional:
            index = self._trainer().fit_loop.epoch_loop.batch_idx
            positional = (index, *positional[1:])
        return super().training_step(self._replacement, *positional, **options)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **options: Any,
    ) -> Any:
        """Commit one step, repeating failed attempts. After the job's last step, wait for the other
        members."""
        batches, max_steps = self._present_batches(), self._trainer().max_steps
        self._replacement = result = None
        while True:
            with self._session.step() as step:
                if self._session.step_number + 1 == max_steps and not batches.is_last:
                    self._session.stop(f"max_steps={max_steps}")
                result = super().optimizer_step(optimizer, closure, model, **options)
            if step.committed:
                self._step_schedules()
                if not batches.last_is_done and self._session.step_number != max_steps:
                    return result
            repeated = batches.next_batch()
            if repeated is None:
                self._trainer().should_stop = True
                if not step.committed:
                    batches.discard_step()
                return result
            self._replacement = self.batch_to_device(repeated)

    def _present_batches(self) -> LightningBatches:
        if self._batches is None:
            raise _other_batches()
        return self._batches

    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None, "Lightning connects it before it trains"
        return self.lightning_module.trainer


class _SessionPrecision(Precision):
    """Full precision, or autocast. The session handles gradients."""

    def __init__(
        self,
        session: Session,
        take_parts: Callable[[Callable[[], Any]], Any],
        cast: tuple[str, torch.dtype | None],
    ) -> None:
        """`cast`: device type, and dtype of autocast; None: full precision."""
        self._session, self._take_parts = session, take_parts
        self._device, self._dtype = cast

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        if self._dtype is None:
            yield
            return
        with torch.autocast(self._device, dtype=self._dtype, cache_enabled=False):
            yield

    def backward(self, tensor: Tensor, model: LightningModule, *_: Any, **__: Any) -> None:  # type: ignore[override]
        self._session.backward(tensor)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **_: Any
    ) -> Any:
        return self._wrap_closure(model, optimizer, partial(self._take_parts, closure))

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self._session.clip_grad_norm(clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        raise InvalidSpec(
            "a session clips gradients by their common norm only",
            seen='gradient_clip_algorithm="value"',
            expected='"norm"',
        )


def _refuse(trainer: Trainer, module: LightningModule) -> None:
    if not module.automatic_optimization:
        raise InvalidSpec(
            "a session needs Lightning's automatic optimization",
            seen="automatic_optimization = False",
            expected="True",
            fix="Train in a loop of your own: with session.step(): ... For several optimizers see"
            " 'Several models and optimizers' in docs/models.md.",
        )
    plugin = trainer.precision_plugin
    is_bf16 = type(plugin) is MixedPrecision and plugin.scaler is None
    if type(plugin) not in (Precision, _SessionPrecision) and not is_bf16:
        raise InvalidSpec(
            "Lightning's precision plug-ins scale and apply gradients themselves",
            seen=f"precision={trainer.precision}",
            expected="precision=32-true or bf16-mixed",
            fix="Use torch.autocast in training_step.",
        )
    schedules = [
        c for c in getattr(trainer, "callbacks", ()) if isinstance(c, GradientAccumulationScheduler)
    ]
    if schedules:
        raise InvalidSpec(
            "the number of parts of a batch cannot change from epoch to epoch",
            seen=type(schedules[0]).__name__,
            expected="accumulate_grad_batches, a number",
        )
    for callback in trainer.checkpoint_callbacks:
        if not getattr(callback, "save_weights_only", False):
            raise InvalidSpec(
                "Lightning's checkpoints hold the state of one member only",
                seen=f"{type(callback).__name__} of more than weights",
                expected="enable_checkpointing=False, or ModelCheckpoint(save_weights_only=True)",
                fix="To resume after the loss of all members, pass"
                " checkpoints=shoal.Checkpoints(...) to session.distribute.",
            )
    if trainer.ckpt_path is not None:
        raise InvalidSpec(
            "resuming from a checkpoint of Lightning",
            seen=f"ckpt_path={trainer.ckpt_path!r}",
            expected="shoal.Checkpoints, from which a job resumes by itself",
        )


def _turn_off_gathering(module: LightningModule | None) -> None:
    """Turn off the metrics' own gathering: it would fail on all members if one is lost."""
    assert module is not None, "Lightning connects it before it trains"
    for part in module.modules():
        if isinstance(part, Metric):
            part.sync_on_compute = False


def _refuse_monitors(trainer: Trainer, strategy: str) -> None:
    for each in (*trainer.early_stopping_callbacks, *trainer.checkpoint_callbacks):
        monitor = getattr(each, "monitor", None)
        if monitor is not None:
            raise InvalidSpec(
                "a callback that follows a metric, whose record a member that joins would lack",
                seen=f"{type(each).__name__}(monitor={monitor!r}) under strategy {strategy}",
                expected="ModelCheckpoint without monitor, and no EarlyStopping",
                fix="Decide in a hook by session.all_reduce, and call session.stop.",
            )


def _refuse_callbacks(trainer: Trainer) -> None:
    for callback in getattr(trainer, "callbacks", ()):
        if isinstance(callback, OF_ONE_MEMBER):
            raise InvalidSpec(
                "a callback that trains or keeps weights for this member alone",
                seen=type(callback).__name__,
                expected="a Trainer without it",
                fix="For an average of the weights, use session.register:"
                " docs/loop.md#state-of-the-scripts-own.",
            )


def _other_batches() -> InvalidSpec:
    return InvalidSpec(
        "the Trainer got batches that are not from SessionStrategy.batches",
        seen="a DataLoader of the script's own, a datamodule, or train_dataloader()",
        expected="trainer.fit(module, strategy.batches(dataset, ...))",
        fix="You may pass a DataLoader as `dataset`; its batch_size is then the global batch size."
        " For a datamodule, call datamodule.setup('fit'), then trainer.fit(module,"
        " strategy.batches(datamodule.train_dataloader()), datamodule.val_dataloader()).",
    )
