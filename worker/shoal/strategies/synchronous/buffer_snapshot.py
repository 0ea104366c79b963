"""The buffers of a model, such as running means, as they were when a step began."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shoal.torch_private.modules import buffer_table, transient_buffers
from shoal.torch_private.tensors import num_writes


class BufferSnapshot:
    """Forward passes change buffers; a step that does not happen has to leave them as they were."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._tables: list[dict[str, Tensor | None]] = []
        """Where the modules of the model keep them."""
        self._passing: dict[int, str] = {}
        """Names of those that the model's state_dict leaves out, by the buffer's id."""
        self._before: list[tuple[Tensor, Tensor, int]] = []
        """Each with what it held, and how often it had been written to."""

    def keep(self, model: nn.Module) -> None:
        """Remember what the buffers of this model hold now."""
        # Going through the modules of a model takes longer than all else that opens a step.
        if self._model is not model:
            self._model, self._tables = model, [buffer_table(part) for part in model.modules()]
            self._passing = _passing(model)
        self._before = [
            (buffer, buffer.detach().clone(), num_writes(buffer)) for buffer in self._buffers()
        ]

    def changed(self) -> list[str]:
        """Names of those that the model's state_dict leaves out, and that were written to since."""
        return [
            self._passing[id(buffer)]
            for buffer, before, written in self._before
            if id(buffer) in self._passing
            and num_writes(buffer) != written
            and not torch.equal(buffer, before)
        ]

    def restore(self) -> None:
        """Give the buffers back what they held."""
        for buffer, before, _ in self._before:
            buffer.detach().copy_(before)

    def clear(self) -> None:
        """The step was committed: what the buffers held before is of no use any more."""
        self._before = []

    def forget(self) -> None:
        """Let go of the model too."""
        self._model, self._tables, self._passing, self._before = None, [], {}, []

    def _buffers(self) -> Iterator[Tensor]:
        for table in self._tables:
            if table:
                yield from (buffer for buffer in table.values() if buffer is not None)


def _passing(model: nn.Module) -> dict[int, str]:
    return {
        id(buffer): f"{path}.{name}" if path else name
        for path, part in model.named_modules()
        for name in transient_buffers(part)
        if (buffer := buffer_table(part).get(name)) is not None
    }
