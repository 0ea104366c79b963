"""Strategies whose members lease their samples: each trains at its own pace."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Protocol

from shoal.data.order import Order
from shoal.strategies.base import Strategy
from shoal_client.connection.coordinators import Coordinators
from shoal_client.progress.ranges import SampleRange


class SampleLeases(Protocol):
    """Ranges of samples that a member holds, in the order in which to train on them."""

    def __iter__(self) -> Iterator[SampleRange | None]:
        """Yield ranges of at most a global batch, and None repeatedly while there is no range."""
        ...

    def done(self, trained: SampleRange, /) -> None:
        """Report the range as completed: its step can no longer be lost. Thread-safe."""
        ...

    def close(self) -> None:
        """Report completed ranges and give back the others."""
        ...


class LeasingStrategy(Strategy):
    """Base of the asynchronous strategies."""

    synchronous: ClassVar[bool] = False

    @abstractmethod
    def lease_samples(self, order: Order, coordinators: Coordinators) -> SampleLeases:
        """Lease ranges of the order's samples until the members together have trained on all of
        them.

        Called once, after the first `enter`.
        """
