"""The passes of the step under way: which gradients count, and what is undone if it fails."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from shoal.strategies.synchronous.buffer_snapshot import BufferSnapshot


class StepPasses:
    """One step after another."""

    def __init__(self) -> None:
        self.in_step = False
        self.weighted = False
        """Whether the step had a backward pass that weighs this member's share."""
        self._computes = False
        self._buffers = BufferSnapshot()

    def begin(self, model: nn.Module | None = None) -> None:
        """A step begins; the buffers of `model` are remembered, so that it can be undone."""
        if model is not None:
            self._buffers.keep(model)
        self.in_step, self.weighted = True, False

    def commit(self) -> None:
        """The step happened."""
        self.in_step = False
        self._buffers.clear()

    def undo(self) -> bool:
        """A step under way does not happen, if there is one; whether there was."""
        was_in_step, self.in_step = self.in_step, False
        if was_in_step:
            self._buffers.restore()
        return was_in_step

    def forget(self) -> None:
        """Let go of the model."""
        self._buffers.forget()

    def ours(self) -> bool:
        """Whether a gradient that comes now was asked for through the session, if it has to be."""
        return self._computes or not self.in_step

    @contextmanager
    def weighing(self) -> Iterator[None]:
        """Within, gradients come of a loss that is weighed with this member's share."""
        self.weighted = self._computes = True
        try:
            yield
        finally:
            self._computes = False
