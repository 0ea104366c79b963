"""DistributedDataParallel whose reducer is prepared when a backward pass begins."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointFunction

from shoal.torch_private.watching import before_calls
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import as_number

_UNFINISHED = "Expected to have finished reduction in the prior iteration"


def bucket_size(bucket_mb: float) -> float:
    """Return the size as a Python number; raises InvalidSpec unless it is above 0."""
    size_mb = as_number("bucket_mb", bucket_mb)
    if not size_mb > 0:
        raise InvalidSpec("bucket_mb is out of range", seen=f"{size_mb}", expected="above 0")
    return size_mb


class ReplicatedModule(DistributedDataParallel):
    """Torch's wrapper, with calls of `begin_backward` and `end_backward` around each backward pass.

    Torch prepares the reducer after the forward pass. Here the parameters to reduce are found from
    the loss. So a loss may come from several forward passes, and a step may have several losses of
    different parts of the model. Without `is_notified_of_passes` it behaves as torch's own.

    A reentrant checkpoint runs autograd within autograd: a parameter of a block that is used twice
    gets two gradients, and is not found from the loss. Gradients of such a pass are reduced after
    the pass.
    """

    def __init__(
        self,
        *args: Any,
        is_notified_of_passes: bool,
        unfinished: Callable[[], Exception],
        **kwargs: Any,
    ) -> None:
        """`unfinished()` returns the error to raise if the previous pass left out parameters."""
        super().__init__(*args, **kwargs)
        self._is_notified, self._unfinished = is_notified_of_passes, unfinished
        self._was_called = self._reduces_after = False
        self._num_checkpoints = 0
        before_calls(CheckpointFunction, "apply", _note_checkpoint)

    def communicates_in_forward(self, *, is_first_step: bool) -> bool:
        """True if ranks broadcast buffers, or agree on the order of buckets, in a forward pass."""
        syncs: bool = self.will_sync_module_buffers()  # type: ignore[no-untyped-call]
        return is_first_step or syncs

    def _pre_forward(self, *inputs: Any, **named: Any) -> Any:
        with self._finishing():
            return super()._pre_forward(*inputs, **named)  # type: ignore[no-untyped-call]

    def _post_forward(self, output: Any) -> Any:
        if not self._is_notified:
            return super()._post_forward(output)  # type: ignore[no-untyped-call]
        # Rank 0's buffers are received in the first forward pass before each backward pass. A
        # later write would change tensors that this first pass saved for backward.
        self.require_forward_param_sync = False
        self._was_called = self._was_called or torch.is_grad_enabled()
        return output

    def begin_step(self) -> None:
        """Begin a step. Gradients are reduced only if the wrapper has a forward pass in the
        step.
        """
        if self._is_notified:
            self._was_called = False
            self.require_forward_param_sync = True

    def begin_backward(self, loss: Tensor) -> None:
        """Prepare the reducer for a backward pass of the loss."""
        if not self._is_notified:
            return
        self._reduces_after = self._num_checkpoints != _thread_state.num_checkpoints
        self._num_checkpoints = _thread_state.num_checkpoints
        self.require_forward_param_sync = self.require_backward_grad_sync
        if self._reduces and not self._reduces_after:
            self._prepare(loss)

    def end_backward(self) -> None:
        """End the backward pass: reduce its gradients now if that was postponed."""
        if not self._is_notified or not self._reduces or not self._reduces_after:
            return
        held = [each for each in self._module_parameters if each.requires_grad]
        if reached := [each for each in held if each.grad is not None]:
            zero_loss: Tensor = _ZeroLoss.apply(*reached)  # type: ignore[no-untyped-call]
            self._prepare(zero_loss)
            zero_loss.backward(inputs=reached)  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """Drop the reducer and `unfinished`. May be called twice.

        Dropping the last reference to a reducer joins Gloo's threads.
        """
        if hasattr(self, "reducer"):
            del self.logger, self.reducer, self._unfinished

    @property
    def _reduces(self) -> bool:
        return self.require_backward_grad_sync and self._was_called

    def _prepare(self, loss: Tensor) -> None:
        with self._finishing():
            # DDP does this in a forward pass: the first pass alone decides the order of buckets.
            self.reducer._rebuild_buckets()
            self.reducer.prepare_for_backward([loss] if self.find_unused_parameters else [])

    @contextmanager
    def _finishing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if _UNFINISHED in str(error):
                raise self._unfinished() from error
            raise


class _ZeroLoss(torch.autograd.Function):
    """A loss whose gradients are zero."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.zeros = [each.new_zeros(()).expand(each.shape) for each in parameters]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return tuple(ctx.zeros)


class _ThreadCheckpoints(threading.local):
    """State of each thread: members may be threads of one process."""

    num_checkpoints = 0


_thread_state = _ThreadCheckpoints()


def _note_checkpoint(*_: Any) -> None:
    if torch.is_grad_enabled():
        _thread_state.num_checkpoints += 1
