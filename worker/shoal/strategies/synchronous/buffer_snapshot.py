"""The buffers of a model, such as running means, as they were when a step began."""

from collections.abc import Iterator

from torch import Tensor, nn

from shoal.torch_private.modules import buffer_table


class BufferSnapshot:
    """Forward passes change buffers; a step that does not happen has to leave them as they were."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._tables: list[dict[str, Tensor | None]] = []
        """Where the modules of the model keep them."""
        self._before: list[tuple[Tensor, Tensor]] = []

    def keep(self, model: nn.Module) -> None:
        """Remember what the buffers of this model hold now."""
        # Going through the modules of a model takes longer than all else that opens a step.
        if self._model is not model:
            self._model, self._tables = model, [buffer_table(part) for part in model.modules()]
        self._before = [(buffer, buffer.detach().clone()) for buffer in self._buffers()]

    def restore(self) -> None:
        """Give the buffers back what they held."""
        for buffer, before in self._before:
            buffer.detach().copy_(before)

    def clear(self) -> None:
        """The step was committed: what the buffers held before is of no use any more."""
        self._before = []

    def forget(self) -> None:
        """Let go of the model too."""
        self._model, self._tables, self._before = None, [], []

    def _buffers(self) -> Iterator[Tensor]:
        for table in self._tables:
            if table:
                yield from (buffer for buffer in table.values() if buffer is not None)
