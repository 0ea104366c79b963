"""The elastic life around a layout: new in each generation, filled with what members hold."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from shoal.layouts.base import Layout, World


class LaidOut:
    """A synchronous strategy in terms of how it lays a model over the ranks of a generation."""

    name: ClassVar[str]

    def __init__(self, *, copies: int = 1, copy_every_steps: int = 10) -> None:
        self._copies = copies
        self._copy_every_steps = copy_every_steps

    @abstractmethod
    def lay_out(self, model: nn.Module, world: World) -> Layout:
        """See `shoal.layouts.base.LayOut`. Called anew for each generation."""

    def check(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Raise what this model or optimizer is to be refused with. Called once, on whole weights.

        The base has checked that there is something to train and whose the parameters are.
        """

    def options(self) -> Mapping[str, str]:
        """The strategy's options that all members must have in common, for the proposal."""
        return {}


__all__ = ["LaidOut"]
