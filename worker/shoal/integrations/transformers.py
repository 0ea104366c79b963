"""Hugging Face's Trainer within a session: elastic, and exact when members join or leave.

    with shoal.join() as session:
        trainer = SessionTrainer(session, model=model, args=args, train_dataset=dataset)
        trainer.train()

The job trains as one process would with these arguments: its global batch has
`per_device_train_batch_size` times `gradient_accumulation_steps` samples, and each member takes a
share. When a member is lost, Trainer's loop continues from the job's current step."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerControl
from transformers.trainer_utils import EvalLoopOutput

from shoal.checkpoint.background import Checkpoints
from shoal.integrations.job_batches import WholeCollate
from shoal.integrations.trainer_steps import (
    CountedSmoother,
    EpochLength,
    NamedCollate,
    SessionOptimizer,
    SizedCollate,
    StepRetaken,
    TrainerSteps,
    WholeBatches,
    refused,
)
from shoal.session.session import Session
from shoal.strategies import FORWARD_ALONE
from shoal.strategies.base import Strategy

MAX_STEPS_BACK = 256
"""Number of steps for which losses are kept for a rollback."""


class SessionTrainer(Trainer):
    """A Trainer for one member; see the module.

    Schedulers, callbacks that export their state, clipping, bfloat16 and evaluation work for the
    whole job. Raises InvalidSpec for what a session does not support, such as float16, Trainer's
    own checkpoints (`checkpoints=` writes the session's), FSDP and DeepSpeed, grouping by length,
    and callbacks that end an epoch early.
    """

    model: Any
    optimizer: Any
    control: Any
    label_smoother: Any
    _globalstep_last_logged: int

    def __init__(
        self,
        session: Session,
        *arguments: Any,
        strategy: str | Strategy = "ddp",
        checkpoints: Checkpoints | None = None,
        **options: Any,
    ) -> None:
        """Pass `arguments` and `options` on to `transformers.Trainer`; `strategy` and `checkpoints`
        to `Session.distribute`."""
        self._session = session
        self._strategy, self._checkpoints = strategy, checkpoints
        self._steps: TrainerSteps | None = None
        self._samples: DataLoader[Any] | None = None
        self._counted: dict[int, Tensor] = {}
        """Sum of losses since the last log, before each step that may be repeated."""
        self._shares_stop = False
        """True from the start of a step until its callbacks have run."""
        super().__init__(*arguments, **options)
        _refuse(self)
        self.add_callback(_Position(self))
        if (smoother := self.label_smoother) is not None:
            self.label_smoother = CountedSmoother(smoother.epsilon, smoother.ignore_index)

    # --- what a script calls ---

    def train(self, resume_from_checkpoint: Any = None, *positional: Any, **options: Any) -> Any:
        """Train as Trainer does. A member that joins later begins at the job's current step."""
        if resume_from_checkpoint:
            raise refused(
                "resuming from a checkpoint of Trainer",
                f"resume_from_checkpoint={resume_from_checkpoint!r}",
                "SessionTrainer(checkpoints=shoal.Checkpoints(...)), from which a job resumes",
            )
        return super().train(None, *positional, **options)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model on rank 0; all members must call this. Before the training, each
        member writes its own model."""
        if self._steps is None:
            super().save_model(output_dir, _internal_call)
            return
        state = dict(self._session.state_dict())
        if self._session.is_first:
            with self._session.pause_for_library("saving the model"):
                self._save(output_dir, state_dict=state)

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        """Refuse: a session trains one job."""
        raise refused("a search over trainings", "hyperparameter_search", "a job for each training")

    def is_world_process_zero(self) -> bool:
        """True if this member has rank 0; before the training, True on all members."""
        return self._session.is_first if self._steps is not None else True

    # --- what Trainer calls ---

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # Trainer's `training_step` calls this with the loss.
        self.accelerator.backward = self._backward

    def get_train_dataloader(self) -> "EpochLength":
        """Return the length of an epoch. The session takes samples from Trainer's loader."""
        self._samples = super().get_train_dataloader()
        return EpochLength(self._samples, self.args)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if self._samples is None:
            raise refused(
                "a get_train_dataloader of the script's own",
                f"{type(self).__name__}.get_train_dataloader",
                "train_dataset and data_collator; the session divides each batch among members",
            )
        session = self._session
        self.create_optimizer()
        makes_schedule = self.lr_scheduler is None
        self.create_scheduler(num_training_steps=max_steps)
        session.register("transformers-schedule", self.lr_scheduler)
        session.register("transformers-trainer", TrainerCounts(self))
        model, optimizer = session.distribute(
            self.model, self.optimizer, self._strategy, checkpoints=self._checkpoints
        )
        self.model = self.model_wrapped = model
        # Else Trainer's evaluation would prepare a model.
        self.accelerator._models.append(model)
        self._steps = TrainerSteps(session, self._batches(num_train_epochs))
        self.optimizer = SessionOptimizer(optimizer, self._commit)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.state.global_step = self._steps.position()
        self._adapt_length(makes_schedule=makes_schedule)
        return self._steps.order.epoch_and_batch_index(self.state.global_step)[0], 0

    def _adapt_length(self, *, makes_schedule: bool) -> None:
        """Adapt the number of steps, and Trainer's schedule, to a checkpoint of another batch
        size."""
        order, state = self._present().order, self.state
        if self.args.max_steps > 0:
            if order.num_steps < state.max_steps:
                raise refused(
                    "max_steps needs more epochs than planned: earlier batches were larger",
                    f"max_steps={state.max_steps}, and samples for {order.num_steps} steps in"
                    f" {state.num_train_epochs} epochs of this batch size",
                    "num_train_epochs without max_steps, or the checkpoint's batch size",
                )
            return
        state.max_steps -= order.num_steps_more
        schedule = self.lr_scheduler
        if makes_schedule and order.num_steps_more and isinstance(schedule, LambdaLR):
            # Only a partial depends on the length. Another partial replaces it: members compare the
            # kinds of a schedule's functions.
            schedule.lr_lambdas = [
                partial(_rate_of_later_step, each, order.num_steps_more)
                if isinstance(each, partial)
                else each
                for each in schedule.lr_lambdas
            ]

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> tuple[nn.Module, Any]:
        """Return the model, which `_init_training_state` has distributed, and the given loader."""
        self.callback_handler.train_dataloader = train_dataloader
        return self.model_wrapped, train_dataloader

    def _batches(self, num_epochs: int) -> Any:
        args, samples = self.args, self._samples
        assert samples is not None, "made for the training"
        num_workers = args.dataloader_num_workers
        loading = {
            "prefetch_factor": args.dataloader_prefetch_factor,
            "persistent_workers": args.dataloader_persistent_workers,
        }
        return self._session.batches(
            samples.dataset,
            global_batch_size=self._train_batch_size * args.gradient_accumulation_steps,
            epochs=num_epochs,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.train_sampling_strategy != "sequential",
            collate=WholeCollate(NamedCollate(samples.collate_fn)),
            drop_last=args.dataloader_drop_last,
            num_workers=num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            **({k: v for k, v in loading.items() if v is not None} if num_workers else {}),
        )

    def _run_epoch(self, *, epoch: int, num_update_steps_per_epoch: int, **rest: Any) -> None:
        """Run Trainer's loop over an epoch, again from the job's current step if a member is
        lost."""
        steps, control, number = self._present(), self.control, epoch
        while True:
            try:
                while number <= epoch and not control.should_training_stop:
                    reached, taken = steps.order.epoch_and_batch_index(self.state.global_step)
                    steps.skip = taken + (reached - number) * num_update_steps_per_epoch
                    super()._run_epoch(
                        epoch=number,
                        num_update_steps_per_epoch=num_update_steps_per_epoch,
                        **rest,
                    )
                    control, number = self.control, number + 1
                if control.should_training_stop or number == self.state.num_train_epochs:
                    self._end_job()
                return
            except StepRetaken:
                self._restore_position()
                control = self.control
                number, taken = steps.order.epoch_and_batch_index(self.state.global_step)
                if steps.is_over and taken:
                    self._end_short_epoch(number, rest)
                elif number <= epoch and not steps.is_over:
                    self.control = control = self.callback_handler.on_epoch_begin(
                        self.args, self.state, control
                    )

    def _end_short_epoch(self, epoch: int, rest: Mapping[str, Any]) -> None:
        """End the epoch within which the job was stopped, as Trainer's loop does."""
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        self._maybe_log_save_evaluate(
            self._tr_loss,
            None,
            rest["model"],
            rest["trial"],
            epoch,
            rest["ignore_keys_for_eval"],
            rest["start_time"],
        )
        self.control.should_training_stop = True

    def _maybe_log_save_evaluate(self, *positional: Any, **options: Any) -> None:
        """Log and evaluate. If this member's callbacks stop the training within an epoch, continue
        until all members stop: the epoch's end may be an evaluation, a shared call."""
        super()._maybe_log_save_evaluate(*positional, **options)
        shares, self._shares_stop = self._shares_stop, False
        if shares and self.control.should_training_stop and not self._present().is_done:
            self._session.stop("Trainer's callbacks stopped the training")
            self.control.should_training_stop = False

    def _restore_position(self) -> None:
        steps, state = self._present(), self.state
        state.global_step = steps.position()
        self.control.should_training_stop = steps.is_over
        if (counted := self._counted.get(state.global_step)) is not None:
            self._tr_loss.copy_(counted)
        if state.global_step < self._globalstep_last_logged:
            self._globalstep_last_logged = state.global_step
            self._tr_loss.zero_()

    def _end_job(self) -> None:
        """Wait until all members have ended. Raises StepRetaken if steps must be repeated."""
        steps = self._present()
        if not steps.is_done:
            # A callback asked to stop. All members begin one more step, which is not committed.
            self._session.stop("Trainer's callbacks stopped the training")
            num_parts = self.args.gradient_accumulation_steps
            try:
                if steps.begin(num_parts, steps.position()):
                    for _ in range(num_parts):
                        self.training_step(self.model_wrapped, {})
                    steps.commit()
            except StepRetaken:
                pass
        steps.finish()

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """Begin the job's next step, and return an empty dict for each part, which `training_step`
        fills. Returns no dict for a committed step, and after the last step."""
        steps = self._present()
        if steps.skip > 0:
            steps.skip -= 1
            return [], None
        if not steps.begin(num_batches, self.state.global_step):
            self.control.should_training_stop = True
            return [], None
        self._shares_stop = True
        first = self._session.is_first
        self.state.is_world_process_zero = self.state.is_local_process_zero = first
        self._counted[self.state.global_step] = self._tr_loss.clone()
        while len(self._counted) > MAX_STEPS_BACK:
            del self._counted[min(self._counted)]
        if self.state.global_step + 1 == self.state.max_steps:
            steps.stop_after_step("Trainer's max_steps or num_train_epochs is reached")
        return [{} for _ in range(num_batches)], None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run one part's forward and backward pass. Returns its loss times its share of this
        member's samples or items."""
        steps = self._present()
        # Each part's loss is a mean, which the session weights over all members.
        self.current_gradient_accumulation_steps = 1
        with steps.watching():
            part, whole = steps.next_part()
            inputs.update(part.inputs["batch"])
            items = self._get_num_items_in_batch([inputs], self.args.device)
            self._check_normalised(items)
            if items is None or self.loss_is_scaled_for_ga is False:
                items = None
            steps.weight = None if items is None else float(items)
            loss = super().training_step(model, inputs, items)
            share = len(part.indices) / max(len(whole.indices), 1)
            if items is not None and part is not whole and part.indices:
                total = self._get_num_items_in_batch([whole.inputs["batch"]], self.args.device)
                share = float(items) / max(float(total), 1.0)
        return loss * share if share else torch.zeros_like(loss)

    def _check_normalised(self, items: Any) -> None:
        """Raise InvalidSpec for a script's `compute_loss` that does not say if the loss is divided
        by `num_items_in_batch`."""
        own = type(self).compute_loss is not Trainer.compute_loss
        if own and items is not None and self.loss_is_scaled_for_ga is None:
            raise refused(
                "the script's own compute_loss, which does not say what its loss is a mean over",
                f"{type(self).__name__}.compute_loss without loss_is_scaled_for_ga",
                "loss_is_scaled_for_ga = True if the loss is divided by num_items_in_batch, and"
                " False if it is a mean over samples",
            )

    def _backward(self, loss: Tensor, **_: Any) -> None:
        weight = self._present().weight
        if weight is None and isinstance(self.label_smoother, CountedSmoother):
            weight = self.label_smoother.weight(self.args.gradient_accumulation_steps)
        self._session.backward(loss, weight=weight)

    def compute_loss_context_manager(self) -> ExitStack:
        """Return Trainer's context, with the arguments' autocast."""
        stack: ExitStack = super().compute_loss_context_manager()
        if self.args.bf16:
            stack.enter_context(torch.autocast(self.args.device.type, dtype=torch.bfloat16))
        return stack

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        with self._present().watching():
            return self._session.clip_grad_norm(float(self.args.max_grad_norm))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is not None:
            return grad_norm
        with self._present().watching():
            return self._session.clip_grad_norm(float("inf"))

    def _commit(self) -> None:
        self._present().commit()

    # --- evaluation ---

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate; before the training, as Trainer does.

        For the loss alone, each member measures its share of the samples. Otherwise each member
        predicts all samples; raises InvalidSpec for a strategy that is not in FORWARD_ALONE.
        """
        if self._steps is None:
            return super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        only_loss = (
            self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        )
        if only_loss:
            return self._measured(dataloader, metric_key_prefix)
        strategy = self._session.strategy
        if strategy.name not in FORWARD_ALONE:
            raise refused(
                "each member predicts by itself, but a forward pass needs all members",
                f"compute_metrics or predict under strategy {strategy.name}",
                f"{', '.join(sorted(FORWARD_ALONE))}; or the loss alone, or session.evaluate",
            )
        with self._session.pause_for_library(description):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        # Metrics must be equal, but different hardware may differ in the last bits.
        numbers = {k: v for k, v in output.metrics.items() if isinstance(v, int | float)}
        return output._replace(
            metrics={**output.metrics, **self._session.all_reduce(numbers, op="max")}
        )

    def _measured(self, dataloader: Any, prefix: str) -> EvalLoopOutput:
        model = self.model_wrapped
        model.eval()

        def measure(batch: Any) -> Mapping[str, float]:
            loss, _, _ = self.prediction_step(model, batch.inputs["batch"], True)
            if loss is None:
                raise refused("an evaluation without a loss", "no labels", "labels")
            counts = not self.args.logging_nan_inf_filter or bool(torch.isfinite(loss))
            num_samples = float(batch.inputs["size"]) if counts else 0.0
            return {"loss": float(loss) * num_samples if counts else 0.0, "samples": num_samples}

        samples = dataloader.dataset
        found = self._session.evaluate(
            WholeBatches(samples, self.args.eval_batch_size),
            measure,
            batch_size=1,
            collate=SizedCollate(dataloader.collate_fn),
        )
        loss = found["loss"] / found["samples"] if found["samples"] else float("nan")
        return EvalLoopOutput(None, None, {f"{prefix}_loss": loss}, len(samples))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        raise refused("a checkpoint of Trainer", "control.should_save", "checkpoints=...")

    def _present(self) -> TrainerSteps:
        assert self._steps is not None, "made before the first epoch"
        return self._steps


def _rate_of_later_step(rate: Callable[[int], float], num_steps_more: int, step: int) -> float:
    return rate(step + num_steps_more)


class SessionSeq2SeqTrainer(SessionTrainer, Seq2SeqTrainer):
    """SessionTrainer on Seq2SeqTrainer, whose evaluations generate sequences."""


class TrainerCounts:
    """Registered state of Trainer: the best metric, and callbacks' exported state."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def _callbacks(self) -> list[Any]:
        found = self._trainer.callback_handler.callbacks
        return [
            each
            for each in found
            if isinstance(each, ExportableState) and not isinstance(each, TrainerControl)
        ]

    def state_dict(self) -> dict[str, Any]:
        state = self._trainer.state
        return {
            "best_metric": state.best_metric,
            "best_global_step": state.best_global_step,
            "callbacks": [dict(each.state()["attributes"]) for each in self._callbacks()],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = self._trainer.state
        state.best_metric = state_dict["best_metric"]
        state.best_global_step = state_dict["best_global_step"]
        for each, attributes in zip(self._callbacks(), state_dict["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(each, name, value)


class _Position(TrainerCallback):
    def __init__(self, trainer: SessionTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        order = self._trainer._present().order
        epoch, taken = order.epoch_and_batch_index(state.global_step)
        state.epoch = epoch + taken / order.steps_per_epoch

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        order = self._trainer._present().order
        if control.should_epoch_stop and order.epoch_and_batch_index(state.global_step)[1]:
            raise refused(
                "an epoch that ends before its samples do",
                "control.should_epoch_stop",
                "control.should_training_stop, which ends the job",
            )


def _refuse(trainer: SessionTrainer) -> None:
    args, dataset = trainer.args, trainer.train_dataset
    own = "a strategy of session.distribute: SessionTrainer(strategy=...)"
    kept = "save_strategy='no', and SessionTrainer(checkpoints=shoal.Checkpoints(...))"
    best = "save_strategy='no' without it, and trainer.save_model(...) in a callback's on_evaluate"
    generates = getattr(args, "predict_with_generate", False)
    table: list[tuple[bool, str, str]] = [
        (args.fp16, "fp16=True", "bf16=True, or float32"),
        (bool(args.fsdp), "fsdp", own),
        (bool(args.deepspeed), "deepspeed", own),
        (args.parallelism_config is not None, "parallelism_config", own),
        (args.world_size != 1 or args.n_gpu > 1, "several processes or GPUs", "`shoal run`"),
        (args.auto_find_batch_size, "auto_find_batch_size=True", "a batch size"),
        (args.torch_compile, "torch_compile=True", "torch.compile(model) before it is distributed"),
        (args.load_best_model_at_end, "load_best_model_at_end=True", best),
        (args.save_strategy != "no", f"save_strategy={str(args.save_strategy.value)!r}", kept),
        (args.enable_jit_checkpoint, "enable_jit_checkpoint=True", kept),
        (
            generates and not isinstance(trainer, Seq2SeqTrainer),
            "predict_with_generate=True",
            "SessionSeq2SeqTrainer, whose evaluation generates sequences",
        ),
        (args.eval_on_start, "eval_on_start=True", "trainer.evaluate() after a step"),
        (
            args.fp16_full_eval or args.bf16_full_eval,
            "an evaluation in another dtype",
            "bf16=True, which evaluates under autocast",
        ),
        (
            args.train_sampling_strategy not in ("random", "sequential"),
            f"train_sampling_strategy={args.train_sampling_strategy!r}",
            "'random' or 'sequential'",
        ),
        (
            isinstance(dataset, IterableDataset),
            "an IterableDataset",
            "a data set with len() and items by index",
        ),
    ]
    for is_given, seen, expected in table:
        if is_given:
            raise refused("a session does not support this option of Trainer", seen, expected)
