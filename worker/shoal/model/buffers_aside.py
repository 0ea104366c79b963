"""Buffers of a model around passes of samples that do not count."""

import torch
from torch import nn

from shoal.torch_private.modules import buffer_table


class BuffersAside:
    """The buffers of a model, persistent or not, as they are when this is made."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (table, name, buffer, buffer.detach().clone())
            for part in model.modules()
            for table in [buffer_table(part)]
            for name, buffer in table.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Give them back what they held, also those that a module has put others in the place of.
        Buffers that still hold it are not written to."""
        for table, name, buffer, before in self._kept:
            table[name] = buffer
            if not torch.equal(buffer, before):
                buffer.copy_(before)
