"""The strategies `ssp` and `bsp`: `async-sgd` with a bound on how far members are apart."""

from typing import Any, ClassVar

from shoal.strategies.asynchronous.async_sgd import AsyncSGD
from shoal.strategies.asynchronous.staleness_clock import DEFAULT_BOUND


class SSP(AsyncSGD):
    """Stale synchronous parallel: no member is more than `staleness_bound` rounds ahead of the
    slowest.
    """

    name: ClassVar[str] = "ssp"

    def __init__(self, *, staleness_bound: int = DEFAULT_BOUND, **options: Any) -> None:
        """`staleness_bound`: in rounds. `options`: see `AsyncSGD`; without `consistency`."""
        super().__init__(consistency="ssp", staleness_bound=staleness_bound, **options)


class BSP(AsyncSGD):
    """Bulk synchronous parallel: all pushes of a round are applied before any pull of the next."""

    name: ClassVar[str] = "bsp"

    def __init__(self, **options: Any) -> None:
        """`options`: see `AsyncSGD`; without `consistency`."""
        super().__init__(consistency="bsp", **options)
