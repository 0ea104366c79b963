"""A job's batches for Lightning's Trainer, in a DataLoader's form."""

from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Trainer

from shoal.data.batches import Batch
from shoal.data.samples import Collate
from shoal.integrations.job_batches import JobBatches, WholeCollate
from shoal.integrations.trainer_limits import NO_LIMIT, JobCounters, epochs_of
from shoal_proto.errors import InvalidSpec


class LightningBatches:
    """Batches of `SessionStrategy.batches`. An iteration ends with the job's epoch."""

    def __init__(
        self,
        job_of: Callable[[int, Collate | None], JobBatches],
        epochs: int | None,
        collate: Collate | None,
        whole: WholeCollate,
    ) -> None:
        """`job_of` makes the batches for a number of epochs and a collate function. `epochs`: None:
        the Trainer decides."""
        self._job_of, self._epochs = job_of, epochs
        self._job = job_of(epochs or 1, collate)
        self._is_collated = self._job.num_columns is None
        self._collate = whole if self._is_collated else collate
        self._batch: Batch | None = None
        self._ahead: Batch | None = None
        self._counters: JobCounters | None = None
        self._until = 0
        """The Trainer's `max_steps`, if it decides the number of epochs; else 0."""
        self.is_over = False

    def decide(self, trainer: Trainer) -> int:
        """Decide and return the number of epochs. Raises what `epochs_of` raises."""
        if self._epochs is None and trainer.max_epochs == NO_LIMIT:
            self._until = max(trainer.max_steps, 0)
        epochs = epochs_of(trainer, self._epochs, len(self))
        self._job = self._job_of(epochs, self._collate)
        return epochs

    def begin(self, trainer: Trainer) -> None:
        """Wait for this member's first batch, and set the Trainer's counters to its step. Raises
        InvalidSpec if `max_steps` needs more epochs than planned."""
        self._counters, self._ahead = JobCounters(trainer, self._job), self._job.take()
        if self._job.num_steps < self._until:
            raise InvalidSpec(
                "max_steps needs more epochs than planned: earlier batches were larger",
                seen=f"max_steps={self._until}, and samples for {self._job.num_steps} steps in the"
                " epochs of this batch size",
                expected="max_epochs without max_steps, or the checkpoint's batch size",
            )
        self.is_over = self._ahead is None
        self._counters.before_epoch(
            self._job.step_number if self._ahead is None else self._ahead.step
        )

    def end(self) -> None:
        """Set the number of committed steps: Lightning must not count the last attempt."""
        assert self._counters is not None, "it was begun"
        self._counters.count_steps(self._job.step_number)

    def discard_step(self) -> None:
        """Set the number of steps to the committed ones, before Lightning counts the last attempt,
        which did not happen."""
        assert self._counters is not None, "it was begun"
        self._counters.count_steps(self._job.step_number - 1)

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch. Without it, Lightning would fetch a batch in
        advance."""
        return self._job.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        while (content := self.take()) is not None:
            assert self._counters is not None and self._batch is not None, "taken"
            self._counters.set_before_count(self._batch.step)
            yield content
            if self._job.epoch_is_done:
                return

    def take(self) -> Any:
        """Return this member's part of the next step; None after the last."""
        self._batch, self._ahead = self._ahead or self._job.take(), None
        self.is_over = self._batch is None
        return None if self._batch is None else self._content(self._batch)

    def next_batch(self) -> Any:
        """Return the next batch, in place of one that Lightning has counted."""
        content = self.take()
        if self._batch is not None and self._counters is not None:
            self._counters.set_after_count(self._batch.step)
        return content

    @property
    def is_stand_in(self) -> bool:
        """See `Batch.is_stand_in`, of the last batch."""
        return self._batch is not None and self._batch.is_stand_in

    def parts(self, num_parts: int) -> Iterator[tuple[Any, bool]]:
        """Split the last batch into micro-batches, within its step; True for a stand-in."""
        assert self._batch is not None, "a step is taken on a batch"
        for part in self._batch.parts(num_parts):
            yield self._content(part), part.is_stand_in

    def _content(self, batch: Batch) -> Any:
        if self._is_collated:
            return batch.inputs["batch"]
        if self._job.num_columns == 1:
            return (batch.inputs,)
        inputs = batch.inputs if isinstance(batch.inputs, tuple) else (batch.inputs,)
        return (*inputs, batch.targets)

    @property
    def epoch_is_done(self) -> bool:
        """See `JobBatches.epoch_is_done`."""
        return self._job.epoch_is_done

    @property
    def num_epochs_done(self) -> int:
        """See `JobBatches.num_epochs_done`."""
        return self._job.num_epochs_done

    @property
    def is_last(self) -> bool:
        """True if the last batch is of the job's last step."""
        return self._batch is not None and self._batch.step + 1 == self._job.num_steps

    @property
    def last_is_done(self) -> bool:
        """See `JobBatches.last_is_done`."""
        return self._job.last_is_done
