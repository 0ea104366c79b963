"""Micro-batches of one step, with a check that each has one backward pass."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.checkpoint import CheckpointFunction

from shoal import randomness
from shoal.data.batches import Batch
from shoal.data.order import range_of_rank
from shoal.data.parts import cut, has_all_rows, rows_of_fewer
from shoal.layouts.base import LossFunction
from shoal.layouts.buffers import BuffersAside
from shoal.layouts.gathered_rows import is_gather
from shoal.layouts.synced_batchnorm import normalises_members
from shoal.model.other_parameters import nodes_from, nodes_of
from shoal.step_context import StepContext, current, set_current
from shoal.strategies.base import Strategy
from shoal.torch_private.tensors import counted_targets, plain_sums
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import as_index, as_number

NEAR_NODES = 64
"""Approximate number of nodes after which the search for means in a loss's graph ends."""


def scaled(loss_function: LossFunction, fraction: float) -> LossFunction:
    """Return a loss function that returns this fraction of the loss."""
    if fraction == 1.0:
        return loss_function
    return lambda outputs, targets: loss_function(outputs, targets) * fraction


@contextmanager
def loss_to_backward(loss: Tensor, weight: float) -> Iterator[Tensor]:
    """Yield the loss to call backward on. With weight 0, a backward pass within the context sets
    all gradients to 0: a mean over no tokens is NaN."""
    if weight:
        yield loss
        return
    loss = loss.nan_to_num()
    nodes = nodes_of(loss)
    # Below these nodes, other members' losses add gradients.
    nodes -= nodes_from(before for node in nodes if _is_shared(node) for before in _before(node))
    handles = [node.register_prehook(_zeros) for node in nodes]
    try:
        yield loss
    finally:
        for handle in handles:
            handle.remove()


def _is_shared(node: Node) -> bool:
    """True if the node's gradients depend on other members' losses; reentrant checkpoints may
    contain such nodes."""
    function = getattr(node, "_forward_cls", None)
    return (
        is_gather(node)
        or normalises_members(node)
        or function is CheckpointFunction
        or getattr(function, "__module__", "") == "torch.distributed.nn.functional"
    )


def _zeros(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # The gradient of an output that the loss does not depend on is None.
    return tuple(None if each is None else torch.zeros_like(each) for each in gradients)


def _before(node: Node) -> Iterable[Node | None]:
    return (each for each, _ in node.next_functions)


def _near(loss: Tensor) -> Iterable[Node]:
    nodes = [loss.grad_fn] if loss.grad_fn is not None else []
    for node in nodes:
        new = [before for before, _ in node.next_functions if before not in nodes]
        nodes += [before for before in new if before is not None]
        if len(nodes) > NEAR_NODES:
            break
    return nodes


def _is_even(counts: Tensor, num_samples: int) -> bool:
    """True if all samples have the same sum of counts, for targets of shape (samples, rest) or
    (rest, samples)."""
    if counts.numel() % num_samples:
        return False
    by_sample = counts.reshape(num_samples, -1).sum(1)
    samples_last = counts.reshape(-1, num_samples).sum(0)
    return any(torch.allclose(sums, sums[0]) for sums in (by_sample, samples_last))


def _check_mean(loss: Tensor, num_samples: int, num_gathered: int = 0) -> None:
    """Raise InvalidSpec if the loss is a weighted mean over targets, and the sums of weights differ
    between the samples. Finds only means of torch's loss functions. Allows a mean over the
    `num_gathered` rows of all members."""
    weights = [counts for counts in map(counted_targets, _near(loss)) if counts is not None]
    if len(weights) >= num_samples > 1:
        return  # The loss is a mean over samples, of a mean for each sample.
    for counts in weights:
        if num_gathered and not counts.numel() % num_gathered:
            continue
        if not _is_even(counts, num_samples):
            raise InvalidSpec(
                "a loss that is not a mean over samples: with another number of members the job"
                " would train a different loss",
                seen=f"a mean over targets whose weights sum to {float(counts.sum()):g}, and differ"
                f" between the {num_samples} samples: ignore_index, class weights, or a part of"
                " the samples",
                expected="session.backward(loss, weight=...), with the sum of these weights",
                fix="weight=(targets != -100).sum(), or class_weights[targets].sum(): see 'Losses"
                " by token' in docs/loop.md. Under strategies that support no weights: take a mean"
                " for each sample, and then the mean of these means.",
            )


def _check_sum(loss: Tensor, num_samples: int, num_gathered: int = 0) -> None:
    """Raise InvalidSpec for an undivided sum over `num_samples` samples, which the share's weight
    would scale again. Allows a sum over the `num_gathered` rows of all members."""
    for shape in plain_sums(loss):
        if num_gathered and shape[0] % num_gathered == 0:
            continue
        if num_samples > 1 and shape[0] % num_samples == 0:
            size = " x ".join(map(str, shape))
            raise InvalidSpec(
                "a loss that is a sum over samples: with another number of members the job would"
                " train a different loss",
                seen=f"reduction='sum' over {size}, of {num_samples} samples, undivided",
                expected="a mean over the samples of the share, loss / len(batch.indices), or over"
                " the items that weight= counts",
                fix="To train the sum over the whole batch, as one process does, multiply that mean"
                " by the global batch size: see 'Losses that are a sum over samples' in"
                " docs/strategies.md.",
            )


def _in_part(whole: StepContext, start: int, stop: int, *, has_samples: bool) -> StepContext:
    samples, batchnorm = whole.samples, whole.batchnorm
    if samples is not None:
        samples = replace(samples, first=samples.first + start, count=stop - start)
    if batchnorm is not None:
        batchnorm = replace(batchnorm, has_samples=has_samples)
    return replace(current(), samples=samples, batchnorm=batchnorm)


class MicroBatches:
    """Parts into which one step's batch is cut, with checks of their backward passes."""

    def __init__(self, strategy: Strategy, batch: Batch | None, max_parts: int) -> None:
        self._strategy = strategy
        self._batch = batch
        self._max_parts = max_parts
        self._num_parts = 0
        """Number of parts; 0: the batch is not cut."""
        self._num_begun = 0
        self._num_passes = 0
        self._by_weight = False
        self._part: Batch | None = None
        self._refusal: InvalidSpec | None = None
        self._aside: BuffersAside | None = None
        """The model's buffers from before the passes of stand-ins."""
        self.num_gathered = 0
        """Number of rows that the last `session.gather` returned; 0 without a call."""

    @property
    def is_in_stand_in(self) -> bool:
        """True within a part, or a batch, that repeats a sample since this member has no other."""
        present = self._part or self._batch
        return present is not None and present.is_stand_in

    def _fraction(self) -> float:
        if self._part is None or self._batch is None:
            return 1.0
        size = self._batch.num_samples
        return self._part.num_samples / size if size else 1.0 / self._num_parts

    def parts(self, batch: Batch, num_parts: int) -> Iterator[Batch]:
        """See `Batch.parts`."""
        num_parts = as_index("the number of parts", num_parts)
        self._check(batch, num_parts)
        self._num_parts = num_parts
        whole = current()
        size = max(batch.num_samples, 1)
        states = randomness.generator_states() if batch.num_samples < num_parts else None
        for index in range(num_parts):
            self._check_passed()
            self._restore()
            start, stop = range_of_rank(0, batch.num_samples, index, num_parts)
            # No pass gets an empty batch: an empty part repeats a sample, with weight 0.
            rows = (start, stop) if stop > start else (0, 1)
            if stop == start:
                self.begin_stand_in()
                if states is not None:
                    randomness.restore_generators(states)
            self._part = replace(
                batch,
                inputs=cut(batch.inputs, *rows, size),
                targets=cut(batch.targets, *rows, size),
                indices=batch.indices[start:stop],
                weight=batch.weight * (stop - start) / size,
                first=batch.first + start,
            )
            self._num_begun += 1
            self._strategy.begin_part(index, num_parts)
            set_current(_in_part(whole, *rows, has_samples=stop > start))
            yield self._part
        self._check_passed()
        self._restore()
        self._part = None
        set_current(replace(current(), samples=whole.samples, batchnorm=whole.batchnorm))

    def begin_stand_in(self) -> None:
        """Note that the next passes have a stand-in: their changes to buffers are undone later."""
        if self._aside is None:
            self._aside = BuffersAside(self._strategy.local_model)

    def _restore(self) -> None:
        # In a step without samples, `check_complete` restores once.
        if self._aside is not None and (self._batch is None or self._batch.num_samples):
            self._aside.restore()
            self._aside = None

    def begin_pass(self, *, by_weight: bool = False) -> float:
        """Begin a backward pass; returns its fraction of this member's share. Raises InvalidSpec
        for a part's second pass, after the loop over parts, and if only some passes of the step
        have a weight."""
        if self._num_passes and by_weight != self._by_weight:
            raise InvalidSpec(
                "some losses of a step have a weight, others have none",
                seen="session.backward(loss, weight=...) and session.backward(loss)",
                expected="a weight for all passes of the step, or for none",
            )
        self._by_weight = by_weight
        if self._num_parts and self._part is None:
            raise InvalidSpec(
                "a backward pass after the last part of the batch",
                seen=f"batch.parts({self._num_parts}), then another session.backward",
                expected="one session.backward for each part, and no other in the step",
                fix="Add any other loss to the loss of a part.",
            )
        if self._part is not None and self._num_passes == self._num_begun:
            raise InvalidSpec(
                f"a second backward pass for part {self._num_begun} of {self._num_parts}",
                expected="one session.backward for each part",
                fix="If there are several losses, pass their sum to session.backward.",
            )
        self._num_passes += 1
        return self._fraction()

    def backward(self, loss: Tensor, fraction: float, counted: float | None) -> None:
        """Compute gradients of a loss: the mean over `counted` items, such as tokens, or, if None,
        over this fraction of the share."""
        if counted is not None:
            with loss_to_backward(loss, counted) as counts:
                self._strategy.backward_by_weight(counts, counted)
        else:
            weight = self._batch.weight if self._batch is not None else 1.0
            self._strategy.backward(loss if fraction == 1.0 else loss * fraction, weight)

    def check_mean(self, loss: Tensor, *, by_weight: bool) -> None:
        """Raise InvalidSpec for a loss that is a sum over the samples, and for a loss that has no
        weight and is not a mean over them. For a whole batch, `check_complete` raises, if the step
        has no other pass."""
        present = self._part or self._batch
        if present is None or not present.indices or not self._strategy.cuts_batches:
            return
        try:
            _check_sum(loss, len(present.indices), self.num_gathered)
            if not by_weight:
                _check_mean(loss, len(present.indices), self.num_gathered)
        except InvalidSpec as refusal:
            if self._part is not None:
                raise
            self._refusal = refusal

    def check_samples(self) -> None:
        """Raise InvalidSpec if the batch lacks some of its samples: in a loss without a weight, its
        remaining samples would count for more."""
        batch = self._batch
        if batch is None or not batch.indices or not self._strategy.cuts_batches:
            return
        size = len(batch.indices)
        if has_all_rows(batch.inputs, size):
            return
        rows = rows_of_fewer((batch.inputs, batch.targets), size)
        if rows is not None:
            raise InvalidSpec(
                f"a loss without a weight, on a batch that lacks samples, in step {batch.step}",
                seen=f"{rows} of {size} samples, as from a collate function that leaves out None"
                " samples",
                expected="session.backward(loss, weight=...) in each pass, with the number of"
                " samples that the loss is a mean over: with other shares of the batch the job"
                " would train a different loss",
                fix="weight=len(batch.targets); or replace each missing sample by another.",
            )

    def checked(self, loss_function: LossFunction, look: Callable[[Tensor], None]) -> LossFunction:
        """Return the loss function with a check, for strategies that call it several times, that
        each loss is a mean over the samples. `look` is called with each loss."""

        def checked(outputs: Any, targets: Any) -> Tensor:
            loss = loss_function(outputs, targets)
            if not isinstance(loss, Tensor):
                return loss
            look(loss)
            cuts = self._batch is not None and self._strategy.cuts_batches
            if cuts and isinstance(targets, Tensor) and targets.ndim:
                _check_sum(loss, len(targets), self.num_gathered)
                _check_mean(loss, len(targets), self.num_gathered)
            return loss

        return checked

    def counted(self, weight: float | Tensor) -> float:
        """Return the weight as a number; 0 if the present part or batch has no samples. Raises
        InvalidSpec for a weight that is negative or not finite."""
        one = weight.reshape(()) if isinstance(weight, Tensor) and weight.numel() == 1 else weight
        value = as_number("the weight of a loss", one)
        if not math.isfinite(value) or value < 0:
            raise InvalidSpec(
                "the weight of a loss is out of range",
                seen=f"weight={value}",
                expected="the number of tokens (or other items that the loss averages): 0 or more",
            )
        present = self._part or self._batch
        return value if present is None or present.indices else 0.0

    def check_whole(self) -> None:
        """Raise InvalidSpec within a loop over several parts: their samples depend on the number of
        members."""
        if self._part is not None and self._num_parts > 1:
            raise InvalidSpec(
                "session.gather in a loop over the parts of a batch",
                seen=f"batch.parts({self._num_parts})",
                expected="session.gather of the rows of the whole share: with another number of"
                " members a part would have other samples, and the job would train a different"
                " loss",
                fix="Before the loop, compute features without gradients, gather them, and compute"
                " the loss's gradient for each feature. In the loop, train each part with its"
                " gradients: see 'In parts' in docs/contrastive.md.",
            )

    def check_dropping(self) -> None:
        """Raise InvalidSpec for gradients that the script drops in a loop over several parts, after
        the first part's pass."""
        if self._part is not None and self._num_parts > 1 and self._num_passes:
            raise InvalidSpec(
                "zero_grad() in a loop over the parts of a batch",
                seen=f"zero_grad() after {self._num_passes} of {self._num_parts} parts were trained"
                " on",
                expected="gradients of all parts at the end of the step: with another number of"
                " members a part would have other samples, and the job would train a different"
                " loss",
                fix="Leave out the call: each step begins without gradients.",
            )

    def check_complete(self) -> None:
        """Check a step before it is committed, and restore buffers that stand-ins have changed.
        Raises InvalidSpec if a part had no backward pass, or for a loss that `check_mean` noted."""
        if self._refusal is not None and self._num_passes == 1:
            raise self._refusal
        if self._aside is not None:
            self._aside.restore()
        if self._num_passes < self._num_parts:
            raise InvalidSpec(
                f"only {self._num_passes} of {self._num_parts} parts of the batch were trained on",
                seen="a loop over batch.parts that ended early, or a part without a backward pass",
                expected="session.backward(loss) for each part, on every member",
            )

    def _check_passed(self) -> None:
        if self._num_passes < self._num_begun:
            raise InvalidSpec(
                f"part {self._num_begun} of {self._num_parts} was not trained on",
                expected="one session.backward(loss) for each part",
                fix="Multiply the loss of a part that should not count by 0.",
            )

    def _check(self, batch: Batch, num_parts: int) -> None:
        if self._part is not None:
            raise InvalidSpec(
                "parts within parts",
                seen=f"batch.parts({num_parts}) in a loop over batch.parts({self._num_parts})",
                expected=f"one loop: batch.parts({self._num_parts * num_parts})",
            )
        if batch is not self._batch:
            raise InvalidSpec(
                "parts of a batch that this step does not train on",
                expected="the batch that session.batches handed out last",
            )
        if self._num_parts:
            raise InvalidSpec(
                "a step loops over the parts of its batch once",
                seen=f"batch.parts({num_parts}) after batch.parts({self._num_parts})",
                expected="one loop over all parts, with one session.backward each",
            )
        if self._num_passes:
            raise InvalidSpec(
                "batch.parts after a backward pass of the whole batch",
                expected="only the parts' calls of session.backward in the step",
            )
        if not 1 <= num_parts <= self._max_parts:
            raise InvalidSpec(
                "the number of parts is out of range",
                seen=f"batch.parts({num_parts})",
                expected=f"1 to {self._max_parts}, the samples of a global batch",
            )
