"""Steps of a job for a trainer whose loop calls each phase of a step separately."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from transformers.trainer_pt_utils import LabelSmoother

from shoal.data.batches import Batch
from shoal.session.batch_sources import Batches
from shoal.session.session import Session
from shoal.session.step import Step
from shoal_proto.errors import InvalidSpec


class StepRetaken(Exception):
    """The step did not happen: continue with the job's present step."""


class TrainerSteps:
    """Steps that begin with a batch, pass through its parts, and are committed."""

    def __init__(self, session: Session, batches: Batches) -> None:
        self._session, self._batches = session, batches
        self._ahead: Batch | None = None
        self._whole: Batch | None = None
        self._parts: Iterator[Batch] = iter(())
        self._step: Step | None = None
        self.skip = 0
        """Number of steps of the epoch taken before this member reached it."""
        self.weight: float | None = None
        """Weight of the next loss that is passed backward; None: by samples."""
        self.is_over = False
        """True if all members have reached the job's end."""

    def position(self) -> int:
        """Return the job's present step; waits for the others after a loss."""
        batch = self._peek()
        return self._session.step_number if batch is None else batch.step

    def _peek(self) -> Batch | None:
        if self._ahead is None and not self.is_over:
            self._ahead = next(self._batches, None)
            self.is_over = self._ahead is None
        return self._ahead

    def begin(self, num_parts: int, expected: int) -> bool:
        """Open the next step, cut into so many parts; False if there is none.

        Raises TakenAgain if it is not this one that comes next.
        """
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

    def last_wanted(self, reason: str) -> None:
        """Let the step that is open be the job's last, if there are further samples."""
        if self._session.step_number + 1 < len(self._batches):
            self._session.stop(reason)

    def next_part(self) -> tuple[Batch, Batch]:
        """The next part of the step, and this member's whole share of it."""
        part = next(self._parts, None)
        if part is None or self._whole is None:
            raise InvalidSpec(
                "a pass that is no part of a step",
                expected="one training_step for each part, as Trainer's loop has it",
            )
        return part, self._whole

    @contextmanager
    def watching(self) -> Iterator[None]:
        """End the step in the block if a member is lost. Raises TakenAgain once this member is
        ready."""
        try:
            yield
        except BaseException as error:
            step, self._step = self._step, None
            if step is None or not step.__exit__(type(error), error, error.__traceback__):
                raise
            raise StepRetaken from None

    def commit(self) -> None:
        """End the step. Raises TakenAgain if it did not happen."""
        with self.watching():
            next(self._parts, None)
        step, self._step = self._step, None
        assert step is not None, "it was begun"
        step.__exit__(None, None, None)
        if not step.committed:
            raise StepRetaken

    @property
    def is_done(self) -> bool:
        """True if this member has committed the job's last step."""
        return self.is_over or self._session.step_number >= len(self._batches)

    def finish(self) -> None:
        """Wait until all members have come to the end. Raises TakenAgain if a step comes first."""
        if self._peek() is not None:
            raise StepRetaken


class CountedSmoother(LabelSmoother):
    """Trainer's, which knows what its last mean was taken over: of a model that does not take
    `num_items_in_batch` the labels of one part, as many as are no padding."""

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
        """Weight of the loss that was computed last; None if it is a mean over samples.

        Raises InvalidSpec if it is a mean over something else, computed for each part by itself.
        """
        labels, self._labels = self._labels, None
        if labels is None:
            return None
        counts = labels.ne(self.ignore_index).reshape(len(labels), -1).sum(1)
        if labels.dim() > 1 and num_parts == 1:
            return float(counts.sum())
        if not bool(counts.eq(labels[:1].numel()).all()):
            raise InvalidSpec(
                "a smoothed loss that is a mean over the labels of each part for itself",
                seen="label_smoothing_factor, labels that are ignored, and a model that does not"
                " take num_items_in_batch",
                expected="a model whose forward takes **kwargs, or gradient_accumulation_steps=1"
                " with a label for each token",
                fix="docs/integrations.md",
            )
        return None


class CollatedParts:
    """Batches as the script's own `collate` makes them, inputs and targets together."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        collated = self._collate(samples)
        # Those of tokenizers are mappings that can be made from a dict in their own way only.
        data = getattr(collated, "data", collated)
        if not isinstance(data, Mapping):
            raise InvalidSpec(
                "a data collator that returns no named values",
                seen=type(collated).__name__,
                expected="a dict of tensors, which are the model's arguments",
            )
        return {"batch": dict(data)}


class WholeBatches(Dataset[list[Any]]):
    """A data set in batches of which members measure each as one process does: a mean over tokens
    depends on what it is taken of."""

    def __init__(self, samples: Any, batch_size: int) -> None:
        self._samples, self._batch_size = samples, batch_size

    def __len__(self) -> int:
        return math.ceil(len(self._samples) / self._batch_size)

    def __getitem__(self, index: int) -> list[Any]:
        first = index * self._batch_size
        last = min(first + self._batch_size, len(self._samples))
        return [self._samples[place] for place in range(first, last)]


class CollatedBatch(CollatedParts):
    """A collated batch, with its number of samples."""

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        (batch,) = samples
        return {**super().__call__(batch), "size": len(batch)}


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
    """Optimizer whose step is the session's; all else is the wrapped optimizer's."""

    def __init__(self, optimizer: Optimizer, commit: Any) -> None:
        self.optimizer, self._commit = optimizer, commit

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            raise refused("an optimizer that computes the loss itself", "a closure", "none")
        self._commit()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Done by the session at the beginning of the step."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def refused(what: str, seen: str, expected: str) -> InvalidSpec:
    """The error for what a session has no place for."""
    return InvalidSpec(what, seen=seen, expected=expected, fix="docs/integrations.md")
