"""Steps of a job for a trainer that calls each phase of a step separately."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from transformers.trainer_pt_utils import LabelSmoother

from shoal.data.batches import Batch
from shoal.data.order import Order
from shoal.data.samples import Collate
from shoal.integrations.job_batches import WholeCollate
from shoal.session.batch_sources import Batches
from shoal.session.session import Session
from shoal.session.step import Step
from shoal_proto.errors import InvalidSpec


class StepRetaken(Exception):
    """Raised if the trainer's step was not committed, or is not the job's next step. The trainer
    continues with the job's current step."""


class TrainerSteps:
    """Steps of the job: each begins with a batch, trains its parts, and is committed."""

    def __init__(self, session: Session, batches: Batches) -> None:
        self._session, self._batches = session, batches
        self._ahead: Batch | None = None
        self._whole: Batch | None = None
        self._parts: Iterator[Batch] = iter(())
        self._step: Step | None = None
        self.skip = 0
        """Number of committed steps of the epoch that Trainer's loop still has to skip."""
        self.weight: float | None = None
        """Weight of the next loss; None: its number of samples."""
        self.is_over = False

    @property
    def order(self) -> Order:
        """Order of samples; valid once `position` has returned."""
        return self._batches.order

    def position(self) -> int:
        """Return the job's current step, once this member is in a generation."""
        batch = self._peek()
        return self._session.step_number if batch is None else batch.step

    def _peek(self) -> Batch | None:
        if self._ahead is None and not self.is_over:
            self._ahead = next(self._batches, None)
            self.is_over = self._ahead is None
        return self._ahead

    def begin(self, num_parts: int, expected: int) -> bool:
        """Open the job's next step, in `num_parts` parts. Returns False after the last step. Raises
        StepRetaken if the next step is not `expected`."""
        batch = self._peek()
        if batch is None:
            return False
        if batch.step != expected:
            raise StepRetaken
        self._ahead, self._whole = None, batch
        self._step = self._session.step()
        self._step.__enter__()
        self._parts = iter((batch,)) if num_parts == 1 else batch.parts(num_parts)
        return True

    def stop_after_step(self, reason: str) -> None:
        """Make the open step the job's last."""
        if self._session.step_number + 1 < len(self._batches):
            self._session.stop(reason)

    def next_part(self) -> tuple[Batch, Batch]:
        """Return the next part, and this member's whole share of the step."""
        part = next(self._parts, None)
        if part is None or self._whole is None:
            raise InvalidSpec(
                "a pass that is not part of a step",
                expected="one training_step for each part, as in Trainer's own loop",
            )
        return part, self._whole

    @contextmanager
    def watching(self) -> Iterator[None]:
        """End the step if the block raises. Raises StepRetaken instead if a member was lost, once
        this member can repeat the step."""
        try:
            yield
        except BaseException as error:
            step, self._step = self._step, None
            if step is None or not step.__exit__(type(error), error, error.__traceback__):
                raise
            raise StepRetaken from None

    def commit(self) -> None:
        """Commit the step. Raises StepRetaken if the step was not committed."""
        with self.watching():
            next(self._parts, None)
        step, self._step = self._step, None
        assert step is not None, "a step was begun"
        step.__exit__(None, None, None)
        if not step.committed:
            raise StepRetaken

    @property
    def is_done(self) -> bool:
        """True if this member has committed the job's last step."""
        return self.is_over or self._session.step_number >= len(self._batches)

    def finish(self) -> None:
        """Wait until all members have reached the end. Raises StepRetaken if a step must be
        repeated."""
        if self._peek() is not None:
            raise StepRetaken


class CountedSmoother(LabelSmoother):
    """Trainer's label smoother, which also records the labels of its last mean. If the model does
    not accept `num_items_in_batch`, the mean is over one part's labels, without padding."""

    _labels: Tensor | None = None

    def __call__(
        self,
        model_output: Any,
        labels: Tensor,
        shift_labels: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        alone = num_items_in_batch is None
        self._labels = (labels[..., 1:] if shift_labels else labels) if alone else None
        loss: Tensor = super().__call__(model_output, labels, shift_labels, num_items_in_batch)
        return loss

    def weight(self, num_parts: int) -> float | None:
        """Return the last loss's weight, and forget its labels; None for a mean over samples.

        Raises InvalidSpec if the loss is a separate mean over each part's labels, and some are
        ignored.
        """
        labels, self._labels = self._labels, None
        if labels is None:
            return None
        counts = labels.ne(self.ignore_index).reshape(len(labels), -1).sum(1)
        if labels.dim() > 1 and num_parts == 1:
            return float(counts.sum())
        if not bool(counts.eq(labels[:1].numel()).all()):
            raise InvalidSpec(
                "a smoothed loss that is a separate mean over the labels of each part",
                seen="label_smoothing_factor, labels that are ignored, and a model that does not"
                " take num_items_in_batch",
                expected="a model whose forward takes **kwargs, or gradient_accumulation_steps=1"
                " with a label for each token",
                fix="docs/integrations.md",
            )
        return None


class NamedCollate:
    """A script's data collator. Raises InvalidSpec unless it returns named values."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        collated = self._collate(samples)
        # A tokenizer's BatchEncoding cannot be rebuilt from a dict.
        data = getattr(collated, "data", collated)
        if not isinstance(data, Mapping):
            raise InvalidSpec(
                "a data collator that returns no named values",
                seen=type(collated).__name__,
                expected="a dict of tensors, which are the model's arguments",
            )
        return dict(data)


class WholeBatches(Dataset[list[Any]]):
    """A data set with whole batches as items: a mean over tokens depends on the batch's samples."""

    def __init__(self, samples: Any, batch_size: int) -> None:
        self._samples, self._batch_size = samples, batch_size

    def __len__(self) -> int:
        return math.ceil(len(self._samples) / self._batch_size)

    def __getitem__(self, index: int) -> list[Any]:
        first = index * self._batch_size
        last = min(first + self._batch_size, len(self._samples))
        return [self._samples[sample] for sample in range(first, last)]


class SizedCollate:
    """Collates one item of WholeBatches, with its number of samples."""

    def __init__(self, collate: Collate) -> None:
        self._collate = WholeCollate(NamedCollate(collate))

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        (batch,) = samples
        return {**self._collate(batch), "size": len(batch)}


class EpochLength:
    """Length of an epoch for Trainer: the number of parts of all steps."""

    def __init__(self, loader: DataLoader[Any], args: Any) -> None:
        self.dataset = loader.dataset
        self.batch_size = args.train_batch_size
        self._num_parts: int = args.gradient_accumulation_steps
        size: int = self.batch_size * self._num_parts
        whole, rest = divmod(len(self.dataset), size)  # type: ignore[arg-type]
        self._num_steps = whole + int(bool(rest) and not args.dataloader_drop_last)

    def __len__(self) -> int:
        return self._num_steps * self._num_parts

    def __iter__(self) -> Any:
        """Yield nothing: the parts come from `get_batch_samples`."""
        return iter(())


class SessionOptimizer:
    """Optimizer that commits the session's step."""

    def __init__(self, optimizer: Optimizer, commit: Any) -> None:
        self.optimizer, self._commit = optimizer, commit

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            raise refused("an optimizer that computes the loss itself", "a closure", "none")
        self._commit()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the session zeroes gradients."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def refused(what: str, seen: str, expected: str) -> InvalidSpec:
    """Return the error for what a session does not support."""
    return InvalidSpec(what, seen=seen, expected=expected, fix="docs/integrations.md")
