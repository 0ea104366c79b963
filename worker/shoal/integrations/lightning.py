"""Lightning's Trainer within a session: elastic, and exact over all changes.

Scripts that know nothing of Shoal train under `torchrun --rdzv-backend=shoal` without this module;
a lost worker then restarts all of them. Here the process goes on, and repeats one step:

    class Digits(LightningModule):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.layers.parameters())
            self.layers, optimizer = session.distribute(self.layers, optimizer, strategy="ddp")
            return optimizer

    with shoal.join() as session:
        elastic = SessionStrategy(session)
        trainer = Trainer(strategy=elastic, max_epochs=-1, enable_checkpointing=False)
        trainer.fit(Digits(), elastic.batches(dataset, global_batch_size=96, epochs=20))

To Lightning every member trains alone: ranks, logged values and the progress bar are its own.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.optim import Optimizer

from shoal.data.batches import Dataset
from shoal.data.samples import Collate
from shoal.integrations.job_batches import JobBatches
from shoal.session.session import Session
from shoal_proto.errors import InvalidSpec

FORWARD_ALONE = frozenset({"ddp", "zero1", "local-sgd", "diloco"})
"""Strategies under which a member evaluates its model without the others."""


class SessionStrategy(SingleDeviceStrategy):
    """A Lightning strategy for one member; see the module.

    `fit` refuses with InvalidSpec what a session cannot keep exact: manual optimization,
    accumulation of gradients, Lightning's own checkpoints and schedulers, other batches than those
    of `batches`.
    """

    strategy_name = "shoal_session"

    def __init__(self, session: Session, device: str = "cpu") -> None:
        super().__init__(device=device)
        self._session = session
        self._batches: SessionBatches | None = None
        self._again: Any = None
        self._on_sigterm: Any = None

    def batches(
        self,
        dataset: Dataset,
        *,
        global_batch_size: int,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        collate: Collate | None = None,
    ) -> "SessionBatches":
        """What `trainer.fit` trains on: as `session.batches`, each a pair (inputs, targets).

        They say when the training ends, so the Trainer gets `max_epochs=-1`.
        """
        job = JobBatches(
            self._session,
            dataset,
            global_batch_size=global_batch_size,
            epochs=epochs,
            seed=seed,
            shuffle=shuffle,
            collate=collate,
        )
        self._batches = SessionBatches(job)
        return self._batches

    # --- what Lightning calls ---

    def setup_environment(self) -> None:
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        super().setup_environment()

    def on_train_start(self) -> None:
        # Lightning has put a handler of its own in place, which ends the process after its batch;
        # the session's drains it.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)
        super().on_train_start()

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == "fit":
            _refuse(trainer, trainer.lightning_module)
            # Now, when the Trainer has told by its own choice what precision it was asked for.
            self.precision_plugin = _SessionPrecision(self._session)
        super().setup(trainer)
        if trainer.state.fn == "fit":
            self._refuse_distributed(trainer)

    def _refuse_distributed(self, trainer: Trainer) -> None:
        """Raise InvalidSpec for what the module's `configure_optimizers` has brought along."""
        strategy = self._session.strategy
        if not strategy.synchronous:
            raise InvalidSpec(
                "members at their own pace have no epochs in common",
                seen=f"strategy {strategy.name}",
                expected="a synchronous strategy",
            )
        if self.lr_scheduler_configs:
            raise InvalidSpec(
                "Lightning's schedulers count the steps of one member, and not the job's",
                seen=type(self.lr_scheduler_configs[0].scheduler).__name__,
                expected="an optimizer without a scheduler",
                fix="In training_step, set the groups' lr from session.step_number.",
            )
        if trainer.enable_validation and strategy.name not in FORWARD_ALONE:
            raise InvalidSpec(
                "validation within fit is each member's own, and its forward pass is not",
                seen=f"strategy {strategy.name}",
                expected=", ".join(sorted(FORWARD_ALONE)),
                fix="Validate with the whole model, from session.state_dict(), after fit.",
            )

    def training_step(self, batch: Any, *positional: Any, **options: Any) -> Any:
        taken = batch if self._again is None else self._again
        return super().training_step(taken, *positional, **options)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **options: Any,
    ) -> Any:
        """One committed step, however many attempts it takes."""
        batches = self._present_batches()
        self._again = None
        while True:
            with self._session.step() as step:
                result = super().optimizer_step(optimizer, closure, model, **options)
            if step.committed and not batches.last_is_done:
                return result
            # The same step, cut for who is left; or none, when all members have the last one.
            pair = batches.take()
            if pair is None:
                self._trainer().should_stop = True
                return result
            self._again = self.batch_to_device(pair)

    def _present_batches(self) -> "SessionBatches":
        if self._batches is None:
            raise InvalidSpec(
                "the Trainer was given batches of its own",
                expected="trainer.fit(module, strategy.batches(dataset, ...))",
            )
        return self._batches

    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None, "Lightning connects it before it trains"
        return self.lightning_module.trainer


class SessionBatches:
    """Made by `SessionStrategy.batches`. An iteration goes to the end of the job's epoch."""

    def __init__(self, job: JobBatches) -> None:
        self._job = job

    def __len__(self) -> int:
        """Steps of a whole epoch. Without it Lightning would ask for a batch ahead of its step."""
        return self._job.steps_per_epoch

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        while (pair := self.take()) is not None:
            yield pair
            if self._job.epoch_is_done:
                return

    def take(self) -> tuple[Any, Any] | None:
        """This member's part of the job's next step; None after the last."""
        batch = self._job.take()
        return None if batch is None else (batch.inputs, batch.targets)

    @property
    def last_is_done(self) -> bool:
        """Whether this member has committed the job's last step."""
        return self._job.last_is_done


class _SessionPrecision(Precision):
    """Full precision, with what touches gradients left to the session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def backward(self, tensor: Tensor, model: LightningModule, *_: Any, **__: Any) -> None:  # type: ignore[override]
        self._session.backward(tensor)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **_: Any
    ) -> Any:
        # The session applies the gradients itself, when it commits.
        return self._wrap_closure(model, optimizer, closure)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self._session.clip_grad_norm(clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        raise InvalidSpec(
            "a session clips gradients by their common norm only",
            seen='gradient_clip_algorithm="value"',
            expected='"norm"',
        )


def _refuse(trainer: Trainer, module: LightningModule) -> None:
    """Raise InvalidSpec for what a step of a session has no place for."""
    if not module.automatic_optimization:
        raise InvalidSpec(
            "a session's step is Lightning's automatic one",
            seen="automatic_optimization = False",
            expected="True",
            fix="Train in a loop of your own: with session.step(): ...",
        )
    if type(trainer.precision_plugin) not in (Precision, _SessionPrecision):
        raise InvalidSpec(
            "Lightning's precision plug-ins scale and apply gradients themselves",
            seen=f"precision={trainer.precision}",
            expected="precision=32-true",
            fix="Use torch.autocast in training_step.",
        )
    if trainer.accumulate_grad_batches != 1:
        raise InvalidSpec(
            "gradients of several batches are not accumulated in a session",
            seen=f"accumulate_grad_batches={trainer.accumulate_grad_batches}",
            expected="1",
            fix="Raise global_batch_size.",
        )
    if trainer.checkpoint_callbacks:
        raise InvalidSpec(
            "Lightning's checkpoints do not know of the other members",
            seen=type(trainer.checkpoint_callbacks[0]).__name__,
            expected="enable_checkpointing=False",
            fix="Pass checkpoints=shoal.Checkpoints(...) to session.distribute.",
        )
