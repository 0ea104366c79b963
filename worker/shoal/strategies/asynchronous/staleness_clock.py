"""The bound on how far members are apart: `async`, `ssp` or `bsp`.

- `async`: no bound. No member ever waits.
- `ssp`, stale synchronous parallel: a step of round n uses values that include every live member's
  pushes up to round n - `bound` - 1. When a push of round n is applied, no member is in a round
  beyond n + `bound`.
- `bsp`, bulk synchronous parallel: every member's push of round n is applied before any pull of
  round n + 1, and all members compute each round on the same values.

No member waits for a member that is lost, drained or without samples.
"""

from collections.abc import Mapping

from shoal.backends.abortable.waiter import waiting
from shoal.membership.draining import drained
from shoal.membership.generation import Context
from shoal_client.connection.coordinators import Coordinators
from shoal_client.progress.clocks import Clock
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import as_index

CONSISTENCIES = ("async", "ssp", "bsp")
DEFAULT_BOUND = 4
MAX_BOUND = 1 << 20


class StalenessClock:
    """Clock that decides when one member's steps may begin. Used on the trainer's thread."""

    def __init__(self, consistency: str, bound: int | None) -> None:
        """`bound`: in rounds, for `ssp` only; 4 by default.

        Raises InvalidSpec for an unknown consistency, or a wrong bound.
        """
        if consistency not in CONSISTENCIES:
            raise InvalidSpec(
                "there is no such consistency",
                seen=repr(consistency),
                expected=f"one of {', '.join(map(repr, CONSISTENCIES))}",
            )
        if bound is not None:
            bound = as_index("staleness_bound", bound)
        if bound is not None and (consistency != "ssp" or not 0 <= bound <= MAX_BOUND):
            raise InvalidSpec(
                "staleness_bound is out of range, or belongs to another consistency",
                seen=f"staleness_bound={bound!r} with consistency={consistency!r}",
                expected=f"0 to {MAX_BOUND} rounds, with consistency='ssp'",
                fix="consistency='bsp' is a bound of 0 with the same values for all.",
            )
        self._consistency = consistency
        self._bound = 0 if consistency == "bsp" else DEFAULT_BOUND if bound is None else bound
        self._clock: Clock | None = None
        self._coordinators: Coordinators | None = None

    def fields(self) -> Mapping[str, str]:
        """Fields that all members must have in common."""
        bound = f"({self._bound})" if self._consistency == "ssp" else ""
        return {"consistency": f"{self._consistency}{bound}"}

    def attach(self, context: Context) -> None:
        """Connect to the coordinators if there is a bound."""
        if self._consistency == "async":
            return
        self._coordinators = Coordinators(context.coordinators)
        limit_s = context.limits.collective_s or 60.0
        # Longer than `limit_s`, after which a member that blocks the others is expelled.
        self._clock = Clock(
            self._coordinators,
            context.token,
            bound=self._bound,
            wait_s=3 * limit_s,
            ended=context.ended,
        )

    @property
    def wants_values(self) -> bool:
        """True if a push should return the values after it; else the next step pulls them."""
        return self._consistency != "bsp"

    def begin(self) -> bool:
        """Wait until a step may begin; True if newer values must be pulled for it.

        Raises Drained if this member was asked to leave, and what `Clock.begin` raises.
        """
        with drained(), waiting:
            return self._clock.begin() if self._clock is not None else False

    def before_push(self) -> None:
        """Wait until a push of this step may be applied. Raises what `begin` raises."""
        if self._clock is not None and self._consistency == "bsp":
            with drained(), waiting:
                self._clock.await_pulled()

    def pushed(self) -> None:
        """Note that the step's push is acknowledged."""
        if self._clock is not None:
            self._clock.finished()

    def rest(self) -> None:
        """Note that this member has no samples for now: others do not wait for it."""
        if self._clock is not None:
            self._clock.rest()

    def metrics(self) -> Mapping[str, float]:
        """Figures for the health report."""
        return {"round": float(self._clock.round)} if self._clock is not None else {}

    def close(self) -> None:
        if self._coordinators is not None:
            self._coordinators.close()
