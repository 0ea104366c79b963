"""Length of the training in Lightning's Trainer, and its counters, which follow the job.

Lightning counts its own process' steps, so a member that joins would begin at epoch 0.
"""

import math
from typing import Any

from lightning.pytorch import Trainer

from shoal.integrations.job_batches import JobBatches
from shoal_proto.errors import InvalidSpec

NO_LIMIT = -1
TRAINER_DEFAULT = 1000
"""`max_epochs` of a Trainer to which none was given; a given 1000 looks the same."""


def epochs_of(trainer: Trainer, epochs: int | None, steps_per_epoch: int) -> int:
    """Return the number of epochs: the batches' `epochs`, or else the Trainer's limit.

    The limit is `max_epochs` (Lightning's default: 1000) or, if that is -1, follows from
    `max_steps`. Raises InvalidSpec if neither is given, or if both are given and differ. Beside
    `epochs`, a `max_epochs` of 1000 counts as not given.
    """
    limit = trainer.max_epochs
    if epochs is None and trainer.max_steps != NO_LIMIT and limit == NO_LIMIT:
        return max(1, math.ceil(trainer.max_steps / steps_per_epoch))
    if limit is None or limit == NO_LIMIT:
        if epochs is None:
            raise InvalidSpec(
                "the length of the job is not given",
                seen="a Trainer without a limit (max_epochs=-1, or max_time alone) and batches"
                " without epochs=",
                expected="max_epochs= or max_steps= of the Trainer, or epochs= of the batches",
                fix="A callback or max_time may still end the job earlier.",
            )
        return epochs
    if epochs is None:
        return limit
    if limit not in (epochs, TRAINER_DEFAULT):
        raise InvalidSpec(
            "the Trainer and its batches are of different lengths",
            seen=f"Trainer(max_epochs={limit}) and batches(..., epochs={epochs})",
            expected="the same, or max_epochs=-1, or batches without epochs=",
        )
    return epochs


def refuse_parts_of_epochs(trainer: Trainer) -> None:
    """Raise InvalidSpec for options that end an epoch before the job does, train nothing, or
    validate after different steps on each member."""
    refused = {
        # First, so that the error names the script's option: these two set limit_train_batches.
        "fast_dev_run": bool(trainer.fast_dev_run),  # type: ignore[attr-defined]
        "overfit_batches": trainer.overfit_batches > 0,  # type: ignore[attr-defined]
        "limit_train_batches": _is_part(trainer.limit_train_batches),
        "max_epochs=0": trainer.max_epochs == 0,
        "max_steps=0": trainer.max_steps == 0,
    }
    for name, is_set in refused.items():
        if is_set:
            raise InvalidSpec(
                "an option that cuts the epochs of the job short, or trains nothing",
                seen=name,
                expected="a Trainer without it",
                fix="Pass a part of the data set, a torch.utils.data.Subset, to `batches`; or pass"
                " max_steps= to the Trainer.",
            )
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        raise InvalidSpec(
            "validation after a time, which passes at another step on each member",
            seen="val_check_interval, a time",
            expected="val_check_interval in batches, or as a part of an epoch",
        )


def _is_part(limit: int | float | None) -> bool:
    """True unless the limit is the whole epoch: 1.0 is all batches, the int 1 a single one."""
    return not (limit is None or (isinstance(limit, float) and limit == 1.0))


class JobCounters:
    """Sets a Trainer's counters to the job's position."""

    def __init__(self, trainer: Trainer, batches: JobBatches) -> None:
        self._loop: Any = trainer.fit_loop
        self._batches = batches

    def before_epoch(self, step: int) -> None:
        """Set the counters to their values before the epoch of this step."""
        epoch, _ = self._batches.epoch_and_batch_index(step)
        self._set_epoch(ready=epoch, done=epoch)
        self._set_steps(step)

    def set_before_count(self, step: int) -> None:
        """Set the counters before Lightning counts this step's batch."""
        self._set_all(step, ready=self._batches.epoch_and_batch_index(step)[1])

    def count_steps(self, step: int) -> None:
        """Overwrite Lightning's number of steps, which includes failed attempts."""
        self._set_steps(step)

    def set_after_count(self, step: int) -> None:
        """Set the counters to this step, after Lightning has counted a batch that is replaced."""
        ready = self._batches.epoch_and_batch_index(step)[1] + 1
        self._set_all(step, ready=ready)
        is_last = ready >= self._batches.steps_per_epoch
        self._loop.epoch_loop.batch_progress.is_last_batch = is_last
        self._loop._data_fetcher.done = is_last

    def _set_all(self, step: int, *, ready: int) -> None:
        epoch, done = self._batches.epoch_and_batch_index(step)
        self._set_epoch(ready=epoch + 1, done=epoch)
        self._set_steps(step)
        progress = self._loop.epoch_loop.batch_progress
        for each, before in ((progress.current, 0), (progress.total, step - done)):
            each.ready = each.started = before + ready
            each.processed = each.completed = before + done
        self._loop._data_fetcher.fetched = ready

    def _set_epoch(self, *, ready: int, done: int) -> None:
        progress = self._loop.epoch_progress
        for each in (progress.current, progress.total):
            each.ready = each.started = ready
            each.processed = each.completed = done

    def _set_steps(self, step: int) -> None:
        epoch_loop = self._loop.epoch_loop
        epoch_loop._batches_that_stepped = step
        taken = epoch_loop.automatic_optimization.optim_progress.optimizer.step
        taken.total.ready = taken.total.completed = step
